"""The split of parameters between the tiers."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from zenflow import ZenFlowConfig
from zenflow.layout import ModelPlan, plan_model, round_half_up


def parameter(*shape: int, grad: bool = True, dtype: torch.dtype = torch.float32) -> nn.Parameter:
    return nn.Parameter(torch.zeros(shape, dtype=dtype), requires_grad=grad)


def plan(*weights: nn.Parameter, transposed: tuple[nn.Parameter, ...] = (), **knobs: Any) -> ModelPlan:
    return plan_model(weights, ZenFlowConfig(**knobs), {id(weight) for weight in transposed})


@st.composite
def models(draw: st.DrawFn) -> list[tuple[int, int]]:
    size = st.integers(1, 40)
    return draw(st.lists(st.tuples(size, size), min_size=1, max_size=8))


@given(models(), st.floats(0, 1))
def test_the_ratio_is_met_up_to_half_a_column(shapes: list[tuple[int, int]], ratio: float) -> None:
    weights = [parameter(*shape) for shape in shapes]
    planned = plan(*weights, offload_ratio=ratio).weights
    total = sum(weight.numel() for weight in weights)
    offloaded = sum(split.offloaded * split.rows for split in planned)
    split = [rows for (rows, columns), part in zip(shapes, planned, strict=True) if 0 < part.resident < columns]
    assert len(split) <= 1
    # A weight of which half a column or less is left over is not split; at most one is.
    border = next((rows for (rows, columns), part in zip(shapes, planned, strict=True) if part.offloaded), 0)
    rounded = split[0] if split else max(border, *(rows for rows, _ in shapes))
    assert abs(offloaded - round_half_up(ratio * total)) <= rounded / 2
    whole = [part.resident for part in planned]
    first = next((i for i, part in enumerate(planned) if part.resident < part.columns), len(planned))
    assert whole[first + 1 :] == [0] * len(whole[first + 1 :])  # residents are at the front


@given(models(), st.floats(0, 1), st.integers(1, 5000))
def test_every_column_has_one_place_and_buckets_are_runs_of_weights(
    shapes: list[tuple[int, int]], topk: float, nbytes: int
) -> None:
    planned = plan(*(parameter(*shape) for shape in shapes), topk_ratio=topk, offload_ratio=0.7, bucket_bytes=nbytes)
    sizes: Counter[int] = Counter()
    for part in planned.weights:
        assert part.resident + part.selected + part.deferred == part.columns
        ranges = part.bucket_slots
        assert [slot for low, high in ranges for slot in range(low, high)] == list(range(part.deferred))
        assert all(high - low == part.slots_per_bucket for low, high in ranges[:-1])
        assert part.slots_per_bucket == max(1, nbytes // (part.rows * 4))
        assert not ranges or part.first_bucket in (len(sizes), len(sizes) - 1)  # the last one, or a new one
        for number, (low, high) in enumerate(ranges, part.first_bucket):
            assert sizes[number] == 0 or sizes[number] + 4 * part.rows * (high - low) <= nbytes
            sizes[number] += 4 * part.rows * (high - low)
        if topk > 0 and part.offloaded:
            assert part.selected == min(part.offloaded, max(1, round_half_up(topk * part.offloaded)))
        else:
            assert part.selected == 0
    assert planned.buckets == max(1, len(sizes))


def test_buckets_by_hand() -> None:
    weights = [parameter(4, 8), parameter(4, 4), parameter(3), parameter(4, 40), parameter(4, 4), parameter(4, 4)]
    weights[4].requires_grad_(False)
    planned = plan(*weights, topk_ratio=0, bucket_bytes=192)
    # 128 and 64 bytes fill one; 640 are cut into four; what is frozen has no bytes, and opens none.
    assert [(part.first_bucket, len(part.bucket_slots)) for part in planned.weights] == [
        (0, 1),
        (0, 1),
        (0, 0),
        (1, 4),
        (4, 1),
        (5, 1),
    ]
    assert planned.buckets == 6


def test_weights_of_two_kinds_share_no_bucket() -> None:
    weights = [parameter(4, 8), parameter(4, 8), nn.Parameter(torch.zeros(4, 8, dtype=torch.bfloat16))]
    planned = plan(*weights, topk_ratio=0, transposed=(weights[1],))
    assert [part.first_bucket for part in planned.weights] == [0, 1, 2]


@pytest.mark.parametrize(("width", "buckets"), [(64, 1), (1 << 10, 16), (1 << 13, 32)])
def test_a_bucket_has_a_32nd_of_the_model_or_1_mib(width: int, buckets: int) -> None:
    weights = [nn.Parameter(torch.empty(256, width, dtype=torch.bfloat16, device="meta")) for _ in range(32)]
    planned = plan(*weights, topk_ratio=0, bucket_bytes=1 << 27)
    assert planned.buckets == buckets
    assert {len(part.bucket_slots) for part in planned.weights} == {1}


def test_a_split_by_hand() -> None:
    # 24 + 60 + 40 = 124 elements, 62 of them offloaded; 24 fit, 38 left / 6 rows = 6.33 -> 6 columns, then nothing.
    first, second, third = plan(
        parameter(4, 6), parameter(6, 10), parameter(5, 8), topk_ratio=0.25, offload_ratio=0.5, bucket_bytes=48
    ).weights
    assert (first.resident, first.selected, first.deferred, first.bucket_slots) == (6, 0, 0, [])
    assert (second.resident, second.selected, second.deferred) == (6, 1, 3)
    assert second.bucket_slots == [(0, 2), (2, 3)]  # 48 bytes are two columns of six fp32
    assert (third.resident, third.selected, third.deferred) == (0, 2, 6)
    assert (third.first_bucket, third.bucket_slots) == (2, [(0, 2), (2, 4), (4, 6)])


def test_halves_round_up() -> None:
    (half,) = plan(parameter(2, 5), topk_ratio=0.3).weights  # 1.5 columns
    assert half.selected == 2
    (split,) = plan(parameter(2, 1), offload_ratio=0.5).weights  # half a column is left of the budget
    assert split.resident == 1


def test_conv1d_is_seen_transposed() -> None:
    weight = nn.Parameter(torch.arange(12.0).view(3, 4))  # [in, out]
    (part,) = plan(weight, transposed=(weight,)).weights
    assert (part.rows, part.columns, part.transposed) == (4, 3, True)
    view = part.view(weight.detach())
    assert view.shape == (4, 3)
    assert view[:, 1].tolist() == weight[1].tolist()  # column 1 is input channel 1
    assert view.data_ptr() == weight.data_ptr()


def test_three_dimensions_are_folded() -> None:
    weight = nn.Parameter(torch.arange(24.0).view(2, 3, 4))
    (part,) = plan(weight).weights
    assert (part.rows, part.columns, part.transposed) == (6, 4, False)
    view = part.view(weight.detach())
    assert view[:, 2].tolist() == weight[:, :, 2].flatten().tolist()
    assert view.data_ptr() == weight.data_ptr()


def test_strides_without_a_matrix_view_are_resident() -> None:
    weight = nn.Parameter(torch.zeros(4, 3, 2).permute(2, 1, 0))
    with pytest.raises(RuntimeError):
        weight.detach().view(-1, 4)
    (part,) = plan(weight).weights
    assert (part.columns, part.resident, part.offloaded, part.deferred) == (0, 0, 0, 0)


@pytest.mark.parametrize("shape", [(), (5,), (0, 4), (4, 0), (2, 0, 3)])
def test_what_has_no_columns_is_resident_and_does_not_count(shape: tuple[int, ...]) -> None:
    other = parameter(4, 10)
    small, big = plan(parameter(*shape), other, offload_ratio=0.4, topk_ratio=0).weights
    assert (small.columns, small.deferred, small.bucket_slots) == (0, 0, [])
    assert big.resident == 6  # 60% of its own 40 elements
