"""Overlapped: the gradient buffer follows the step's number, so two updates in turn may share one."""

from __future__ import annotations

import itertools

from defects.case import COLUMNS, Defect, furthest, matrix, random
from defects.peers import Ours, adamw
from defects.upstream import Upstream, settings

LR, STEPS = 1e-2, 25
ZENFLOW = {
    "topk_ratio": 0.1,
    "select_strategy": "step",
    "select_interval": 6,
    "update_interval": 4,
    "full_warm_up_rounds": 1,
    "overlap_step": True,
}
SETTINGS = settings(ZENFLOW, lr=LR)
MULTIPLE = settings({**ZENFLOW, "select_interval": 1000}, lr=LR)


def shared(document: dict[str, object]) -> float:
    """Host updates that read the buffer that the update before them may still be reading."""
    run = Upstream([matrix()], document)
    submit, used = run.optimizer.zenflow_cpu_optimizer_step, []

    def noted(state: int, norm: object) -> None:
        used.append(state)
        submit(state, norm)

    run.optimizer.zenflow_cpu_optimizer_step = noted
    run.run(random(STEPS))
    run.end()
    return float(sum(a == b for a, b in itertools.pairwise(used[1:])))  # the first was waited for


def ours() -> float:
    run = Ours([matrix()], SETTINGS)
    seen = run.run(random(STEPS))[-1][0]
    run.end()
    off = furthest(seen, adamw([matrix()], SETTINGS, random(STEPS))[-1][0], LR, range(COLUMNS))
    return 0.0 if off < 1e-3 else off


DEFECT = Defect(
    title="overlapped: consecutive updates share a gradient buffer where select_interval is no multiple (a race)",
    measure=f"updates within {STEPS} steps that share the buffer of the one in flight",
    settings=SETTINGS,
    expected=lambda: 0.0,
    upstream=lambda: shared(SETTINGS),
    ours=ours,
    ours_is="distance from AdamW in lr, which no pair of updates may disturb",
    control=lambda: (shared(MULTIPLE), 0.0),
    control_is="no reselection",
)
