"""The oracle across changes of knobs and added groups: what must not change, and schedules worked out by hand."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from tests.support.oracle import ReferenceAdamW, ReferenceOptimizer
from tests.zenflow.cases import Case, Trace, case_of, run
from tests.zenflow.knob_cases import with_auto, with_changes, with_joins
from zenflow.config import ZenFlowConfig

SYNC: dict[str, Any] = {"update_interval": 1, "overlap_step": False}
CLIPPING = ("max_grad_norm", "skip_nonfinite")


def without_knobs(case: Case) -> Case:
    """The case without its changes of knobs."""
    return replace(case, between=tuple(h for h in case.between if h[1] != "knobs"))


def other_than_knobs(trace: Trace) -> Trace:
    return [(event, weights) for event, weights in trace if not event.startswith("knobs")]


def single(columns: int = 4, **knobs: Any) -> tuple[nn.Parameter, ReferenceAdamW]:
    weight = nn.Parameter(torch.ones(1, columns))
    return weight, ReferenceAdamW([weight], lr=0.1, weight_decay=0.0, config=ZenFlowConfig(**knobs))


def moved(weight: nn.Parameter, optimizer: ReferenceAdamW, grad: list[float] | None) -> list[int]:
    """Columns whose value moves in a step with this gradient."""
    before = weight.detach().clone()
    weight.grad = None if grad is None else torch.tensor([grad])
    optimizer.step()
    return (weight.detach() != before).nonzero()[:, 1].tolist()


def test_the_next_step_closes_under_the_old_knobs() -> None:
    weight, optimizer = single(topk_ratio=0.25, update_interval=4, apply_lag=4)
    grad = [9.0, 1, 1, 1]
    assert moved(weight, optimizer, grad) == [0]
    assert optimizer.set_knobs(update_interval=3, overlap_step=False, apply_lag=3) == 2
    # Step 2 closes; the one bucket becomes visible after step 3, as overlap_step was still on. Then closes at 5 and 8.
    seen = [moved(weight, optimizer, grad) for _ in range(7)]
    assert seen == [[0], [0, 1, 2, 3], [0], [0, 1, 2, 3], [0], [0], [0, 1, 2, 3]]
    assert optimizer.closing_steps == [2, 5, 8]


def test_the_lag_of_a_change_is_the_old_one_and_the_window_as_long_as_it_was() -> None:
    # 6 buckets of one column, S = L = 4. The change is known after step 2, so the window has 3 steps and closes at 3:
    # bucket b shows after 4 + floor(3b / 6) = 4, 4, 5, 5, 6, 6.
    weight, optimizer = single(7, topk_ratio=0.14, update_interval=4, bucket_bytes=4)
    grad = [9.0, 1, 1, 1, 1, 1, 1]
    assert [moved(weight, optimizer, grad) for _ in range(2)] == [[0], [0]]
    assert optimizer.set_knobs(update_interval=7, apply_lag=1) == 3
    assert [moved(weight, optimizer, grad) for _ in range(5)] == [[0], [0, 1, 2], [0, 3, 4], [0, 5, 6], [0]]
    assert optimizer.closing_steps == [3]


def test_another_split_closes_at_once_and_chooses_by_the_newest_gradient() -> None:
    weight, optimizer = single(6, topk_ratio=0.17, update_interval=4, select_interval=1)
    assert [moved(weight, optimizer, [9.0, 1, 1, 1, 1, 1]) for _ in range(4)] == [[0]] * 4
    moved(weight, optimizer, [9.0, 1, 1, 1, 1, 8])
    assert optimizer.set_knobs(topk_ratio=0.34) == 6
    assert moved(weight, optimizer, [0.5, 1, 7, 7, 1, 7]) == [0, 1, 2, 3, 4, 5]  # visible all
    assert optimizer.selected(weight) == [2, 3]
    assert optimizer._weights[0].slot == {0: 0, 1: 1, 4: 2, 5: 3}
    assert optimizer.closing_steps == [4, 6]
    assert not optimizer.in_flight(weight)
    assert moved(weight, optimizer, [1.0] * 6) == [2, 3]
    _, _, counts = optimizer.columns_state(weight)
    assert counts == [6, 6, 7, 7, 6, 6]


def test_a_weight_whose_own_plan_stays_keeps_its_slots_and_resolves_its_selection() -> None:
    # 0.3 and 0.4 of 3 columns are both 1; of 10 columns they are 3 and 4.
    weights = [nn.Parameter(torch.ones(1, 3)), nn.Parameter(torch.ones(1, 10))]
    config = ZenFlowConfig(topk_ratio=0.3, update_interval=4, select_interval=2)
    optimizer = ReferenceAdamW(weights, config=config)
    for loud in (2, 2, 0, 1):  # columns of the first weight; step 3 selects
        for weight in weights:
            weight.grad = torch.ones_like(weight)
            weight.grad[0, loud] = 9.0
        if loud == 1:
            optimizer.set_knobs(topk_ratio=0.4)
        optimizer.step()
    assert optimizer.selected(weights[0]) == [0]
    assert optimizer._weights[0].slot == {2: 0, 1: 1}  # a column that leaves gives its slot to the one that comes
    assert optimizer.selected(weights[1]) == [0, 1, 2, 3]


def test_an_added_group_flushes_and_starts_with_its_own_first_gradient() -> None:
    weight, optimizer = single(topk_ratio=0.25, update_interval=4, select_interval=1)
    moved(weight, optimizer, [9.0, 1, 1, 1])
    moved(weight, optimizer, [1.0, 1, 9, 1])
    optimizer.set_knobs(update_interval=2)
    extra = nn.Parameter(torch.ones(1, 4))
    optimizer.add_param_group({"params": [extra], "lr": 0.5})
    assert optimizer.selected(weight) == [2]
    assert not optimizer.pending_entries()
    assert optimizer.config.update_interval == 4
    extra.grad = torch.tensor([[1.0, 9, 1, 1]])
    moved(weight, optimizer, [1.0, 1, 9, 1])
    assert optimizer.selected(extra) == [1]
    assert extra.detach().tolist() == [[1.0, 0.5, 1.0, 1.0]]
    assert optimizer.closing_steps == [3]
    with pytest.raises(ValueError, match="more than one parameter group"):
        optimizer.add_param_group({"params": [weight]})


def test_random_changes_exercise_what_they_claim(every_fault: None) -> None:
    met: Counter[str] = Counter()
    for seed in range(80):
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
        "kept open by disagreement": 10,
        "selections dropped": 3,
        "selections taken": 8,
        "columns moved": 15,
        "in flight after a step": 15,
    }
    assert {name: met[name] for name in least if met[name] < least[name]} == {}, dict(met)
