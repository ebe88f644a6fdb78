"""The training process polls every 60 s whether the process of the overlapped update is alive."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

from defects.case import Defect, constant, matrix
from defects.peers import Ours
from defects.upstream import Upstream, settings

LR = 1e-2
ZENFLOW = {
    "topk_ratio": 0.1,
    "select_strategy": "step",
    "select_interval": 1000,
    "update_interval": 4,
    "full_warm_up_rounds": 1,
    "overlap_step": True,
}
SETTINGS = settings(ZENFLOW, lr=LR)
ENOUGH = 12  # steps, within which either notices
NOTHING = f"nothing raised in {ENOUGH} steps"


def seconds_until_raised(step: Any) -> float | str:
    """From now until step() raises RuntimeError or a subclass of it."""
    start = time.perf_counter()
    try:
        for gradients in constant(ENOUGH):
            step(gradients)
    except RuntimeError:
        return time.perf_counter() - start
    return NOTHING


def upstream(*, kill: bool) -> float | str:
    run = Upstream([matrix()], SETTINGS)
    run.run(constant(4))
    if kill:
        os.kill(run.optimizer.process.pid, signal.SIGKILL)
        run.optimizer.process.join()
    found = seconds_until_raised(run.step)
    run.end()
    return found


def ours() -> float | str:
    run = Ours([matrix()], SETTINGS)
    run.run(constant(4))
    engine: Any = run.optimizer._training.engine.backend
    engine.engine.inject("die", 1)
    found = seconds_until_raised(run.step)
    run.optimizer.abandon()
    return found


DEFECT = Defect(
    title="the death of the optimizer process surfaces after a poll of 60 s",
    measure="seconds from the worker's death to the exception in the training process",
    settings=SETTINGS,
    expected=lambda: 0.0,
    upstream=lambda: upstream(kill=True),
    ours=ours,
    ours_is="a thread of the native engine is made to die",
    control=lambda: (upstream(kill=False), NOTHING),
    control_is="the worker lives: nothing is raised",
    tolerance=5.0,
    limit_s=300.0,
)
