"""The update rules of the reference: each formula written out once more, apart from `zenflow.rules`.

Nothing happens in place and nothing is shared between the rules beyond the three helpers at the end. All matrices are
`[rows, n]` fp32, for n columns that have been updated `counts[i]` times, this update included.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

Hyper = Mapping[str, float]
"""One group's hyperparameters at one step by name; betas are "beta1" and "beta2", a flag is 0 or 1."""

Moments = tuple[Tensor, ...]

Formula = Callable[[Tensor, Moments, Tensor, Sequence[int], Hyper], tuple[Tensor, Moments]]
"""(weights, moments, gradient, counts, hyperparameters) to the new weights and moments."""


@dataclass(frozen=True)
class ReferenceRule:
    """One way to update weights, and what the schedule must know of it."""

    formula: Formula
    moments: int
    defaults: Mapping[str, Any]
    """Of a parameter group, as in torch."""
    decoupled: bool
    """Whether weight decay is a factor on the weights instead of a part of the gradient."""

    def hyper(self, group: Mapping[str, Any]) -> Hyper:
        """A copy of what the group says now."""
        numbers = {name: float(group[name]) for name in self.defaults if name != "betas"}
        if "betas" in self.defaults:
            numbers["beta1"], numbers["beta2"] = (float(beta) for beta in group["betas"])
        return MappingProxyType(numbers)

    def decay(self, hyper: Hyper) -> float:
        """What one update's decoupled weight decay multiplies the weight by."""
        return 1 - hyper["lr"] * hyper["weight_decay"] if self.decoupled else 1.0

    def counts(self, hyper: Hyper) -> bool:
        """Whether an update is counted: SGD counts those of its momentum."""
        return hyper["momentum"] != 0 if "momentum" in hyper else True

    def initial(self, group: Mapping[str, Any]) -> list[float]:
        """What every moment begins with."""
        return [float(group.get("initial_accumulator_value", 0))] * self.moments


def adam(w: Tensor, moments: Moments, g: Tensor, counts: Sequence[int], h: Hyper) -> tuple[Tensor, Moments]:
    """Adam with L2 weight decay."""
    return decoupled_adam(w, moments, _penalised(g, w, h), counts, h)


def decoupled_adam(w: Tensor, moments: Moments, g: Tensor, counts: Sequence[int], h: Hyper) -> tuple[Tensor, Moments]:
    """AdamW, but for the factor on the weights."""
    m, v = moments
    step_size = _of_counts(counts, w, lambda c: h["lr"] / (1 - h["beta1"] ** c))
    inverse_root = _of_counts(counts, w, lambda c: 1 / math.sqrt(1 - h["beta2"] ** c))
    m = m + (g - m) * (1 - h["beta1"])
    v = v * h["beta2"] + (g * (1 - h["beta2"])) * g
    return w - (m * step_size) / (_root(v) * inverse_root + h["eps"]), (m, v)


def adagrad(w: Tensor, moments: Moments, g: Tensor, counts: Sequence[int], h: Hyper) -> tuple[Tensor, Moments]:
    """Adagrad."""
    g = _penalised(g, w, h)
    total = moments[0] + g * g
    rate = _of_counts(counts, w, lambda c: h["lr"] / (1 + (c - 1) * h["lr_decay"]))
    return w - (g * rate) / (_root(total) + h["eps"]), (total,)


def lion(w: Tensor, moments: Moments, g: Tensor, _: Sequence[int], h: Hyper) -> tuple[Tensor, Moments]:
    """Lion, but for the factor on the weights."""
    (m,) = moments
    towards = m + (g - m) * (1 - h["beta1"])
    sign = (towards > 0).float() - (towards < 0).float()
    sign[towards.isnan()] = math.nan
    return w - sign * h["lr"], (m + (g - m) * (1 - h["beta2"]),)


def sgd(w: Tensor, moments: Moments, g: Tensor, counts: Sequence[int], h: Hyper) -> tuple[Tensor, Moments]:
    """SGD; a column's momentum begins with its first gradient whole."""
    g = _penalised(g, w, h)
    if h["momentum"] == 0:
        return w - g * h["lr"], moments
    dampened = moments[0] * h["momentum"] + g * (1 - h["dampening"])
    b = torch.where(torch.tensor([c == 1 for c in counts], device=g.device), g, dampened)
    step = g + b * h["momentum"] if h["nesterov"] else b
    return w - step * h["lr"], (b,)


_ADAM = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8}

ADAMW = ReferenceRule(decoupled_adam, 2, {**_ADAM, "weight_decay": 1e-2}, decoupled=True)
ADAM = ReferenceRule(adam, 2, {**_ADAM, "weight_decay": 0.0}, decoupled=False)
ADAGRAD = ReferenceRule(
    adagrad,
    1,
    {"lr": 1e-2, "lr_decay": 0.0, "weight_decay": 0.0, "initial_accumulator_value": 0.0, "eps": 1e-10},
    decoupled=False,
)
LION = ReferenceRule(lion, 1, {"lr": 1e-4, "betas": (0.9, 0.99), "weight_decay": 0.0}, decoupled=True)
SGD = ReferenceRule(
    sgd,
    1,
    {"lr": 1e-3, "momentum": 0.0, "dampening": 0.0, "weight_decay": 0.0, "nesterov": False},
    decoupled=False,
)


def _of_counts(counts: Sequence[int], w: Tensor, scalar: Callable[[int], float]) -> Tensor:
    """[n] fp32 beside the weights: a scalar of each column, computed in double precision."""
    return torch.tensor([scalar(c) for c in counts], dtype=torch.float32, device=w.device)


def _penalised(g: Tensor, w: Tensor, h: Hyper) -> Tensor:
    """The gradient with L2 weight decay, which at 0 leaves it alone, be the weight infinite or not."""
    return g if h["weight_decay"] == 0 else g + w * h["weight_decay"]


def _root(v: Tensor) -> Tensor:
    """The nearest number, which torch's root of an fp32 number need not be."""
    return v.double().sqrt().float()
