"""How far apart two fp32 computations of one update may be: numbers that carry a bound of their difference.

An operation passes on what its operands may be apart and adds two ulp of its result, so that a sum that cancels, a
gradient that follows a weight, or a sign that is undecided is allowed what it really can make of the roundings before
it, and nothing else is allowed more.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

ULP = 2.0**-23
OPERATION = 2 * ULP  # half an ulp for each side, and as much again for another order of the same operations
SMALLEST = 2.0**-149


@dataclass(frozen=True)
class Near:
    """A number and how far from it another computation may have ended, both fp64 of one shape."""

    value: Tensor
    error: Tensor

    def __add__(self, other: Near | float) -> Near:
        other = near(other)
        return _rounded(self.value + other.value, self.error + other.error)

    def __sub__(self, other: Near | float) -> Near:
        return self + near(other) * -1.0

    def __mul__(self, other: Near | float) -> Near:
        other = near(other)
        crossed = self.value.abs() * other.error + other.value.abs() * self.error
        return _rounded(self.value * other.value, crossed + self.error * other.error)

    def __truediv__(self, other: Near) -> Near:
        quotient = self.value / other.value
        least = (other.value.abs() - other.error).clamp(min=SMALLEST)
        return _rounded(quotient, (self.error + quotient.abs() * other.error) / least)

    def towards(self, other: Near, share: float) -> Near:
        """This share of the way to another number: what a moment does."""
        value = self.value + (other.value - self.value) * share
        rounded = OPERATION * (self.value.abs() + other.value.abs())
        return _rounded(value, (1 - share) * self.error + share * other.error + rounded)

    def sqrt(self) -> Near:
        root = self.value.sqrt()
        return _rounded(root, torch.minimum(self.error.sqrt(), self.error / root.clamp(min=SMALLEST)))

    def within(self, limit: float) -> Near:
        """The same, for it is known that the other computation ended within the limit too."""
        return Near(self.value, torch.minimum(self.error, self.value.abs() + limit))

    def sign(self) -> Near:
        """Either sign where the error leaves it open."""
        undecided = (self.value.abs() <= self.error) & (self.error > 0)
        return Near(self.value.sign(), 2.0 * undecided)


def near(value: Near | float) -> Near:
    """A Python number is rounded to fp32 once on either side."""
    if isinstance(value, Near):
        return value
    error = 0.0 if float(np.float32(value)) == value else abs(value) * ULP
    return Near(torch.tensor(value, dtype=torch.float64), torch.tensor(error, dtype=torch.float64))


def _rounded(value: Tensor, error: Tensor) -> Near:
    return Near(value, error + OPERATION * value.abs() + SMALLEST * (value != 0))


def update(
    rule: str, w: Near, moments: Sequence[Near], g: Near, count: int, group: Mapping[str, Any]
) -> tuple[Near, list[Near]]:
    """One update of a parameter. count: with this update."""
    lr, decay = group["lr"], group["weight_decay"]
    if rule in ("adamw", "lion"):
        w = w * (1 - lr * decay)
    elif decay != 0:
        g = g + w * decay
    if rule in ("adamw", "adam"):
        beta1, beta2 = group["betas"]
        m, v = moments
        m, v = m.towards(g, 1 - beta1), v * beta2 + g * (1 - beta2) * g
        denominator = v.sqrt() * (1 / math.sqrt(1 - beta2**count)) + group["eps"]
        change = m * (lr / (1 - beta1**count)) / denominator
        return w - change.within(lr / math.sqrt(1 - beta2)), [m, v]
    if rule == "adagrad":
        total = moments[0] + g * g
        change = g * (lr / (1 + (count - 1) * group["lr_decay"])) / (total.sqrt() + group["eps"])
        return w - change.within(lr), [total]
    if rule == "lion":
        beta1, beta2 = group["betas"]
        (m,) = moments
        return w - m.towards(g, 1 - beta1).sign() * lr, [m.towards(g, 1 - beta2)]
    if group["momentum"] == 0:
        return w - g * lr, list(moments)
    b = g if count == 1 else moments[0] * group["momentum"] + g * (1 - group["dampening"])
    return w - (g + b * group["momentum"] if group["nesterov"] else b) * lr, [b]
