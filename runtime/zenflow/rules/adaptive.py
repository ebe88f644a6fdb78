"""The rules that divide by the root of squared gradients: AdamW, Adam with L2 weight decay, and Adagrad."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from zenflow.rules.base import Hyper, Rule, betas, check_betas, check_flag, number, per_count, root, rooted, with_decay


@dataclass(frozen=True, slots=True)
class _Numbers(Hyper):
    beta1: float
    beta2: float
    eps: float
    weight_decay: float


@dataclass(frozen=True, slots=True)
class AdamWHyper(_Numbers):
    """One group's hyperparameters at one step."""

    @property
    def decay(self) -> float:
        return 1 - self.lr * self.weight_decay


@dataclass(frozen=True, slots=True)
class AdamHyper(_Numbers):
    """One group's hyperparameters at one step."""


class _AdamRule(Rule):
    moment_names = ("exp_avg", "exp_avg_sq")
    at_least_0 = ("lr", "eps", "weight_decay")

    def check(self, group: Mapping[str, Any]) -> None:
        super().check(group)
        check_betas(group)
        why = "its maximum would be a third moment to store and to move; use torch's optimizer for these parameters"
        check_flag(group, "amsgrad", allowed=False, why=why)

    def carried(self, hyper: Hyper) -> float:
        assert isinstance(hyper, _Numbers)
        return hyper.beta1

    @property
    def guesses(self) -> bool:
        return True

    def guess(self, hyper: Hyper, missing: float) -> float:
        """`lr (1 - b1^(missing + 1))`: what the update that brings it will show of it, of a gradient of usual size."""
        assert isinstance(hyper, _Numbers)
        kept: float = hyper.beta1 ** (missing + 1)
        return hyper.lr * (1 - kept)


class AdamW(_AdamRule):
    """AdamW (Loshchilov and Hutter 2019, Algorithm 2), in the form of `torch.optim.AdamW`."""

    name = "adamw"

    def hyper(self, group: Mapping[str, Any]) -> AdamWHyper:
        return AdamWHyper(*_numbers(group))

    def check(self, group: Mapping[str, Any]) -> None:
        super().check(group)
        check_flag(group, "decoupled_weight_decay", allowed=True, why="use the rule adam instead")

    def update(
        self,
        master: torch.Tensor,
        moments: tuple[torch.Tensor, ...],
        count: torch.Tensor,
        gradient: torch.Tensor,
        hyper: Hyper,
        decay: float,
    ) -> None:
        assert isinstance(hyper, AdamWHyper)
        master.mul_(decay)
        _adam_step(master, moments, count, gradient, hyper)


class Adam(_AdamRule):
    """Adam (Kingma and Ba 2015) with weight decay in the gradient, in the form of `torch.optim.Adam`."""

    name = "adam"

    def hyper(self, group: Mapping[str, Any]) -> AdamHyper:
        return AdamHyper(*_numbers(group))

    def check(self, group: Mapping[str, Any]) -> None:
        super().check(group)
        check_flag(group, "decoupled_weight_decay", allowed=False, why="use the rule adamw instead")

    def update(
        self,
        master: torch.Tensor,
        moments: tuple[torch.Tensor, ...],
        count: torch.Tensor,
        gradient: torch.Tensor,
        hyper: Hyper,
        decay: float,
    ) -> None:
        assert isinstance(hyper, AdamHyper)
        _adam_step(master, moments, count, with_decay(gradient, master, hyper.weight_decay), hyper)


def _numbers(group: Mapping[str, Any]) -> tuple[float, float, float, float, float]:
    beta1, beta2 = betas(group)
    return number(group, "lr"), beta1, beta2, number(group, "eps"), number(group, "weight_decay")


def _adam_step(
    master: torch.Tensor,
    moments: tuple[torch.Tensor, ...],
    count: torch.Tensor,
    gradient: torch.Tensor,
    hyper: _Numbers,
) -> None:
    exp_avg, exp_avg_sq = moments
    count.add_(1)
    step_size, inverse_root = per_count(
        count, lambda c: hyper.lr / (1 - hyper.beta1**c), lambda c: 1 / root(1 - hyper.beta2**c)
    )
    exp_avg.add_(gradient.sub(exp_avg).mul_(1 - hyper.beta1))
    exp_avg_sq.mul_(hyper.beta2).add_(gradient.mul(1 - hyper.beta2).mul_(gradient))
    denominator = rooted(exp_avg_sq).mul_(inverse_root).add_(hyper.eps)
    master.sub_(exp_avg.mul(step_size).div_(denominator))


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
