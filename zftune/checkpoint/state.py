"""What every form of checkpoint is read into and written from."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

RULES = ("adamw", "adam")
"""That all forms have, by their name in `zenflow.rules`."""
MOMENTS = ("exp_avg", "exp_avg_sq")


@dataclass(slots=True)
class Weight:
    """One trained parameter: all that an optimizer knows of it."""

    name: str
    master: torch.Tensor
    """fp32, in the parameter's shape."""
    moments: tuple[torch.Tensor, ...]
    """As `MOMENTS`, fp32; empty where there has been no update."""
    count: int
    """Updates so far."""


@dataclass(slots=True)
class Group:
    """A parameter group."""

    settings: dict[str, Any]
    """Hyperparameters by torch's names, without the parameters."""
    weights: list[Weight]


@dataclass(slots=True)
class TrainingState:
    """A training run between two steps, with every update applied."""

    rule: str
    groups: list[Group]
    model: dict[str, torch.Tensor]
    """The model's `state_dict` as it was saved."""
    engine: dict[str, Any] = field(default_factory=dict)
    """What DeepSpeed's engine keeps beside the model and the optimizer; empty where there was none."""
    loss_scaler: dict[str, float] = field(default_factory=dict)
    """Of fp16 training: DeepSpeed's numbers by its names."""
    notes: list[str] = field(default_factory=list)
    """Sentences for the user: what could not be taken over."""

    @property
    def weights(self) -> Iterator[Weight]:
        """All of them, in the order of the groups."""
        return (weight for group in self.groups for weight in group.weights)

    @property
    def steps(self) -> int:
        """Updates of the parameter that has had most."""
        return max((weight.count for weight in self.weights), default=0)

    def tensors(self, *, masters: bool) -> dict[str, torch.Tensor]:
        """A `state_dict` of the model whose weights are the masters.

        Args:
            masters: in fp32, with all other floating numbers; else everything in the dtype that it was saved in.
        """
        aliases = tied(self.model)
        of_name = {aliases.get(weight.name, weight.name): weight.master for weight in self.weights}
        made: dict[str, torch.Tensor] = {}
        for name, saved in self.model.items():
            first = aliases.get(name, name)
            if first not in made:
                value = of_name.get(first, saved)
                dtype = torch.float32 if masters and value.is_floating_point() else saved.dtype
                made[first] = value.to(dtype, copy=True).contiguous()
            made[name] = made[first]
        return {name: made[name] for name in self.model}


def tied(model: Mapping[str, torch.Tensor]) -> dict[str, str]:
    """Names of tensors that are another one's memory, with the first name of it."""
    first: dict[tuple[Any, ...], str] = {}
    aliases: dict[str, str] = {}
    for name, tensor in model.items():
        if not tensor.numel():
            continue
        place = (tensor.untyped_storage().data_ptr(), tensor.storage_offset(), tensor.shape, tensor.stride())
        if first.setdefault(place, name) != name:
            aliases[name] = first[place]
    return aliases
