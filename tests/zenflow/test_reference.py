"""The oracle itself: its arithmetic against torch, its schedule against numbers worked out by hand."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn

from tests.support.oracle import ReferenceAdamW, plan
from tests.zenflow.cases import same_bits
from zenflow.config import ZenFlowConfig

SYNC: dict[str, Any] = {"update_interval": 1, "overlap_step": False}


def test_plan_meets_the_ratio_exactly_and_numbers_the_buckets() -> None:
    # N = 40 + 30 + 20 = 90 (the frozen and the 1-D one do not count); budget = 90 - floor(0.4 * 90 + 0.5) = 54.
    weights = [nn.Parameter(torch.zeros(size)) for size in ((4, 10), (99,), (5, 6), (2, 10))]
    weights.insert(3, nn.Parameter(torch.zeros(3, 5), requires_grad=False))
    config = ZenFlowConfig(offload_ratio=0.4, topk_ratio=0.25, bucket_bytes=44)
    planned = plan([{"params": weights}], config, None)
    # 40 fits whole; 14 left / 5 rows = 2.8 -> 3 columns; frozen: floor(0.6 * 5 + 0.5) = 3; then nothing.
    assert [w.resident for w in planned] == [10, 99, 3, 3, 0]
    assert [w.selected_count for w in planned] == [0, 0, 1, 1, 3]  # a quarter, half up, at least one
    assert [w.deferred_count for w in planned] == [0, 0, 2, 1, 7]
    assert [w.bucket_slots for w in planned if w.deferred_count] == [2, 3, 5]
    assert [w.first_bucket for w in planned] == [0, 0, 0, 1, 2]
    assert planned[-1].bucket_count == 2


def single(config: ZenFlowConfig, columns: int = 4) -> tuple[nn.Parameter, ReferenceAdamW]:
    weight = nn.Parameter(torch.ones(1, columns))
    return weight, ReferenceAdamW([weight], lr=0.1, weight_decay=0.0, config=config)


def changed(weight: nn.Parameter, optimizer: ReferenceAdamW, grad: list[float]) -> list[int]:
    """Columns whose value moves in a step with this gradient."""
    before = weight.detach().clone()
    weight.grad = torch.tensor([grad])
    optimizer.step()
    return (weight.detach() != before).nonzero()[:, 1].tolist()


def test_buckets_become_visible_on_schedule() -> None:
    # 6 deferred columns, 2 a bucket, S = 3, L = 2: windows close at 3, 6; bucket b shows after 3 + 1 + floor(2b / 3).
    weight, optimizer = single(
        ZenFlowConfig(topk_ratio=0.14, update_interval=3, apply_lag=2, bucket_bytes=8), columns=7
    )
    grad = [9.0, 1, 1, 1, 1, 1, 1]
    seen = [changed(weight, optimizer, grad) for _ in range(7)]
    assert seen == [[0], [0], [0], [0, 1, 2, 3, 4], [0, 5, 6], [0], [0, 1, 2, 3, 4]]


def test_warm_up_and_flush_close_at_once() -> None:
    config = ZenFlowConfig(topk_ratio=0.25, update_interval=2, apply_lag=1, full_warm_up_rounds=1)
    weight, optimizer = single(config)
    seen = [changed(weight, optimizer, [9.0, 1, 1, 1]) for _ in range(5)]
    assert seen == [[0, 1, 2, 3], [0], [0], [0, 1, 2, 3], [0]]  # closes at 1, 3, 5
    assert optimizer.in_flight(weight) == [1, 2, 3]
    assert changed(weight, optimizer, [9.0, 1, 1, 1]) == [0, 1, 2, 3]
    before = weight.detach().clone()
    optimizer.flush()
    assert (weight.detach() != before).tolist() == [[False, True, True, True]]
    assert not optimizer.pending_entries()
    assert not optimizer.in_flight(weight)
    flushed = weight.detach().clone()
    optimizer.flush()
    assert bool(same_bits(weight.detach(), flushed).all())


def test_selection_ties_nonfinite_and_time_of_effect() -> None:
    config = ZenFlowConfig(topk_ratio=0.5, update_interval=3, select_interval=2)
    weight, optimizer = single(config)
    changed(weight, optimizer, [2.0, math.inf, 2.0, 2.0])
    assert optimizer.selected(weight) == [0, 2]  # ties to the lower column, infinity counts as nothing
    changed(weight, optimizer, [0.0, 0.0, 9.0, 9.0])  # step 2: not a step of selection
    changed(weight, optimizer, [1.0, 9.0, 2.0, 8.0])  # step 3: selection, and the same step closes
    assert optimizer.selected(weight) == [1, 3]
    for step in (4, 5):  # step 5 selects, but no window closes before 6
        changed(weight, optimizer, [9.0, 0.0, 9.0, 0.0])
        assert optimizer.selected(weight) == [1, 3], step
    optimizer.flush()
    assert optimizer.selected(weight) == [0, 2]


def test_flush_in_mean_mode_uses_the_last_steps_hyperparameters() -> None:
    weight, optimizer = single(ZenFlowConfig(topk_ratio=0.0, update_interval=4, deferred_update="mean"))
    changed(weight, optimizer, [1.0, 1.0, 1.0, 1.0])
    optimizer.param_groups[0]["lr"] = 5.0  # a scheduler's step comes before the flush
    optimizer.flush()
    assert weight.detach().sub(0.9).abs().max() < 1e-6
