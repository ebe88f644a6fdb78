"""engine.destroy() leaves the worker alive and the training process on half of its cores."""

from __future__ import annotations

import gc
import os
import time
from pathlib import Path

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
IN_TURN = settings({**ZENFLOW, "overlap_step": False}, lr=LR)


def upstream(document: dict[str, object]) -> float:
    """Workers alive and cores lost after destroy()."""
    cores = len(os.sched_getaffinity(0))
    run = Upstream([matrix()], document)
    run.run(constant(6))
    worker = getattr(run.optimizer, "process", None)
    run.engine.destroy()
    gc.collect()
    time.sleep(1.0)
    left = float(cores - len(os.sched_getaffinity(0)))
    if worker is not None and worker.is_alive():
        left += 1
        worker.terminate()
    return left


def threads() -> int:
    return len(list(Path("/proc/self/task").iterdir()))


def ours() -> float:
    """Threads alive and cores lost after close()."""
    cores, before = len(os.sched_getaffinity(0)), threads()
    run = Ours([matrix()], SETTINGS)
    run.run(constant(6))
    run.end()
    time.sleep(0.5)
    return float(cores - len(os.sched_getaffinity(0)) + max(0, threads() - before))


DEFECT = Defect(
    title="overlapped: destroy() leaves the worker behind and the training process without half of its cores",
    measure="workers alive and cores lost afterwards (on this machine)",
    settings=SETTINGS,
    expected=lambda: 0.0,
    upstream=lambda: upstream(SETTINGS),
    ours=ours,
    ours_is="threads and cores after close()",
    control=lambda: (upstream(IN_TURN), 0.0),
    control_is="`overlap_step` false",
)
