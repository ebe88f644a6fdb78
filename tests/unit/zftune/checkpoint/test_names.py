"""Names that nobody wrote down: told where there is one way, against all ways tried out."""

from __future__ import annotations

import itertools
import random

import pytest
import torch

from zftune.checkpoint.state import names_of
from zftune.errors import BadInputError

SHAPES = [(2,), (3,), (2, 3), (3, 2)]


def ways(groups: list[list[tuple[int, ...]]], model: dict[str, torch.Tensor]) -> list[list[list[str]]]:
    """Every choice of names that fits and keeps the model's order in each group."""
    names = list(model)
    sizes = [len(group) for group in groups]
    found = []
    for chosen in itertools.permutations(names, sum(sizes)):
        parts, rest = [], list(chosen)
        for size in sizes:
            parts.append(rest[:size])
            rest = rest[size:]
        in_order = all(sorted(part, key=names.index) == part for part in parts)
        pairs = zip(itertools.chain(*parts), itertools.chain(*groups), strict=True)
        if in_order and all(tuple(model[name].shape) == shape for name, shape in pairs):
            found.append(parts)
    return found


@pytest.mark.parametrize("seed", range(60))
def test_names_are_told_where_there_is_one_way(seed: int) -> None:
    rng = random.Random(seed)
    model = {f"w{n}": torch.zeros(rng.choice(SHAPES)) for n in range(rng.randint(1, 6))}
    sides: list[list[str]] = [[] for _ in range(rng.randint(1, 2))]
    for name in model:
        if rng.random() < 0.8:
            rng.choice(sides).append(name)
    sides = [side for side in sides if side] or [[next(iter(model))]]
    groups = [[tuple(model[name].shape) for name in side] for side in sides]
    possible = ways(groups, model)
    assert sides in possible
    if len(possible) == 1:
        assert names_of(groups, [None] * len(groups), model, what="FROM") == possible[0]
    else:
        with pytest.raises(BadInputError, match="shapes do not tell them"):
            names_of(groups, [None] * len(groups), model, what="FROM")


def test_values_tell_what_shapes_do_not() -> None:
    model = {name: torch.zeros(2) for name in ("a", "b", "c")}
    wanted = {(0, 0): "b", (0, 1): "c"}
    found = names_of([[(2,), (2,)]], [None], model, what="", fits=lambda g, p, name: wanted[g, p] == name)
    assert found == [["b", "c"]]


def test_tied_tensors_and_buffers_are_no_candidates() -> None:
    weight = torch.zeros(3, 2)
    model = {"steps": torch.zeros(2), "words": weight, "bias": torch.zeros(2), "head": weight}
    assert names_of([[(3, 2), (2,)]], [None], model, what="", buffers=["steps"]) == [["words", "bias"]]


def test_another_model_and_too_many_ways_end_in_a_sentence() -> None:
    with pytest.raises(BadInputError, match="do not fit the model's tensors"):
        names_of([[(5,)]], [None], {"a": torch.zeros(4)}, what="FROM")
    model = {f"w{n}": torch.zeros(2) for n in range(400)}
    with pytest.raises(BadInputError, match="shapes do not tell them"):
        names_of([[(2,)] * 150, [(2,)] * 150], [None, None], model, what="FROM")
