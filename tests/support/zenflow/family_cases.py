"""The family: which optimizer, reference and torch class share a rule, and hyperparameters drawn for them."""

from __future__ import annotations

import random
from typing import Any

import zenflow
from tests.support import oracle
from tests.support.zenflow.rule_cases import NAMES, TORCH

OURS: dict[str, Any] = {
    "adamw": zenflow.ZenFlowAdamW,
    "adam": zenflow.ZenFlowAdam,
    "adagrad": zenflow.ZenFlowAdagrad,
    "lion": zenflow.ZenFlowLion,
    "sgd": zenflow.ZenFlowSGD,
}
REFERENCE: dict[str, Any] = {
    "adamw": oracle.ReferenceAdamW,
    "adam": oracle.ReferenceAdam,
    "adagrad": oracle.ReferenceAdagrad,
    "lion": oracle.ReferenceLion,
    "sgd": oracle.ReferenceSGD,
}
OTHERS = [name for name in NAMES if name != "adamw"]
TORCH_CLASS = TORCH  # no Lion in torch

# Half of all cases are AdamW's; SGD has the most to be set.
_WEIGHED = ["adamw", "adamw", "adamw", "adamw", "adamw", "sgd", "sgd", "adam", "adagrad", "lion"]


def draw_rule(rng: random.Random) -> str:
    """A rule's name."""
    return rng.choice(_WEIGHED)


def draw_group(rule: str, rng: random.Random) -> dict[str, Any]:
    """Hyperparameters of a parameter group that stay sane over a whole training run."""
    group: dict[str, Any] = {"lr": rng.choice([1e-3, 1e-2, 0.1])}
    if rule in ("adamw", "adam"):
        group["betas"] = rng.choice([(0.9, 0.999), (0.8, 0.95), (0.0, 0.9)])
        group["eps"] = rng.choice([1e-8, 1e-3])
    elif rule == "adagrad":
        group |= {"lr_decay": rng.choice([0.0, 0.1, 2.0]), "eps": rng.choice([1e-10, 1e-3])}
        group["initial_accumulator_value"] = rng.choice([0.0, 0.0, 0.1, 3.0])
    elif rule == "lion":
        group["betas"] = rng.choice([(0.9, 0.99), (0.95, 0.98), (0.0, 0.5)])
    elif rule == "sgd":
        group["momentum"] = rng.choice([0.0, 0.5, 0.9, 0.9])
        group["nesterov"] = group["momentum"] > 0 and rng.random() < 0.4
        group["dampening"] = 0.0 if group["nesterov"] else rng.choice([0.0, 0.1, 1.0])
    return {**group, "weight_decay": rng.choice([0.0, 0.01, 0.3])}


def changed(start: dict[str, Any], step: int) -> dict[str, Any]:
    """What a schedule makes of a group in one step: it moves everything that a step copies, momentum to 0 and back."""
    now = {"lr": start["lr"] / step**0.5, "weight_decay": start["weight_decay"] * (0.5 if step % 2 else 1.0)}
    lower = 0.9 if step % 3 else 1.0
    if "betas" in start:
        beta1, beta2 = start["betas"]
        now["betas"] = (beta1 * lower, beta2)
    if "momentum" in start:
        now["momentum"] = start["momentum"] * (0.0 if step % 5 == 0 else lower)
    return now
