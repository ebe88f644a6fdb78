"""Overlapped: moments are doubled with the gradient buffers, so every other update has its own momentum."""

from __future__ import annotations

import torch
from torch import Tensor

from defects.case import COLUMNS, Defect, furthest, matrix, random
from defects.peers import Ours, adamw
from defects.upstream import Upstream, settings

LR, STEPS, INTERVAL = 1e-2, 33, 4
ZENFLOW = {
    "topk_ratio": 0.1,
    "select_strategy": "step",
    "select_interval": 1000,
    "update_interval": INTERVAL,
    "full_warm_up_rounds": 1,
    "overlap_step": True,
}
SETTINGS = settings(ZENFLOW, lr=LR)
IN_TURN = settings({**ZENFLOW, "overlap_step": False}, lr=LR)
DEFERRED = range(1, COLUMNS)


def windows() -> list[tuple[int, Tensor]]:
    """Each host update's last step, from 1, and the gradients of its window; the warm-up step is one of its own."""
    gradients = torch.stack([step[0] for step in random(STEPS)])
    return [(1, gradients[:1])] + [(end, gradients[end - INTERVAL : end]) for end in range(5, STEPS + 1, INTERVAL)]


def one_adam() -> Tensor:
    """Adam with one pair of moments, as upstream otherwise has it: gradients over S, corrected by the step's number."""
    weight, m, v = matrix(), matrix(0.0), matrix(0.0)
    for count, gradients in windows():
        gradient = gradients.sum(dim=0) / INTERVAL
        m, v = 0.9 * m + 0.1 * gradient, 0.999 * v + 0.001 * gradient.square()
        weight = weight - LR * (m / (1 - 0.9**count)) / ((v / (1 - 0.999**count)).sqrt() + 1e-8)
    return weight


def upstream(document: dict[str, object]) -> float:
    run = Upstream([matrix()], document)
    run.run(random(STEPS))
    figure = furthest(run.masters()[0], one_adam(), LR, DEFERRED)
    run.end()
    return figure


def ours() -> float:
    run = Ours([matrix()], SETTINGS, deferred_update="mean")
    seen = run.run(random(STEPS))[-1][0]
    run.end()
    plain = adamw([matrix()], SETTINGS, [[gradients.mean(dim=0)] for _, gradients in windows()])[-1][0]
    return furthest(seen, plain, LR, DEFERRED)


DEFECT = Defect(
    title="overlapped: two interleaved sets of moments, each sees every other update",
    measure="distance of the deferred columns' masters from Adam with one set of moments, in lr",
    settings=SETTINGS,
    expected=lambda: 0.0,
    upstream=lambda: upstream(SETTINGS),
    ours=ours,
    ours_is='`deferred_update="mean"`, against torch\'s AdamW on the same means',
    control=lambda: (upstream(IN_TURN), 0.0),
    control_is="`overlap_step` false",
)
