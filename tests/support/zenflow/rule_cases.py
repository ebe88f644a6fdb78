"""Update rules and torch's own, side by side: random groups, and the largest numbers that take part in an update."""

from __future__ import annotations

import random
from typing import Any

import torch
from torch import Tensor

from zenflow.rules import RULES
from zenflow.state import ColumnState

TORCH: dict[str, Any] = {
    "adamw": torch.optim.AdamW,
    "adam": torch.optim.Adam,
    "adagrad": torch.optim.Adagrad,
    "sgd": torch.optim.SGD,
}
MOMENTS = {
    "adamw": ("exp_avg", "exp_avg_sq"),
    "adam": ("exp_avg", "exp_avg_sq"),
    "adagrad": ("sum",),
    "sgd": ("momentum_buffer",),
}
NAMES = sorted(RULES)


def random_group(name: str, rng: random.Random) -> dict[str, Any]:
    """Hyperparameters of one step, as a parameter group holds them."""
    group: dict[str, Any] = {"lr": 10 ** rng.uniform(-4, -0.5), "weight_decay": rng.choice([0, 0.01, 0.3])}
    if name in ("adamw", "adam"):
        group["betas"] = rng.choice([(0.9, 0.999), (0.8, 0.95), (0.0, 0.9), (0.5, 0.5), (0.95, 0.99), (0.9, 0.0)])
        group["eps"] = rng.choice([1e-8, 1e-3])
    elif name == "adagrad":
        group |= {"lr_decay": rng.choice([0, 0.1, 3]), "eps": rng.choice([1e-10, 1e-3])}
        group["initial_accumulator_value"] = rng.choice([0, 0.1, 2])
    elif name == "lion":
        group["betas"] = rng.choice([(0.9, 0.99), (0.95, 0.98), (0.0, 0.5), (0.99, 0.0)])
    else:
        group |= {"momentum": rng.choice([0, 0.5, 0.9, 1.0]), "dampening": rng.choice([0, 0.1, 1])}
        group["nesterov"] = rng.random() < 0.5
    return group


def largest(name: str, before: ColumnState, gradient: Tensor, group: dict[str, Any]) -> list[Tensor]:
    """The largest numbers that take part in one update: of the weight and of each moment, fp64.

    Where terms cancel, the rounding of what was cancelled is what remains; so no term has a sign here.
    before: with the update count that the update leaves behind.
    """
    w, c = before.master.double().abs(), before.count.double().unsqueeze(1)
    state = [moment.double().abs() for moment in before.moments]
    g, lr = gradient.double().abs(), group["lr"]
    if name != "adamw":
        g = g + w * group["weight_decay"]
    signed = gradient.double() + (0 if name == "adamw" else group["weight_decay"]) * before.master.double()
    if name in ("adamw", "adam"):
        beta1, beta2 = group["betas"]
        m = state[0] + (state[0] + g) * (1 - beta1)
        v = state[1] * beta2 + signed.square() * (1 - beta2)
        update = m * (lr / (1 - beta1**c)) / ((v / (1 - beta2**c)).sqrt() + group["eps"])
        lost = (1 - beta2) * g * signed.abs() / v
        return [torch.maximum(w, update * (1 + lost)), m, state[1] * beta2 + 2 * g.square() * (1 - beta2)]
    if name == "adagrad":
        total = state[0] + signed.square()
        update = lr / (1 + (c - 1) * group["lr_decay"]) * g / (total.sqrt() + group["eps"])
        lost = g * signed.abs() / total
        return [torch.maximum(w, update * (1 + lost)), state[0] + 2 * g.square()]
    momentum, dampening = group["momentum"], group["dampening"]
    if momentum == 0:
        return [torch.maximum(w, g * lr), state[0]]
    b = torch.where(c == 1, g, state[0] * momentum + g * abs(1 - dampening))
    return [torch.maximum(w, lr * (g + b * momentum if group["nesterov"] else b)), b]


def ulps(a: Tensor, b: Tensor, scale: Tensor) -> Tensor:
    """Elementwise distance in units in the last fp32 place of `scale`; a shared infinity or NaN is no distance."""
    unit = scale.double().frexp().exponent.clamp(min=-125).sub(24).double().exp2()
    same = (a == b) | (a.isnan() & b.isnan())
    return torch.where(same, 0.0, (a.double() - b.double()).abs() / unit)
