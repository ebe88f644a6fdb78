"""Adagrad."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from zenflow.rules.base import Hyper, Rule, number, per_count, rooted, with_decay


@dataclass(frozen=True, slots=True)
class AdagradHyper(Hyper):
    """One group's hyperparameters at one step."""

    lr_decay: float
    eps: float
    weight_decay: float


class Adagrad(Rule):
    """Adagrad (Duchi, Hazan and Singer 2011), in the form of `torch.optim.Adagrad`."""

    name = "adagrad"
    moment_names = ("sum",)
    at_least_0 = ("lr", "lr_decay", "eps", "weight_decay", "initial_accumulator_value")

    def hyper(self, group: Mapping[str, Any]) -> AdagradHyper:
        return AdagradHyper(*(number(group, name) for name in ("lr", "lr_decay", "eps", "weight_decay")))

    def initial(self, group: Mapping[str, Any]) -> tuple[float, ...]:
        return (number(group, "initial_accumulator_value"),)

    def update(
        self,
        master: torch.Tensor,
        moments: tuple[torch.Tensor, ...],
        count: torch.Tensor,
        gradient: torch.Tensor,
        hyper: Hyper,
        decay: float,
    ) -> None:
        assert isinstance(hyper, AdagradHyper)
        lr, lr_decay = hyper.lr, hyper.lr_decay
        (total,) = moments
        count.add_(1)
        (rate,) = per_count(count, lambda c: lr / (1 + (c - 1) * lr_decay))
        gradient = with_decay(gradient, master, hyper.weight_decay)
        total.add_(gradient.mul(gradient))
        master.sub_(gradient.mul(rate).div_(rooted(total).add_(hyper.eps)))
