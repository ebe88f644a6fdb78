"""Which of the model's tensors each of an optimizer's parameters is, where nobody wrote the names down."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache

import torch

from zftune.checkpoint.state import tied
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
        groups: the shapes of each group's parameters.
        given: each group's `param_names`, if there are some.
        model: the model's `state_dict`.
        what: what the user calls the source.
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
            raise BadInputError(f"{what}: {len(names)} param_names of {len(shapes)} parameters, allowed are as many")
        for shape, name in zip(shapes, names, strict=True):
            found = tuple(model[name].shape) if name in model else None
            if found is None or shape not in (None, found):
                there = "is not in the model" if found is None else f"has the shape {list(found)} in the model"
                raise BadInputError(f"{what}: parameter '{name}' {there}, allowed is the model that was trained")
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
            f"{what}: the optimizer's parameters do not fit the model's tensors, allowed is the model that it trained, "
            "of the same moment"
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
        f"{what}: the optimizer's parameters have no names and their shapes do not tell them, allowed are "
        "param_names in every group: make the optimizer with model.named_parameters()"
    )
