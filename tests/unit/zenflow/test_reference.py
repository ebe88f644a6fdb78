"""The oracle's schedule against numbers worked out by hand, also across changes of knobs and added groups."""

from __future__ import annotations

import math
import random
from collections import Counter
from typing import Any

import pytest
import torch
from torch import nn

from tests.support.oracle import ReferenceAdamW, ReferenceOptimizer, plan
from tests.support.zenflow.cases import case_of, run, same_bits
from tests.support.zenflow.knob_cases import with_auto, with_changes, with_joins
from zenflow.config import ZenFlowConfig


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
    assert [w.bucket_slots for w in planned if w.deferred_count] == [2, 1, 5]
    assert [w.first_bucket for w in planned] == [0, 0, 0, 0, 1]  # 56 bytes are cut; what is frozen opens none
    assert planned[-1].bucket_count == 2


def single(columns: int = 4, **knobs: Any) -> tuple[nn.Parameter, ReferenceAdamW]:
    weight = nn.Parameter(torch.ones(1, columns))
    return weight, ReferenceAdamW([weight], lr=0.1, weight_decay=0.0, config=ZenFlowConfig(**knobs))


def changed(weight: nn.Parameter, optimizer: ReferenceAdamW, grad: list[float] | None) -> list[int]:
    """Columns whose value moves in a step with this gradient."""
    before = weight.detach().clone()
    weight.grad = None if grad is None else torch.tensor([grad])
    optimizer.step()
    return (weight.detach() != before).nonzero()[:, 1].tolist()


def test_buckets_become_visible_on_schedule() -> None:
    # 6 deferred columns, 2 a bucket, S = 3, L = 2: windows close at 3, 6; bucket b shows after 3 + 1 + floor(2b / 3).
    weight, optimizer = single(7, topk_ratio=0.14, update_interval=3, apply_lag=2, bucket_bytes=8)
    grad = [9.0, 1, 1, 1, 1, 1, 1]
    seen = [changed(weight, optimizer, grad) for _ in range(7)]
    assert seen == [[0], [0], [0], [0, 1, 2, 3, 4], [0, 5, 6], [0], [0, 1, 2, 3, 4]]


def test_warm_up_and_flush_close_at_once() -> None:
    weight, optimizer = single(topk_ratio=0.25, update_interval=2, apply_lag=1, full_warm_up_rounds=1)
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
    weight, optimizer = single(topk_ratio=0.5, update_interval=3, select_interval=2)
    changed(weight, optimizer, [2.0, math.inf, 2.0, 2.0])
    assert optimizer.selected(weight) == [0, 1]  # the first columns, until the first close
    assert optimizer._weights[0].pending == {0, 2}  # ties to the lower column, infinity counts as nothing
    changed(weight, optimizer, [0.0, 0.0, 9.0, 9.0])  # step 2: not a step of selection
    changed(weight, optimizer, [1.0, 9.0, 2.0, 8.0])  # step 3: selection, and the same step closes
    assert optimizer.selected(weight) == [1, 3]
    for step in (4, 5):  # step 5 selects, but no window closes before 6
        changed(weight, optimizer, [9.0, 0.0, 9.0, 0.0])
        assert optimizer.selected(weight) == [1, 3], step
    optimizer.flush()
    assert optimizer.selected(weight) == [0, 2]


def test_flush_in_mean_mode_uses_the_last_steps_hyperparameters() -> None:
    weight, optimizer = single(topk_ratio=0.0, update_interval=4, deferred_update="mean")
    changed(weight, optimizer, [1.0, 1.0, 1.0, 1.0])
    optimizer.param_groups[0]["lr"] = 5.0  # a scheduler's step comes before the flush
    optimizer.flush()
    assert weight.detach().sub(0.9).abs().max() < 1e-6


def test_the_next_step_closes_under_the_old_knobs() -> None:
    weight, optimizer = single(topk_ratio=0.25, update_interval=4, apply_lag=4)
    grad = [9.0, 1, 1, 1]
    assert changed(weight, optimizer, grad) == [0]
    assert optimizer.set_knobs(update_interval=3, overlap_step=False, apply_lag=3) == 2
    # Step 2 closes; the one bucket becomes visible after step 3, as overlap_step was still on. Then closes at 5 and 8.
    seen = [changed(weight, optimizer, grad) for _ in range(7)]
    assert seen == [[0], [0, 1, 2, 3], [0], [0, 1, 2, 3], [0], [0], [0, 1, 2, 3]]
    assert optimizer.closing_steps == [2, 5, 8]


