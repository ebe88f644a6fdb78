"""The plain form: fp32 masters by name, and what `torch.optim.AdamW.state_dict()` is, in one file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from zftune.checkpoint.state import MOMENTS, Group, TrainingState, Weight, names_of
from zftune.errors import BadInputError


def read_plain(document: Mapping[str, Any], what: str) -> TrainingState:
    """Read {"model": .., "optimizer": ..}.

    Raises:
        BadInputError: it is something else, or of an optimizer that nothing else has.
    """
    model, optimizer = document["model"], document["optimizer"]
    groups, state = optimizer["param_groups"], optimizer["state"]
    check_settings(groups, what)
    numbers = [list(group["params"]) for group in groups]
    shapes = [[_shape(state.get(number)) for number in of_group] for of_group in numbers]
    names = names_of(shapes, [group.get("param_names") for group in groups], model, what=what)
    return TrainingState(
        rule="adamw" if groups[0].get("decoupled_weight_decay", True) else "adam",
        groups=[
            Group(
                {key: value for key, value in group.items() if key not in ("params", "param_names")},
                [
                    _weight(name, model[name], state.get(number), what)
                    for name, number in zip(of_names, of_numbers, strict=True)
                ],
            )
            for group, of_names, of_numbers in zip(groups, names, numbers, strict=True)
        ],
        model=dict(model),
    )


def check_settings(groups: Sequence[Mapping[str, Any]], what: str) -> None:
    """Refuse parameter groups whose updates are not those of Adam or AdamW.

    Raises:
        BadInputError: naming the hyperparameter.
    """
    for number, group in enumerate(groups):
        for name in ("lr", "betas", "eps", "weight_decay"):
            if name not in group:
                raise BadInputError(f"{what}: param_groups[{number}] has no {name}; the optimizer must be an AdamW")
        for name, allowed in (("amsgrad", False), ("maximize", False), ("bias_correction", True)):
            if bool(group.get(name, allowed)) is not allowed:
                raise BadInputError(f"{what}: {name} is {group[name]} in param_groups[{number}]; it must be {allowed}")


def _shape(state: Mapping[str, Any] | None) -> tuple[int, ...] | None:
    moment = None if state is None else state.get(MOMENTS[0])
    return tuple(moment.shape) if isinstance(moment, torch.Tensor) else None


def _weight(name: str, master: torch.Tensor, state: Mapping[str, Any] | None, what: str) -> Weight:
    if master.dtype != torch.float32:
        raise BadInputError(f'{what}: model["{name}"] is {master.dtype}; it must be an fp32 master')
    if not state:
        return Weight(name, master, (), 0)
    found = [state.get(moment) for moment in MOMENTS]
    moments = tuple(moment.float() for moment in found if isinstance(moment, torch.Tensor))
    if len(moments) < len(MOMENTS) or any(moment.shape != master.shape for moment in moments):
        raise BadInputError(f"{what}: the state of '{name}' is not AdamW's, which has {' and '.join(MOMENTS)}")
    return Weight(name, master, moments, int(state["step"]))


def plain_document(training: TrainingState) -> dict[str, Any]:
    """The plain form of a run."""
    kind = torch.optim.AdamW if training.rule == "adamw" else torch.optim.Adam
    defaults = kind([torch.zeros(1)]).defaults
    state: dict[int, dict[str, torch.Tensor]] = {}
    for number, weight in enumerate(training.weights):
        if weight.moments:
            step = torch.tensor(float(weight.count), dtype=torch.float32)
            state[number] = {"step": step, **dict(zip(MOMENTS, map(_own, weight.moments), strict=True))}
    groups = [{**defaults, **group} for group in training.param_groups()]
    return {
        "model": training.tensors(masters=True),
        "optimizer": {"state": state, "param_groups": groups},
    }


def _own(tensor: torch.Tensor) -> torch.Tensor:
    """In memory of its own, so that a file holds no more than the tensor."""
    return tensor.contiguous().clone()
