"""What is gathered at once, and whether it fits."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from zftune.errors import BadInputError
from zftune.integrations.fsdp2 import require_room, rows_of, units_of


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4, bias=False)


class Named(nn.Module):
    """As transformers names its blocks, at different depths."""

    _no_split_modules = ("Block",)

    def __init__(self) -> None:
        super().__init__()
        self.short = nn.ModuleList([nn.Linear(64, 64)])
        self.blocks = nn.ModuleList([Block(), Block()])
        self.last = Block()


class Listed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.few = nn.ModuleList([nn.Linear(2, 2) for _ in range(9)])
        self.layers = nn.ModuleList([nn.Linear(8, 8) for _ in range(3)])
        self.head = nn.Linear(8, 2)


def test_units_are_the_blocks_that_transformers_names() -> None:
    model = Named()
    assert units_of(model) == [*model.blocks, model.last]


def test_else_those_of_the_largest_list() -> None:
    model = Listed()
    assert units_of(model) == [*model.layers]
    assert units_of(nn.Linear(2, 2)) == []


def test_a_block_that_shares_a_weight_is_none() -> None:
    model = Listed()
    model.layers[0].weight = model.layers[2].weight
    assert units_of(model) == [model.layers[1]]
    model.layers.append(model.layers[1])  # the same block twice
    assert units_of(model) == [model.layers[1]]


def test_rows_are_dealt_as_fsdp2_deals_them() -> None:
    whole = torch.arange(10).view(5, 2)
    assert [len(rows_of(whole, rank, 4)) for rank in range(4)] == [2, 2, 1, 0]
    assert torch.equal(rows_of(whole, 1, 4), whole[2:4])
    assert rows_of(whole, 3, 4).shape == (0, 2)


def test_weights_that_do_not_fit_are_refused() -> None:
    model = Listed()  # 9 x 6 + 3 x 72 + 18 = 288 elements; the largest unit has 72, what is in none 72
    require_room(model, 1, torch.bfloat16, 576)
    require_room(model, 4, torch.bfloat16, 144 + 144)
    require_room(model, 4, None, 288 + 288)
    with pytest.raises(BadInputError, match=r"take 0\.0 GB of a device \(ranks: 1\), of which 0\.0 GB are free"):
        require_room(model, 1, torch.bfloat16, 575)
    with pytest.raises(BadInputError, match=r"ranks: 4.*take more ranks"):
        require_room(model, 4, None, 575)
