"""Clipping reaches the host's path alone."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from defects.case import COLUMNS, Defect, furthest, matrix, random
from defects.peers import Ours, adamw
from defects.upstream import Upstream, settings

LR, STEPS, SPIKE = 1e-2, 30, 3
ZENFLOW = {"topk_ratio": 0.1, "select_strategy": "step", "select_interval": 1000, "update_interval": 1}
SETTINGS = settings(ZENFLOW, lr=LR, gradient_clipping=1.0)
SMALL = 0.02  # keeps the norm below 1


def gradients(spike: float) -> list[list[Tensor]]:
    steps = random(STEPS, scale=SMALL)
    steps[SPIKE] = [steps[SPIKE][0] * spike]
    return steps


def upstream(spike: float, columns: Sequence[int]) -> float:
    steps = gradients(spike)
    seen = Upstream([matrix()], SETTINGS).run(steps)[-1][0]
    return furthest(seen, adamw([matrix()], SETTINGS, steps)[-1][0], LR, columns)


def ours() -> float:
    run = Ours([matrix()], SETTINGS)
    steps = gradients(1e3)
    figure = furthest(run.run(steps)[-1][0], adamw([matrix()], SETTINGS, steps)[-1][0], LR, [0])
    run.end()
    return figure


def control() -> tuple[float, float]:
    """The selected column without a spike, and the deferred ones with it."""
    return max(upstream(1.0, [0]), upstream(1e3, range(1, COLUMNS))), 0.0


DEFECT = Defect(
    title="gradient clipping skips the selected columns",
    measure="distance of a selected column from clipped AdamW after a gradient 1,000 times too large, in lr",
    settings=SETTINGS,
    expected=lambda: 0.0,
    upstream=lambda: upstream(1e3, [0]),
    ours=ours,
    control=control,
    control_is="the selected column without the spike, the deferred ones with it",
    quick=True,
)
