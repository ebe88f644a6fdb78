"""The rules with one momentum: SGD and Lion."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from zenflow.errors import ConfigError
from zenflow.rules.base import Hyper, Rule, betas, check_betas, number, with_decay


@dataclass(frozen=True, slots=True)
class SGDHyper(Hyper):
    """One group's hyperparameters at one step."""

    momentum: float
    dampening: float
    weight_decay: float
    nesterov: bool


class SGD(Rule):
    """Stochastic gradient descent, in the form of `torch.optim.SGD`."""

    name = "sgd"
    moment_names = ("momentum_buffer",)  # without momentum it is not touched
    at_least_0 = ("lr", "momentum", "weight_decay")

    def hyper(self, group: Mapping[str, Any]) -> SGDHyper:
        lr, momentum, dampening, weight_decay = (
            number(group, name) for name in ("lr", "momentum", "dampening", "weight_decay")
        )
        return SGDHyper(lr, momentum, dampening, weight_decay, bool(group["nesterov"]))

    def check(self, group: Mapping[str, Any]) -> None:
        super().check(group)
        momentum, dampening, nesterov = (group[name] for name in ("momentum", "dampening", "nesterov"))
        if not math.isfinite(number(group, "dampening")):
            raise ConfigError.of("dampening", dampening, "a finite number")
        if not isinstance(nesterov, bool):
            raise ConfigError.of("nesterov", nesterov, "True or False")
        if nesterov and (number(group, "momentum") == 0 or number(group, "dampening") != 0):
            what = f"False with momentum {momentum!r} and dampening {dampening!r}: it needs momentum alone"
            raise ConfigError.of("nesterov", nesterov, what)

    def counts(self, hyper: Hyper) -> bool:
        assert isinstance(hyper, SGDHyper)
        return hyper.momentum != 0

    def carried(self, hyper: Hyper) -> float:
        assert isinstance(hyper, SGDHyper)
        return hyper.momentum

    def update(
        self,
        master: torch.Tensor,
        moments: tuple[torch.Tensor, ...],
        count: torch.Tensor,
        gradient: torch.Tensor,
        hyper: Hyper,
        decay: float,
    ) -> None:
        assert isinstance(hyper, SGDHyper)
        gradient = direction = with_decay(gradient, master, hyper.weight_decay)
        if self.counts(hyper):
            (buffer,) = moments
            count.add_(1)
            averaged = buffer.mul(hyper.momentum).add_(gradient.mul(1 - hyper.dampening))
            first = count.unsqueeze(1) == 1  # the buffer starts with the whole gradient
            buffer.copy_(torch.where(first, gradient, averaged))
            direction = gradient.add(buffer.mul(hyper.momentum)) if hyper.nesterov else buffer
        master.sub_(direction.mul(hyper.lr))


@dataclass(frozen=True, slots=True)
class LionHyper(Hyper):
    """One group's hyperparameters at one step."""

    beta1: float
    beta2: float
    weight_decay: float

    @property
    def decay(self) -> float:
        return 1 - self.lr * self.weight_decay


class Lion(Rule):
    """Lion (Chen et al. 2023, Algorithm 2)."""

    name = "lion"
    moment_names = ("exp_avg",)

    def carried(self, hyper: Hyper) -> float:
        return 1.0  # until a sign changes

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
