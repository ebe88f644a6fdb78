"""Column states: what is packed arrives bit for bit, chunks cover every column once."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor

from tests.zenflow.rule_cases import NAMES, random_group
from zenflow.rules import RULES, AdamW, AdamWHyper
from zenflow.state import CHUNK_ELEMENTS, ColumnState

HYPER = AdamWHyper(lr=0.1, beta1=0.9, beta2=0.99, eps=1e-8, weight_decay=0.1)
# Quiet and signalling NaNs with payloads, infinities, both zeros, a denormal.
ODD_BITS = (0x7FC00001, 0x7F800001, -0x3FFFFE, 0x7F800000, -0x800000, -0x80000000, 0, 1, 0x3F800001)


def random_state(columns: int, rows: int, seed: int, moments: int = 2) -> ColumnState:
    """Every stream full of arbitrary bits."""
    generator = torch.Generator().manual_seed(seed)
    state = ColumnState(torch.zeros(columns, rows), moments)
    for stream in (state.master, *state.moments):
        bits = torch.randint(-(2**31), 2**31, stream.shape, generator=generator, dtype=torch.int64).int()
        odd = torch.tensor(ODD_BITS, dtype=torch.int64).int()
        bits.view(-1)[: min(len(odd), bits.numel())] = odd[: bits.numel()]
        stream.copy_(bits.view(torch.float32))
    state.count.copy_(torch.randint(2**24, 2**31 - 1, (columns,), generator=generator).int())
    return state


def bits(state: ColumnState) -> list[Tensor]:
    return [*(stream.view(torch.int32).clone() for stream in (state.master, *state.moments)), state.count.clone()]


def test_a_new_state() -> None:
    state = ColumnState(torch.ones(3, 5), 2)
    assert [moment.tolist() for moment in state.moments] == [torch.zeros(3, 5).tolist()] * 2
    assert state.count.tolist() == [0, 0, 0]
    assert state.count.dtype == torch.int32
    assert state.nbytes == 3 * (3 * 5 * 4 + 4)
    assert state.packed_columns == 3 * 5 + 1


def test_moments_start_with_given_values() -> None:
    state = ColumnState(torch.ones(2, 3), 2, (0.0, 0.1))
    assert [moment.unique().tolist() for moment in state.moments] == [[0.0], [torch.tensor(0.1).item()]]
    assert state.master.unique().tolist() == [1.0]
    with pytest.raises(AssertionError):
        ColumnState(torch.ones(2, 3), 2, (0.1,))


@pytest.mark.parametrize("rows", [1, 3, 8])
def test_packed_states_arrive_bit_for_bit(rows: int) -> None:
    here, there = random_state(9, rows, seed=1), random_state(7, rows, seed=2)
    mine, theirs = bits(here), bits(there)
    source, target = torch.tensor([8, 0, 3]), torch.tensor([1, 6, 2])
    packed = here.pack(source)
    assert packed.shape == (3, here.packed_columns)
    assert packed.dtype == torch.int32
    there.unpack(target, packed)
    others = torch.tensor([0, 3, 4, 5])
    for before, old, new in zip(mine, theirs, bits(there), strict=True):
        assert torch.equal(new[target], before[source])
        assert torch.equal(new[others], old[others])
    assert all(torch.equal(a, b) for a, b in zip(bits(here), mine, strict=True))
    assert int(there.count[1]) > 2**24  # beyond what a float can count


def test_a_packed_row_is_the_streams_one_after_the_other() -> None:
    state = ColumnState(torch.tensor([[1.0, 2.0], [3.0, 4.0]]), 2)
    state.moments[0].copy_(torch.tensor([[5.0, 6.0], [7.0, 8.0]]))
    state.moments[1].copy_(torch.tensor([[9.0, 10.0], [11.0, 12.0]]))
    state.count.copy_(torch.tensor([13, 14]))
    row = state.pack(torch.tensor([1]))
    assert row[0, :6].view(torch.float32).tolist() == [3.0, 4.0, 7.0, 8.0, 11.0, 12.0]
    assert int(row[0, 6]) == 14


def test_select_copies_and_restore_writes_back() -> None:
    state = random_state(6, 4, seed=3)
    before, index = bits(state), torch.tensor([5, 1])
    part = state.select(index)
    part.master.fill_(7.0)
    for moment in part.moments:
        moment.fill_(8.0)
    part.count.fill_(9)
    assert all(torch.equal(a, b) for a, b in zip(bits(state), before, strict=True))
    state.restore(index, part)
    assert state.master[index].unique().tolist() == [7.0]
    assert all(moment[index].unique().tolist() == [8.0] for moment in state.moments)
    assert state.count[index].tolist() == [9, 9]
    rest = torch.tensor([0, 2, 3, 4])
    assert all(torch.equal(a[rest], b[rest]) for a, b in zip(bits(state), before, strict=True))


def test_a_slice_shares_memory() -> None:
    state = ColumnState(torch.zeros(5, 2), 2)
    part = state.slice(1, 3)
    part.master.fill_(1.0)
    part.moments[1].fill_(2.0)
    part.count.fill_(3)
    assert state.master[:, 0].tolist() == [0, 1, 1, 0, 0]
    assert state.moments[1][:, 1].tolist() == [0, 2, 2, 0, 0]
    assert state.count.tolist() == [0, 3, 3, 0, 0]


@pytest.mark.parametrize("rows", [1, 7, 1000, CHUNK_ELEMENTS // 2, CHUNK_ELEMENTS + 1])
@pytest.mark.parametrize("columns", [1, 5, 66])
def test_chunks_cover_every_column_once_in_order(columns: int, rows: int) -> None:
    state = ColumnState(torch.arange(columns).float().unsqueeze(1).expand(columns, rows), 0)
    seen: list[int] = []

    def work(part: ColumnState, low: int, high: int) -> None:
        assert part.master.numel() <= max(CHUNK_ELEMENTS, rows)
        assert part.master[:, 0].tolist() == [float(column) for column in range(low, high)]
        seen.extend(range(low, high))

    state.each_chunk(work)
    assert seen == list(range(columns))


def test_chunked_is_whole() -> None:
    """The rule is elementwise, so cutting the columns changes no bit."""
    columns, rows = 5, CHUNK_ELEMENTS // 2
    generator = torch.Generator().manual_seed(4)
    master, gradient = (torch.randn(columns, rows, generator=generator) for _ in range(2))
    whole, cut = ColumnState(master.clone(), 2), ColumnState(master.clone(), 2)
    whole.update(AdamW(), gradient, HYPER)
    cut.each_chunk(lambda part, low, high: part.update(AdamW(), gradient[low:high], HYPER))
    assert all(torch.equal(a, b) for a, b in zip(bits(whole), bits(cut), strict=True))
    assert cut.count.tolist() == [1] * columns


@pytest.mark.parametrize("name", NAMES)
def test_a_skipped_update_changes_no_bit(name: str) -> None:
    rule, rng = RULES[name], random.Random(6)
    for _ in range(5):
        hyper = rule.hyper(random_group(name, rng))
        state = random_state(4, 9, seed=5, moments=rule.moments)
        before = bits(state)
        state.update(rule, torch.full((4, 9), float("nan")), hyper, skip=torch.tensor(True))
        assert all(torch.equal(a, b) for a, b in zip(bits(state), before, strict=True))
        plain, unskipped = (ColumnState(torch.ones(2, 3), rule.moments) for _ in range(2))
        plain.update(rule, torch.ones(2, 3), hyper)
        unskipped.update(rule, torch.ones(2, 3), hyper, skip=torch.tensor(False))
        assert all(torch.equal(a, b) for a, b in zip(bits(plain), bits(unskipped), strict=True))
        assert plain.count.tolist() == [int(rule.counts(hyper))] * 2
        assert bool((plain.master < 1).all())


def test_the_window_product_of_decays_takes_the_place_of_one() -> None:
    one, other = ColumnState(torch.ones(1, 2), 2), ColumnState(torch.ones(1, 2), 2)
    one.update(AdamW(), torch.zeros(1, 2), HYPER)
    other.update(AdamW(), torch.zeros(1, 2), HYPER, decay=0.5)
    assert one.master.tolist() == [[torch.tensor(1.0).mul(0.99).item()] * 2]
    assert other.master.tolist() == [[0.5, 0.5]]
