"""A parameter that a step does not use."""

from __future__ import annotations

from torch import Tensor

from defects.case import COLUMNS, Defect, furthest, matrix, raised, random
from defects.peers import Ours, adamw
from defects.upstream import Upstream, settings

LR, STEPS = 1e-2, 6
ZENFLOW = {"topk_ratio": 0.1, "select_strategy": "step", "select_interval": 1000, "update_interval": 1}
SETTINGS = settings(ZENFLOW, lr=LR)
WEIGHTS = [matrix(), matrix(seed=2)]


def gradients(*, skip: bool) -> list[list[Tensor | None]]:
    """Of two weights; where asked for, the first has none throughout."""
    return [[None if skip else first, second] for (first,), (second,) in zip(random(STEPS), random(STEPS), strict=True)]


def off(weights: list[Tensor], *, skip: bool) -> float:
    plain = adamw(WEIGHTS, SETTINGS, gradients(skip=skip))[-1]
    return max(furthest(a, b, LR, range(COLUMNS)) for a, b in zip(weights, plain, strict=True))


def upstream(*, skip: bool) -> float | str:
    run = Upstream(WEIGHTS, SETTINGS)
    return raised(lambda: off(run.run(gradients(skip=skip))[-1], skip=skip))


def ours() -> float:
    run = Ours(WEIGHTS, SETTINGS)
    figure = off(run.run(gradients(skip=True))[-1], skip=True)
    run.end()
    return figure


DEFECT = Defect(
    title="a parameter that gets no gradient ends the run",
    measure="distance from AdamW in lr, or what was raised",
    settings=SETTINGS,
    expected=lambda: 0.0,
    upstream=lambda: upstream(skip=True),
    ours=ours,
    control=lambda: (upstream(skip=False), 0.0),
    control_is="every parameter is used",
    raises=True,
)
