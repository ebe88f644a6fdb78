"""State as torch's optimizer of the same name has it: step and moments, for exchange with it in either direction."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict
from types import MappingProxyType
from typing import Any

import torch
from torch import nn

from zenflow import full_state
from zenflow.checkpoint_format import HEADER, Header, Saved, SavedWeight
from zenflow.errors import CheckpointError, ConfigError, UnsupportedError
from zenflow.full_state import MASTER, STEP
from zenflow.layout import WeightPlan
from zenflow.model import Groups
from zenflow.rules import Rule
from zenflow.sharded import local_rows
from zenflow.training import Training

_TORCHS: Mapping[str, Callable[..., torch.optim.Optimizer]] = MappingProxyType(
    {"adamw": torch.optim.AdamW, "adam": torch.optim.Adam, "adagrad": torch.optim.Adagrad}
)
"""By rule: whose state is a step and the moments."""


def save(training: Training, groups: Groups) -> dict[str, Any]:
    """What torch's optimizer would save; see `ZenFlowOptimizer.torch_state`.

    Raises ConfigError if updates are pending, on any rank; UnsupportedError if the rule has another state in torch.
    """
    _require_rule(training.rule)
    begun = {id(weight.parameter) for weight in training.model.weights if weight.started}
    numbered = list(enumerate((parameter, group) for group in groups for parameter in group["params"]))
    states = {
        number: full_state.read(training, parameter, group)
        for number, (parameter, group) in numbered
        if parameter.requires_grad or id(parameter) in begun
    }
    told = [(training.model.has_pending, [float(state[STEP]) for state in states.values()])]
    if training.shards is not None and training.runtime.ranks is not None:
        told = training.runtime.ranks.everybodys(told[0])  # one without rows of a parameter knows no step of it
    if any(one for one, _ in told):
        raise ConfigError(
            "torch_state() was called while updates are pending or predicted, for which torch's state has no place: "
            "call flush() first"
        )
    for state, *steps in zip(states.values(), *(one for _, one in told), strict=True):
        del state[MASTER]
        state[STEP] = torch.tensor(max(steps), dtype=torch.float32, device="cpu")
    numbers = {id(parameter): number for number, (parameter, _) in numbered}
    flags = _TORCHS[training.rule.name](
        [torch.zeros(1, dtype=torch.float32, device="cpu")]
    ).defaults  # `foreach` and the like
    packed = [
        {**flags, **group, "params": [numbers[id(parameter)] for parameter in group["params"]]} for group in groups
    ]
    names = (STEP, *training.rule.moment_names)
    return {
        "state": {number: {name: state[name] for name in names} for number, state in states.items()},
        "param_groups": packed,
    }


def read(training: Training, state_dict: object, groups: Groups) -> Saved:
    """What torch's optimizer has saved, for a run that begins with it; changes nothing.

    Raises CheckpointError if it is truncated, or of another optimizer, ConfigError if a hyperparameter in it is not
    allowed, UnsupportedError if the rule has another state in torch.
    """
    rule = training.rule
    _require_rule(rule)
    if not isinstance(state_dict, Mapping) or not {"state", "param_groups"} <= state_dict.keys():
        raise CheckpointError('the state_dict has no "state" and "param_groups": load one of torch\'s optimizers')
    saved, state = state_dict["param_groups"], state_dict["state"]
    own, other = [len(group["params"]) for group in groups], [len(group["params"]) for group in saved]
    if own != other:
        raise CheckpointError(f"the state_dict has groups of {other} parameters, the optimizer of {own}")
    if any(HEADER in group for group in saved):
        raise CheckpointError("the state_dict is of a ZenFlow optimizer; within torch_state() it must be torch's")
    kept = []
    for group, theirs in zip(groups, saved, strict=True):
        rule.check({**group, **theirs})
        kept.append({name: value for name, value in theirs.items() if name in group or name == "initial_lr"})
        del kept[-1]["params"]
    weights: list[SavedWeight] = []
    tensors: list[Mapping[str, Any]] = []
    keys = [key for group in saved for key in group["params"]]
    for key, parameter in zip(keys, (parameter for group in groups for parameter in group["params"]), strict=True):
        found = _tensors(training, f"state[{key!r}]", state.get(key) or {}, parameter)
        tensors.append(found)
        weights.append(_weight(started=bool(found)))
    header = Header(
        rule=rule.name,
        made_with=training.made_with,
        config=training.config,
        change=None,
        begun=any(weight.started for weight in weights),
        step=max((int(found["count"]) for found in tensors if found), default=0),
        window_steps=0,
        buckets=0,
        hypers=[asdict(rule.hyper({**group, **hyper})) for group, hyper in zip(groups, kept, strict=True)],
        weights=weights,
        flushed=False,
        imported=True,
        kept=None,
    )
    return Saved(header, kept, tensors)


def _require_rule(rule: Rule) -> None:
    if rule.name not in _TORCHS:
        raise UnsupportedError(
            f"torch_state() cannot be used with the rule {rule.name}; it can with {', '.join(_TORCHS)}"
        )


def _tensors(training: Training, where: str, state: Mapping[str, Any], parameter: nn.Parameter) -> dict[str, Any]:
    """Of this rank's rows; empty where there was no update."""
    if not state or not int(state.get(STEP, 1)):
        return {}
    names = (STEP, *training.rule.moment_names)
    if {*state} != {*names}:
        raise CheckpointError(f"{where} holds {', '.join(map(str, state))}; it must hold {', '.join(names)}")
    found: dict[str, Any] = {MASTER: training.runtime.masters.peek(parameter).to("cpu", copy=True)}
    for name in training.rule.moment_names:
        rows = local_rows(state[name])
        if rows.shape != parameter.shape:
            raise CheckpointError(
                f'{where}["{name}"] is {list(rows.shape)}, the parameter {list(parameter.shape)}: the state_dict is of '
                "another model"
            )
        found[name] = rows.detach().to("cpu", torch.float32, copy=True).contiguous()
    found["count"] = torch.tensor([int(state[STEP])], dtype=torch.int32, device="cpu")
    return {**found, "log": (), "shown": ()}


def _weight(*, started: bool) -> SavedWeight:
    """The split is that of whoever loads it."""
    plan = WeightPlan(0, 0, False, 0, 0, 1, 0)
    return SavedWeight.fresh(plan, started=started, flat=False)