def test_the_lag_of_a_change_is_the_old_one_and_the_window_as_long_as_it_was() -> None:
    # 6 buckets of one column, S = L = 4. The change is known after step 2, so the window has 3 steps and closes at 3:
    # bucket b shows after 4 + floor(3b / 6) = 4, 4, 5, 5, 6, 6.
    weight, optimizer = single(7, topk_ratio=0.14, update_interval=4, bucket_bytes=4)
    grad = [9.0, 1, 1, 1, 1, 1, 1]
    assert [changed(weight, optimizer, grad) for _ in range(2)] == [[0], [0]]
    assert optimizer.set_knobs(update_interval=7, apply_lag=1) == 3
    assert [changed(weight, optimizer, grad) for _ in range(5)] == [[0], [0, 1, 2], [0, 3, 4], [0, 5, 6], [0]]
    assert optimizer.closing_steps == [3]


def test_another_split_closes_at_once_and_chooses_by_the_newest_gradient() -> None:
    weight, optimizer = single(6, topk_ratio=0.17, update_interval=4, select_interval=1)
    assert [changed(weight, optimizer, [9.0, 1, 1, 1, 1, 1]) for _ in range(4)] == [[0]] * 4
    changed(weight, optimizer, [9.0, 1, 1, 1, 1, 8])
    assert optimizer.set_knobs(topk_ratio=0.34) == 6
    assert changed(weight, optimizer, [0.5, 1, 7, 7, 1, 7]) == [0, 1, 2, 3, 4, 5]  # visible all
    assert optimizer.selected(weight) == [2, 3]
    assert optimizer._weights[0].slot == {0: 0, 1: 1, 4: 2, 5: 3}
    assert optimizer.closing_steps == [4, 6]
    assert not optimizer.in_flight(weight)
    assert changed(weight, optimizer, [1.0] * 6) == [2, 3]
    _, _, counts = optimizer.columns_state(weight)
    assert counts == [6, 6, 7, 7, 6, 6]


def test_a_weight_whose_own_plan_stays_keeps_its_slots_and_resolves_its_selection() -> None:
    # 0.3 and 0.4 of 3 columns are both 1; of 10 columns they are 3 and 4.
    weights = [nn.Parameter(torch.ones(1, 3)), nn.Parameter(torch.ones(1, 10))]
    config = ZenFlowConfig(topk_ratio=0.3, update_interval=2, select_interval=2)
    optimizer = ReferenceAdamW(weights, config=config)
    for loud in (2, 2, 1, 0):  # columns of the first weight; steps 1 and 3 select, 2 and 4 close
        for weight in weights:
            weight.grad = torch.ones_like(weight)
            weight.grad[0, loud] = 9.0
        if loud == 0:
            optimizer.set_knobs(topk_ratio=0.4)
        optimizer.step()
    assert optimizer.selected(weights[0]) == [1]
    assert optimizer._weights[0].slot == {2: 0, 0: 1}  # a column that leaves gives its slot to the one that comes
    assert optimizer.selected(weights[1]) == [0, 1, 2, 3]


def test_an_added_group_flushes_and_starts_with_its_own_first_gradient() -> None:
    weight, optimizer = single(topk_ratio=0.25, update_interval=4, select_interval=1)
    changed(weight, optimizer, [9.0, 1, 1, 1])
    changed(weight, optimizer, [1.0, 1, 9, 1])
    optimizer.set_knobs(update_interval=2)
    extra = nn.Parameter(torch.ones(1, 4))
    optimizer.add_param_group({"params": [extra], "lr": 0.5})
    assert optimizer.selected(weight) == [2]
    assert not optimizer.pending_entries()
    assert optimizer.config.update_interval == 4
    extra.grad = torch.tensor([[1.0, 9, 1, 1]])
    changed(weight, optimizer, [1.0, 1, 9, 1])
    assert optimizer.selected(extra) == [1]
    assert extra.detach().tolist() == [[0.5, 0.5, 1.0, 1.0]]  # the first was selected, the second is what leaves
    assert optimizer.closing_steps == [3]
    with pytest.raises(ValueError, match="more than one parameter group"):
        optimizer.add_param_group({"params": [weight]})


def test_random_changes_exercise_what_they_claim() -> None:
    met: Counter[str] = Counter()
    for seed in range(100):
        case = case_of(seed, steps=20)
        rng = random.Random(seed)
        case = with_auto(rng, case) if seed % 2 else case
        case = with_changes(rng, with_joins(rng, case) if seed % 3 == 0 else case)
        last: list[ReferenceOptimizer] = []
        run(case, ReferenceAdamW, on_step=lambda optimizer, *_, last=last: last.append(optimizer))
        met.update(name for name, count in last[-1].events.items() if count)
    least = {
        "knobs changed": 60,
        "splits changed": 60,
        "plans changed": 40,
        "groups added": 20,
        "closed by agreement": 10,
        "kept open by disagreement": 8,
        "selections dropped": 3,
        "selections taken": 8,
        "columns moved": 15,
        "in flight after a step": 15,
        "columns coasting": 15,
    }
    assert {name: met[name] for name in least if met[name] < least[name]} == {}, dict(met)
