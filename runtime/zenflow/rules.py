"""Update rules: elementwise arithmetic on master weights and moments, the same on every tier.

Plain multiplications and additions, no fused `lerp` or `addcmul`: every tier, the reference and a kernel compiled
without contraction then round alike.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from zenflow.errors import ConfigError, UnsupportedError


@dataclass(frozen=True, slots=True)
class AdamWHyper:
    """One group's hyperparameters at one step."""

    lr: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float

    @property
    def decay(self) -> float:
        """Factor that decoupled weight decay multiplies a weight with."""
        return 1 - self.lr * self.weight_decay


class AdamW:
    """AdamW (Loshchilov and Hutter 2019, Algorithm 2), in the form of `torch.optim.AdamW`."""

    moments = 2

    def hyper(self, group: Mapping[str, Any]) -> AdamWHyper:
        """Copy a parameter group's hyperparameters.

        Raises:
            UnsupportedError: the learning rate is a tensor on a device, which could not be read without waiting.
        """
        lr = group["lr"]
        if isinstance(lr, torch.Tensor) and lr.device.type != "cpu":
            raise UnsupportedError(f"lr is a tensor on {lr.device}; use a float or a CPU tensor")
        beta1, beta2 = group["betas"]
        return AdamWHyper(float(lr), float(beta1), float(beta2), float(group["eps"]), float(group["weight_decay"]))

    def check(self, group: Mapping[str, Any]) -> None:
        """Refuse hyperparameters that make no sense.

        Raises:
            ConfigError: naming the field, its value and what is allowed.
        """
        for name in ("lr", "eps", "weight_decay"):
            if not _at_least_0(group[name]):
                raise ConfigError(f"{name} is {group[name]!r}, allowed is a number >= 0")
        betas = group["betas"]
        pair = isinstance(betas, (tuple, list)) and len(betas) == 2
        if not pair or not all(_at_least_0(beta) and beta < 1 for beta in betas):
            raise ConfigError(f"betas is {betas!r}, allowed are two numbers from 0 to below 1")

    def update(
        self,
        master: torch.Tensor,
        moments: tuple[torch.Tensor, ...],
        count: torch.Tensor,
        gradient: torch.Tensor,
        hyper: AdamWHyper,
        decay: float,
    ) -> None:
        """One update in place.

        Args:
            master: [n, rows] fp32, the weights.
            moments: exp_avg and exp_avg_sq, each [n, rows] fp32.
            count: [n] int32, updates so far per column.
            gradient: [n, rows] fp32.
            hyper: the step's hyperparameters.
            decay: factor on the weights (`hyper.decay`, or the product over a window).
        """
        exp_avg, exp_avg_sq = moments
        count.add_(1)
        steps = count.double().unsqueeze(1)
        step_size = torch.full_like(steps, hyper.lr).div_(1 - hyper.beta1**steps).float()
        correction = (1 - hyper.beta2**steps).sqrt().float()
        master.mul_(decay)
        exp_avg.add_(gradient.sub(exp_avg).mul_(1 - hyper.beta1))
        exp_avg_sq.mul_(hyper.beta2).add_(gradient.mul(1 - hyper.beta2).mul_(gradient))
        denominator = exp_avg_sq.sqrt().div_(correction).add_(hyper.eps)
        master.sub_(exp_avg.mul(step_size).div_(denominator))


def _at_least_0(value: object) -> bool:
    return isinstance(value, (int, float, torch.Tensor)) and not isinstance(value, bool) and bool(value >= 0)
