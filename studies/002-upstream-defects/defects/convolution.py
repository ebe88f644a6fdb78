"""Weights of more than two dimensions."""

from __future__ import annotations

import torch
from torch import Tensor

from defects.case import Defect, raised
from defects.peers import Ours, adamw
from defects.upstream import Upstream, settings

LR, STEPS, SHAPE = 1e-2, 4, (6, 5, 3, 3)
ZENFLOW = {"topk_ratio": 0.1, "select_strategy": "step", "select_interval": 1000, "update_interval": 1}
SETTINGS = settings(ZENFLOW, lr=LR)
OFFLOAD = settings(None, lr=LR)


def tensor(seed: int) -> Tensor:
    return torch.randn(SHAPE, generator=torch.Generator().manual_seed(seed))


def off(weight: Tensor) -> float:
    plain = adamw([tensor(0)], SETTINGS, gradients())[-1][0]
    return float((weight - plain).abs().max()) / LR


def gradients() -> list[list[Tensor]]:
    return [[tensor(seed)] for seed in range(1, STEPS + 1)]


def upstream(document: dict[str, object]) -> float | str:
    return raised(lambda: off(Upstream([tensor(0)], document).run(gradients())[-1][0]))


def ours() -> float:
    run = Ours([tensor(0)], SETTINGS)
    figure = off(run.run(gradients())[-1][0])
    run.end()
    return figure


DEFECT = Defect(
    title="a convolution's weight ends the run",
    measure="distance from AdamW in lr, or what was raised",
    settings=SETTINGS,
    expected=lambda: 0.0,
    upstream=lambda: upstream(SETTINGS),
    ours=ours,
    control=lambda: (upstream(OFFLOAD), 0.0),
    control_is="ZeRO-Offload, the same without the zenflow section",
    raises=True,
)
