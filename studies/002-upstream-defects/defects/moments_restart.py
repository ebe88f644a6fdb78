"""A reselection zeroes the moments of the selected columns, of those that stay too, but not their step count."""

from __future__ import annotations

import itertools

from torch import Tensor

from defects.case import Defect, constant, matrix, moved
from defects.peers import Ours, adamw
from defects.upstream import Upstream, settings

LR, STEPS = 1e-2, 560
ZENFLOW = {"topk_ratio": 0.1, "select_strategy": "step", "select_interval": 512, "update_interval": 1}
SETTINGS = settings(ZENFLOW, lr=LR)
NEVER = settings({**ZENFLOW, "select_interval": 1000}, lr=LR)


def largest_step(trace: list[list[Tensor]]) -> float:
    """The longest step of the column that is selected throughout."""
    return max(moved(a[0], b[0], LR, [0]) for a, b in itertools.pairwise(trace))


def ours() -> float:
    run = Ours([matrix(0.0)], SETTINGS)
    figure = largest_step(run.run(constant(STEPS)))
    run.end()
    return figure


def expected() -> float:
    return largest_step(adamw([matrix(0.0)], SETTINGS, constant(STEPS)))


DEFECT = Defect(
    title="a reselection zeroes the moments of columns that stay selected, not their step count",
    measure="longest step of such a column under equal gradients, in lr",
    settings=SETTINGS,
    expected=expected,
    upstream=lambda: largest_step(Upstream([matrix(0.0)], SETTINGS).run(constant(STEPS))),
    ours=ours,
    control=lambda: (largest_step(Upstream([matrix(0.0)], NEVER).run(constant(STEPS))), expected()),
    control_is="no reselection",
    quick=True,
)
