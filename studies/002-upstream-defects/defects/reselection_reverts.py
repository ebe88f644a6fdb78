"""Overlapped: at a reselection the masters are overwritten with weights that lack the update in flight."""

from __future__ import annotations

from torch import Tensor

from defects.case import BIG, COLUMNS, Defect, matrix, moved
from defects.peers import Ours, adamw
from defects.upstream import Upstream, settings

LR, STEPS, ACTIVE = 1e-2, 16, range(6, 10)
ZENFLOW = {
    "topk_ratio": 0.1,
    "select_strategy": "step",
    "select_interval": 10,
    "update_interval": 5,
    "full_warm_up_rounds": 1,
    "overlap_step": True,
}
SETTINGS = settings(ZENFLOW, lr=LR)
NEVER = settings({**ZENFLOW, "select_interval": 1000}, lr=LR)
DEFERRED = range(1, COLUMNS)


def gradients() -> list[list[Tensor]]:
    """1 in one window, 0 before and after; the selected column always has the greatest."""
    steps = []
    for step in range(STEPS):
        gradient = matrix(1.0 if step in ACTIVE else 0.0)
        gradient[:, 0] = BIG
        steps.append([gradient])
    return steps


def kept(trace: list[list[Tensor]]) -> float:
    """How far the deferred columns are from where they began, as a share of the furthest they ever were."""
    distances = [moved(matrix(0.0), weights[0], LR, DEFERRED) for weights in trace]
    return distances[-1] / max(distances)


def upstream(document: dict[str, object]) -> float:
    run = Upstream([matrix(0.0)], document)
    figure = kept(run.run(gradients()))
    run.end()
    return figure


def ours() -> float:
    run = Ours([matrix(0.0)], SETTINGS)
    figure = kept(run.run(gradients()))
    run.end()
    return figure


def expected() -> float:
    return kept(adamw([matrix(0.0)], SETTINGS, gradients()))


DEFECT = Defect(
    title="overlapped: a reselection reverts an update that was already visible",
    measure="share that is left of the deferred columns' greatest visible update",
    settings=SETTINGS,
    expected=expected,
    upstream=lambda: upstream(SETTINGS),
    ours=ours,
    control=lambda: (upstream(NEVER), expected()),
    control_is="no reselection",
)
