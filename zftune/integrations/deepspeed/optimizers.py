"""Which update rule trains, and with what: from a ds_config, or from the optimizer that the script passes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.optim import Optimizer

from zenflow.errors import ConfigError
from zenflow.rules import RULES
from zftune.errors import BadInputError
from zftune.integrations.deepspeed.section import INSTEAD, Refusal, meant, require_none
from zftune.text import either

_ADAM = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0, "amsgrad": False}
_DEFAULTS: dict[str, dict[str, Any]] = {
    "adamw": _ADAM,
    "adam": _ADAM,
    "adagrad": {"lr": 1e-2, "lr_decay": 0.0, "eps": 1e-10, "weight_decay": 0.0, "initial_accumulator_value": 0.0},
    "lion": {"lr": 1e-4, "betas": (0.9, 0.99), "weight_decay": 0.0},
    "sgd": {"lr": 1e-3, "momentum": 0.0, "dampening": 0.0, "weight_decay": 0.0, "nesterov": False},
}
"""As DeepSpeed has them where a ds_config leaves them out; of groups of a passed optimizer, its own come first."""
_NAMES = ("Adam", "AdamW", "Adagrad", "Lion", "SGD")
_WITHOUT_EFFECT = ("torch_adam", "fp32_optimizer_states", "foreach", "fused", "capturable", "differentiable")
_PARAMS = "optimizer.params."
_UNCORRECTED = Refusal(f"{_PARAMS}bias_correction", "False", "true with the backend zenflow", INSTEAD)


@dataclass(frozen=True, slots=True)
class Recipe:
    """What is needed to make a zenflow optimizer."""

    rule: str
    """A name in `zenflow.rules.RULES`."""
    defaults: dict[str, Any]
    client: Optimizer | None = None
    """Whose parameter groups are adopted, so that its scheduler goes on; None: the ds_config names the optimizer."""
    groups: list[dict[str, Any]] = field(default_factory=list)


def from_config(config: Mapping[str, Any]) -> Recipe | None:
    """The optimizer that a ds_config names; None: it names none.

    Raises:
        BadInputError: it is not one of those that fit, or has a setting that they do not have.
    """
    recipe, wrong = _read(config)
    require_none(wrong)
    return recipe


def refusals(config: Mapping[str, Any]) -> list[Refusal]:
    """Each setting that `from_config` refuses, which takes the same."""
    return _read(config)[1]


def _read(config: Mapping[str, Any]) -> tuple[Recipe | None, list[Refusal]]:
    section = config.get("optimizer")
    kind = section.get("type") if isinstance(section, Mapping) else None
    if not isinstance(section, Mapping) or kind is None:
        return None, []
    wrong: list[Refusal] = []
    given = section.get("params") or {}
    if not isinstance(given, Mapping):
        wrong.append(Refusal.of("optimizer.params", given, "a JSON object"))
        given = {}
    values = dict(given)
    if "max_grad_norm" in values:
        del values["max_grad_norm"]
        wrong.append(Refusal(f"{_PARAMS}max_grad_norm", "not DeepSpeed's", "gradient_clipping"))
    rule = str(kind).lower()
    if rule not in _DEFAULTS:
        wrong.append(Refusal.of("optimizer.type", kind, f"{either(_NAMES)} with the backend zenflow", INSTEAD, _NAMES))
        return None, wrong
    decoupled = values.pop("adam_w_mode", True)
    if rule == "adam" and decoupled:
        rule = "adamw"  # as DeepSpeed has it
    defaults = dict(_DEFAULTS[rule])
    if rule == "adamw" and values.get("torch_adam"):
        defaults["weight_decay"] = 0.01  # torch's own then
    if not values.get("bias_correction", True):
        wrong.append(_UNCORRECTED)
    for name in (*_WITHOUT_EFFECT, "bias_correction"):
        values.pop(name, None)
    for name, value in values.items():
        if name in defaults:
            defaults[name] = tuple(value) if isinstance(value, list) else value
        else:
            allowed, near = f"left out: {kind} has {', '.join(defaults)}", meant(("optimizer", "params", name))
            wrong.append(Refusal(f"{_PARAMS}{name}", repr(value), allowed, near=near and f"; {near}"))
    try:
        RULES[rule].check(defaults)
    except ConfigError as error:
        wrong.append(Refusal.of(f"{_PARAMS}{error.field}", error.value, str(error.allowed)))
    return Recipe(rule, defaults), wrong


def from_client(optimizer: Optimizer) -> Recipe:
    """What makes the same steps as an optimizer of torch's or DeepSpeed's.

    Raises:
        BadInputError: it is not one of those that fit.
    """
    rule = _rule_of(optimizer)
    require_none(_UNCORRECTED for group in optimizer.param_groups if not group.get("bias_correction", True))
    known = {name: optimizer.defaults[name] for name in _DEFAULTS[rule] if name in optimizer.defaults}
    return Recipe(rule, {**_DEFAULTS[rule], **known}, optimizer, optimizer.param_groups)


def _rule_of(optimizer: Optimizer) -> str:
    if not str(type(optimizer).step.__module__).startswith(("torch.", "deepspeed.")):
        name = f"{type(optimizer).__module__}.{type(optimizer).__qualname__}"
        raise BadInputError(
            f"the optimizer is a {name} with a step() of its own; the backend zenflow trains with {either(_NAMES)}: "
            f"use one of them, or {INSTEAD}"
        )
    names = {base.__name__ for base in type(optimizer).__mro__}
    if isinstance(optimizer, torch.optim.AdamW):
        return "adamw"
    if isinstance(optimizer, torch.optim.Adam):
        return "adam"
    if names & {"DeepSpeedCPUAdam", "FusedAdam"}:
        return "adamw" if getattr(optimizer, "adam_w_mode", True) else "adam"
    if isinstance(optimizer, torch.optim.Adagrad) or "DeepSpeedCPUAdagrad" in names:
        return "adagrad"
    if isinstance(optimizer, torch.optim.SGD):
        return "sgd"
    if names & {"DeepSpeedCPULion", "FusedLion", "Lion"}:
        return "lion"
    name = f"{type(optimizer).__module__}.{type(optimizer).__qualname__}"
    raise BadInputError(
        f"the optimizer is a {name}; the backend zenflow trains with {either(_NAMES)}: use one of them, or {INSTEAD}"
    )
