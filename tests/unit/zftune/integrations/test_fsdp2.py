"""What is gathered at once, and whether it fits."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from zenflow.sharded import rows_of
from zftune.errors import BadInputError
from zftune.integrations.fsdp2 import device_bytes, shapes_of, stays_on_device, units_of


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
    assert stays_on_device(model, 1, torch.bfloat16, 576)
    assert stays_on_device(model, 4, torch.bfloat16, 144 + 144)
    assert stays_on_device(model, 4, None, 288 + 288, besides_bytes=1)
    with pytest.raises(BadInputError, match=r"take 576 bytes of a device \(ranks: 1\), of which 575 bytes are free"):
        stays_on_device(model, 1, torch.bfloat16, 575)
    with pytest.raises(BadInputError, match=r'ranks: 4.*: set "offload_param": .*, take more ranks'):
        stays_on_device(model, 4, None, 575)


def test_else_they_are_on_the_host_where_they_may_be() -> None:
    """From where two units are copied at a time, beside what is in none."""
    model = Listed()
    assert device_bytes(model, 1, torch.bfloat16, on_host=True) == 2 * (72 + 2 * 72)
    assert stays_on_device(model, 4, None, 576 + 9, may_leave=True, besides_bytes=9)
    assert not stays_on_device(model, 4, None, 1000, may_leave=True, besides_bytes=1000)
    assert not stays_on_device(model, 1, torch.bfloat16, 432, may_leave=True)
    with pytest.raises(BadInputError, match=r"are free: take more ranks, or"):
        stays_on_device(model, 1, torch.bfloat16, 431, may_leave=True)


def test_a_module_of_shapes_has_no_memory() -> None:
    model = nn.ModuleDict({"first": nn.Linear(3, 4), "second": nn.Linear(3, 4, bias=False)})
    model["second"].weight = model["first"].weight
    found = shapes_of(model, torch.bfloat16)
    assert [(name, one.shape, one.dtype) for name, one in found.named_parameters()] == [
        ("first.weight", (4, 3), torch.bfloat16),
        ("first.bias", (4,), torch.bfloat16),
    ]
    assert all(one.is_meta for one in found.parameters())
    assert not any(one.is_meta for one in model.parameters())
