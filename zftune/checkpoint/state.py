"""What every form of checkpoint is read into and written from, and how parameters are named."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch

from zftune.errors import BadInputError

Shape = tuple[int, ...] | None
"""None: unknown, which fits everything."""

Fits = Callable[[int, int, str], bool]
"""Whether a parameter, by its group and its place in it, can be the model's tensor of a name and of its shape."""

_MOST_STATES = 1_000  # at a tensor of the model; more means that shapes tell nothing
_Path = tuple["_Path | None", int, str]


def names_of(
    groups: Sequence[Sequence[Shape]],
    given: Sequence[Sequence[str] | None],
    model: Mapping[str, torch.Tensor],
    *,
    what: str,
    buffers: Sequence[str] = (),
    fits: Fits | None = None,
) -> list[list[str]]:
    """The name of every parameter.

    Args:
        buffers: names in it that are no parameters, as far as they are known.
        fits: asked of names that are not given, where the values can tell more than the shapes.

    Raises:
        BadInputError: they cannot be told, or are those of another model.
    """
    named = [names for names in given if names is not None]
    if len(named) < len(groups):
        aliases = tied(model)
        tensors = {n: tuple(t.shape) for n, t in model.items() if n not in aliases and n not in buffers}
        return _in_order(groups, tensors, what, fits or (lambda *_: True))
    for shapes, names in zip(groups, named, strict=True):
        if len(shapes) != len(names):
            raise BadInputError(f"{what}: there are {len(names)} param_names for {len(shapes)} parameters")
        for shape, name in zip(shapes, names, strict=True):
            found = tuple(model[name].shape) if name in model else None
            if found is None or shape not in (None, found):
                there = "is not in the model" if found is None else f"has the shape {list(found)} in the model"
                raise BadInputError(f"{what}: parameter '{name}' {there}: give the model that was trained")
    return [list(names) for names in named]


def _in_order(
    groups: Sequence[Sequence[Shape]], tensors: Mapping[str, tuple[int, ...]], what: str, fits: Fits
) -> list[list[str]]:
    """Go through the model's tensors in order; each is the next parameter of some group, or none.

    Right where one way to do that exists and every group keeps the model's order.
    """
    ends: dict[tuple[int, ...], tuple[int, _Path | None]] = {(0,) * len(groups): (1, None)}
    fits = cache(fits)
    left = len(tensors) - sum(len(group) for group in groups)
    for seen, (name, shape) in enumerate(tensors.items(), 1):
        further: dict[tuple[int, ...], tuple[int, _Path | None]] = {}
        for state, (ways, path) in ends.items():
            if seen - sum(state) <= left:
                _add(further, state, ways, path)
            for number, group in enumerate(groups):
                place = state[number]
                if place < len(group) and group[place] in (None, shape) and fits(number, place, name):
                    after = (*state[:number], place + 1, *state[number + 1 :])
                    _add(further, after, ways, (path, number, name))
        if len(further) > _MOST_STATES:
            raise _untold(what)
        ends = further
    ways, path = ends.get(tuple(len(group) for group in groups), (0, None))
    if ways == 0:
        raise BadInputError(
            f"{what}: the optimizer's parameters do not fit the model's tensors; the model must be the one that it "
            "trained, of the same moment"
        )
    if ways > 1:
        raise _untold(what)
    names: list[list[str]] = [[] for _ in groups]
    while path is not None:
        path, number, name = path
        names[number].insert(0, name)
    return names


def _add(
    ends: dict[tuple[int, ...], tuple[int, _Path | None]], state: tuple[int, ...], ways: int, path: _Path | None
) -> None:
    before = ends.get(state)
    ends[state] = (ways, path) if before is None else (min(2, ways + before[0]), before[1])


def _untold(what: str) -> BadInputError:
    return BadInputError(
        f"{what}: the optimizer's parameters have no names and their shapes do not tell them; every "
        "group must have param_names: make the optimizer with model.named_parameters()"
    )


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

    def param_groups(self) -> list[dict[str, Any]]:
        """As `torch.optim.Optimizer.state_dict` has them: settings, and the weights by name and numbered through."""
        numbers = itertools.count()
        return [
            {
                **group.settings,
                "params": [number for _, number in zip(group.weights, numbers, strict=False)],
                "param_names": [weight.name for weight in group.weights],
            }
            for group in self.groups
        ]

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
