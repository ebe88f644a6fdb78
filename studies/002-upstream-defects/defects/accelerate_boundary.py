"""Accelerate sets the accumulation boundary itself in every step, which goes past ZenFlow's schedule."""

from __future__ import annotations

import itertools

from defects.case import COLUMNS, Defect, constant, matrix, moved
from defects.peers import Ours
from defects.upstream import Upstream, settings

LR, STEPS, INTERVAL = 1e-2, 8, 4
ZENFLOW = {"topk_ratio": 0.1, "select_strategy": "step", "select_interval": 1000, "update_interval": INTERVAL}
SETTINGS = settings(ZENFLOW, lr=LR)


def host_updates(*, as_accelerate: bool) -> float:
    """Steps in which a deferred column moves."""
    run = Upstream([matrix(0.0)], SETTINGS)
    trace = [run.weights()]
    for gradients in constant(STEPS):
        if as_accelerate:  # what its DeepSpeedEngineWrapper.backward does
            run.engine.set_gradient_accumulation_boundary(is_boundary=True)
        run.step(gradients)
        trace.append(run.weights())
    return float(sum(moved(a[0], b[0], LR, range(1, COLUMNS)) != 0 for a, b in itertools.pairwise(trace)))


def ours() -> float:
    """Every step() is an optimizer step, as under Accelerate; the schedule counts them and nothing else sets it."""
    run = Ours([matrix(0.0)], SETTINGS)
    trace = [run.weights()]
    for gradients in constant(STEPS):
        run.step(gradients)
        trace.append(run.weights())
    run.end()
    return float(sum(moved(a[0], b[0], LR, range(1, COLUMNS)) != 0 for a, b in itertools.pairwise(trace)))


DEFECT = Defect(
    title="under Accelerate and the Hugging Face Trainer every step is an update of the host",
    measure=f"host updates in {STEPS} steps; update_interval is {INTERVAL}",
    settings=SETTINGS,
    expected=lambda: STEPS / INTERVAL,
    upstream=lambda: host_updates(as_accelerate=True),
    ours=ours,
    ours_is="plain PyTorch, where every step() is a boundary; an integration with Accelerate is still to come",
    control=lambda: (host_updates(as_accelerate=False), STEPS / INTERVAL),
    control_is="the engine's own schedule",
)
