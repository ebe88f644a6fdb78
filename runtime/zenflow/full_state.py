"""One parameter's master and moments in its shape, wherever its columns lie: read and set between two steps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from zenflow.errors import ConfigError
from zenflow.layout import WeightPlan
from zenflow.sharded import Rows
from zenflow.state import ColumnState
from zenflow.tiers import Tier, move_state
from zenflow.training import Training
from zenflow.weight import WeightState

MASTER, STEP = "master", "step"


def whole_tier(plan: WeightPlan, tensors: Mapping[str, torch.Tensor], moment_names: Sequence[str]) -> Tier:
    """The state of all columns of one parameter, sharing the memory of tensors on the CPU.

    Args:
        plan: the split.
        tensors: "master" and the moments in the parameter's shape, fp32; "count", [columns] int32.
        moment_names: the rule's.
    """
    streams = [tensors[name] for name in (MASTER, *moment_names)]
    if plan.columns:
        columns = [plan.view(stream).t() for stream in streams]
    else:
        columns = [stream.view(1, -1) for stream in streams]
    state = ColumnState.over(columns, tensors["count"])
    return Tier(torch.arange(len(tensors["count"]), device="cpu"), state, on_host=True)


def read(training: Training, parameter: nn.Parameter, group: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Copies on the CPU; see `ZenFlowOptimizer.full_state`.

    Args:
        training: the run.
        parameter: one of its own.
        group: the parameter's.

    Returns:
        Of sharded ones DTensors, but for the step.

    Raises:
        HostEngineError: host work failed.
    """
    tensors = _here(training, parameter, group)
    if isinstance(parameter, Rows):
        tensors |= {name: parameter.wrapped(tensors[name]) for name in (MASTER, *training.rule.moment_names)}
    return tensors


def _here(training: Training, parameter: nn.Parameter, group: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Of the rows of this rank."""
    rule, weight = training.rule, _started(training, parameter)
    if weight is None:
        moments = zip(rule.moment_names, rule.initial(group), strict=True)
        return {
            MASTER: training.runtime.masters.peek(parameter).to("cpu", copy=True),
            **{name: torch.full(parameter.shape, value, dtype=torch.float32, device="cpu") for name, value in moments},
            STEP: torch.zeros((), dtype=torch.float32, device="cpu"),
        }
    training.settle()
    tensors = _gathered(training, weight)
    tensors[STEP] = tensors.pop("count").max().float()
    return tensors


def write(
    training: Training, parameter: nn.Parameter, group: Mapping[str, Any], name: str, value: torch.Tensor
) -> None:
    """Set one stream; see `ZenFlowOptimizer.set_full_state`.

    Args:
        training: the run.
        parameter: one of its own.
        group: the parameter's.
        name: "master" or one of the rule's moments.
        value: as many elements as the parameter has.

    Raises:
        ConfigError: the name, the size, a moment of a parameter that was never updated, or within `flushed_weights`.
        HostEngineError: host work failed.
    """
    names = (MASTER, *training.rule.moment_names)
    if training.shows_flushed:
        raise ConfigError("set_full_state() was called within flushed_weights(), allowed is outside of it")
    if name not in names:
        raise ConfigError(f"name is {name!r}, allowed are {', '.join(names)}")
    if value.numel() != parameter.numel():
        raise ConfigError(f"the value of {name} has {value.numel()} elements, allowed are {parameter.numel()}")
    values = value.detach().to("cpu", torch.float32).reshape(parameter.shape)
    weight = _started(training, parameter)
    if weight is None:
        _begin_with(training, parameter, group, name, values)
        return
    training.settle()
    tensors = _gathered(training, weight)
    if torch.equal(values, tensors[name]):
        return
    tensors[name].copy_(values)
    training.model.stop_watch()
    if name == MASTER:  # what the host has applied is in the masters that are replaced
        training.model.windows.apply(training.clock.step, training.history.open, everything=True)
    weight.split.fill([whole_tier(weight.plan, tensors, training.rule.moment_names)])
    if name == MASTER:
        parameter.copy_(values)
    training.leave_weights()


def _begin_with(
    training: Training, parameter: nn.Parameter, group: Mapping[str, Any], name: str, values: torch.Tensor
) -> None:
    """Set what a parameter that was never updated begins with."""
    if torch.equal(values, _here(training, parameter, group)[name]):
        return
    if name != MASTER:
        raise ConfigError(f"{name} of a parameter was set before its first update, allowed is after it")
    training.runtime.masters.give({parameter: values.clone()})
    parameter.copy_(values)


def _started(training: Training, parameter: nn.Parameter) -> WeightState | None:
    found = (weight for weight in training.model.weights if weight.parameter is parameter and weight.started)
    return next(found, None)


def _gathered(training: Training, weight: WeightState) -> dict[str, torch.Tensor]:
    """The state as it lies in the tiers; of a run that has settled."""
    moment_names = training.rule.moment_names
    tensors = {
        name: torch.empty(weight.parameter.shape, dtype=torch.float32, device="cpu") for name in (MASTER, *moment_names)
    }
    tensors["count"] = torch.zeros(max(1, weight.plan.columns), dtype=torch.int32, device="cpu")
    move_state(training.runtime, weight.split.tiers(), whole_tier(weight.plan, tensors, moment_names))
    return tensors
