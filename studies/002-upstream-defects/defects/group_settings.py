"""Of a parameter group's own hyperparameters, the selected columns get the learning rate alone."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from defects.case import COLUMNS, Defect, matrix
from defects.peers import Ours, adamw
from defects.upstream import Upstream, settings

LR, DECAY, STEPS = 1e-1, 0.1, 4
ZENFLOW = {"topk_ratio": 0.1, "select_strategy": "step", "select_interval": 1000, "update_interval": 1}
SETTINGS = settings(ZENFLOW, lr=LR)
GROUPS = [{"weight_decay": DECAY}, {"weight_decay": 0.0}]
WEIGHTS = [matrix(1.0), matrix(1.0)]
FIRST = matrix(0.0)
FIRST[0, 0] = 1e-30  # column 0 is selected, and nothing else comes of it
STEPS_GIVEN = [[FIRST, FIRST]] * STEPS
UNTOUCHED = range(1, 6)  # rows of column 0 whose gradient is 0


def decay_of(weights: Sequence[Tensor], columns: Sequence[int]) -> float:
    """The weight_decay that columns of the first group's weight got."""
    left = weights[0][list(UNTOUCHED)][:, list(columns)].mean()
    return float(1 - left ** (1 / STEPS)) / LR


def upstream(columns: Sequence[int]) -> float:
    return decay_of(Upstream(WEIGHTS, SETTINGS, GROUPS).run(STEPS_GIVEN)[-1], columns)


def ours() -> float:
    run = Ours(WEIGHTS, SETTINGS, GROUPS)
    figure = decay_of(run.run(STEPS_GIVEN)[-1], [0])
    run.end()
    return figure


def expected() -> float:
    return decay_of(adamw(WEIGHTS, SETTINGS, STEPS_GIVEN, GROUPS)[-1], [0])


DEFECT = Defect(
    title="a parameter group's own weight_decay does not reach its selected columns",
    measure=f"weight_decay that the selected column of a group with {DECAY} gets",
    settings=SETTINGS,
    expected=expected,
    upstream=lambda: upstream([0]),
    ours=ours,
    control=lambda: (upstream(range(1, COLUMNS)), expected()),
    control_is="the group's deferred columns",
)
