"""Lion."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from zenflow.rules.base import Hyper, Rule, betas, check_betas, number


@dataclass(frozen=True, slots=True)
class LionHyper(Hyper):
    """One group's hyperparameters at one step."""

    beta1: float
    beta2: float
    weight_decay: float

    @property
    def decay(self) -> float:
        """Factor that decoupled weight decay multiplies a weight with."""
        return 1 - self.lr * self.weight_decay


class Lion(Rule):
    """Lion (Chen et al. 2023, Algorithm 2)."""

    name = "lion"
    moment_names = ("exp_avg",)

    def hyper(self, group: Mapping[str, Any]) -> LionHyper:
        return LionHyper(number(group, "lr"), *betas(group), number(group, "weight_decay"))

    def check(self, group: Mapping[str, Any]) -> None:
        super().check(group)
        check_betas(group)

    def update(
        self,
        master: torch.Tensor,
        moments: tuple[torch.Tensor, ...],
        count: torch.Tensor,
        gradient: torch.Tensor,
        hyper: Hyper,
        decay: float,
    ) -> None:
        assert isinstance(hyper, LionHyper)
        (exp_avg,) = moments
        count.add_(1)
        master.mul_(decay)
        change = gradient.sub(exp_avg)
        mixed = change.mul(1 - hyper.beta1).add_(exp_avg)
        sign = torch.where(mixed.isnan(), mixed, mixed.sign())  # torch's sign of NaN is 0
        master.sub_(sign.mul_(hyper.lr))
        exp_avg.add_(change.mul_(1 - hyper.beta2))
