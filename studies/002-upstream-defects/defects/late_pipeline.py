"""Overlapped without warm-up, as in all official examples: the first wait is left out twice."""

from __future__ import annotations

from defects.case import COLUMNS, Defect, constant, matrix, moved
from defects.peers import Ours
from defects.upstream import Upstream, settings

LR, STEPS, INTERVAL = 1e-2, 24, 4
ZENFLOW = {
    "topk_ratio": 0.05,
    "select_strategy": "step",
    "select_interval": 1000,
    "update_interval": INTERVAL,
    "full_warm_up_rounds": 0,
    "overlap_step": True,
}
SETTINGS = settings(ZENFLOW, lr=LR)
WARM = settings({**ZENFLOW, "full_warm_up_rounds": 1}, lr=LR)
DEFERRED = range(1, COLUMNS)


def first_seen(run: Upstream | Ours) -> float:
    """The first step after which a deferred column has moved."""
    trace = run.run(constant(STEPS))
    run.end()
    return next(n for n, weights in enumerate(trace, start=1) if moved(matrix(0.0), weights[0], LR, DEFERRED) > 0)


def control() -> tuple[float, float]:
    """With one round of warm-up, step 1 is synchronous and the boundaries are steps 1, 5, 9."""
    return first_seen(Upstream([matrix(0.0)], WARM)), 1.0


def ours() -> float:
    """At most the expected step: what is visible earlier is not late."""
    return max(first_seen(Ours([matrix(0.0)], SETTINGS)), 2.0 * INTERVAL)


DEFECT = Defect(
    title="overlapped without warm-up, as documented: the second boundary applies nothing, staleness is two windows",
    measure="step after which the first host update is visible; one window late is step 8",
    settings=SETTINGS,
    expected=lambda: 2.0 * INTERVAL,
    upstream=lambda: first_seen(Upstream([matrix(0.0)], SETTINGS)),
    ours=ours,
    control=control,
    control_is="`full_warm_up_rounds` 1: the first step is synchronous",
)
