"""Importance, the top columns, and the pairing of the columns that change tier."""

from __future__ import annotations

import itertools
import math
from typing import cast

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from zenflow.kernels.base import EagerKernels
from zenflow.runtime import Runtime
from zenflow.selection import SelectionChange, plan_move, top_columns
from zenflow.weight import _sent_together


def test_energies_are_taken_in_fp32() -> None:
    scores = EagerKernels().energies(torch.full((300, 2), 100.0, dtype=torch.float16))  # 3e6, beyond the range of fp16
    assert scores.dtype == torch.float32
    assert scores.tolist() == [3e6, 3e6]


@pytest.mark.parametrize(
    ("scores", "count", "expected"),
    [
        ([1.0, 5.0, 3.0], 2, [1, 2]),
        ([2.0, 2.0, 2.0, 2.0], 2, [0, 1]),
        ([0.0, 1.0, 0.0, 1.0, 0.0], 3, [1, 3, 0]),
        ([math.nan, 1.0, math.inf, 2.0, -math.inf], 2, [3, 1]),
        ([math.nan, math.inf, 0.0], 2, [0, 1]),  # all count as 0, so ties to the lower index
        ([0.0, math.nan, 1e-30], 1, [2]),
        ([3.0, 1.0], 0, []),
        ([3.0, 1.0], 2, [0, 1]),
    ],
)
def test_top_columns(scores: list[float], count: int, expected: list[int]) -> None:
    assert top_columns(torch.tensor(scores), count).tolist() == expected


@st.composite
def selections(draw: st.DrawFn) -> tuple[Tensor, Tensor, Tensor]:
    """(selected in state order, column in each slot, wanted in any order)."""
    columns = draw(st.permutations(range(draw(st.integers(0, 3)), draw(st.integers(5, 24)))))
    count = draw(st.integers(1, len(columns) - 1))
    wanted = draw(st.permutations(columns))[:count]
    return torch.tensor(columns[:count]), torch.tensor(columns[count:]), torch.tensor(wanted)


def after(selected: Tensor, slots: Tensor, move: SelectionChange) -> tuple[Tensor, Tensor]:
    selected, slots = selected.clone(), slots.clone()
    selected[move.places] = move.to_selected
    slots[move.slots] = move.to_deferred
    return selected, slots


@given(selections())
def test_a_move_leads_to_what_is_wanted_and_keeps_every_state(drawn: tuple[Tensor, Tensor, Tensor]) -> None:
    selected, slots, wanted = drawn
    move = plan_move(selected, slots, wanted)
    if move is None:
        assert set(selected.tolist()) == set(wanted.tolist())
        return
    moved_in, moved_out = (
        set(wanted.tolist()) - set(selected.tolist()),
        set(selected.tolist()) - set(wanted.tolist()),
    )
    # Both sides ascending, paired in that order, and read from where the columns really are.
    assert move.to_selected.tolist() == sorted(moved_in)
    assert move.to_deferred.tolist() == sorted(moved_out)
    assert torch.equal(slots[move.slots], move.to_selected)
    assert torch.equal(selected[move.places], move.to_deferred)
    new_selected, new_slots = after(selected, slots, move)
    assert set(new_selected.tolist()) == set(wanted.tolist())
    assert sorted([*new_selected.tolist(), *new_slots.tolist()]) == sorted([*selected.tolist(), *slots.tolist()])
    # What stays, stays in its place: its state is not touched.
    staying = torch.isin(selected, wanted)
    assert torch.equal(new_selected[staying], selected[staying])
    assert torch.equal(new_slots[~torch.isin(slots, wanted)], slots[~torch.isin(slots, wanted)])


@given(st.lists(st.integers(0, 9), min_size=1))
def test_indices_that_are_sent_together_lie_where_kernels_are_compiled_for(sizes: list[int]) -> None:
    class Link:
        def send_index(self, index: Tensor) -> Tensor:
            self.index = index
            return index

    link = Link()
    parts = list(torch.arange(sum(sizes)).split(sizes))
    sent = list(_sent_together(cast(Runtime, link), parts))
    assert all(torch.equal(part, there) for part, there in zip(parts, sent, strict=True))
    assert all((there.data_ptr() - link.index.data_ptr()) % 16 == 0 for there in sent)
    ends = sorted((there.data_ptr(), there.data_ptr() + there.nbytes) for there in sent if there.numel())
    assert all(end <= begin for (_, end), (begin, _) in itertools.pairwise(ends))
