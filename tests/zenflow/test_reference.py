"""The oracle itself: its arithmetic against torch, its schedule against numbers worked out by hand."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.support.oracle import ReferenceAdamW, plan
from tests.tiers import repeated
from tests.zenflow.cases import Case, case_of, run, same_bits
from tests.zenflow.family_cases import OTHERS, REFERENCE
from tests.zenflow.torch_oracle import assert_close_to_torch
from zenflow.config import ZenFlowConfig
from zenflow.errors import UnsupportedError

SYNC: dict[str, Any] = {"update_interval": 1, "overlap_step": False}


def ulps(a: Tensor, b: Tensor, scale: Tensor) -> float:
    """Greatest distance in units of the last place of `scale`, the largest number that took part."""
    return float(((a - b).abs() / (scale.abs().frexp().exponent.sub(24).float().exp2())).max())


@pytest.mark.parametrize("seed", range(repeated(20)))
def test_one_step_from_equal_state_is_torch_within_4_ulp(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    weight = nn.Parameter(torch.randn(7, 11, generator=generator))
    ours = ReferenceAdamW([weight], lr=0.01, config=ZenFlowConfig(topk_ratio=0.3, select_interval=2, **SYNC))
    for _ in range(seed):  # zero steps too: the first update
        weight.grad = torch.randn(7, 11, generator=generator)
        ours.step()
    twin = nn.Parameter(weight.detach().clone())
    theirs = torch.optim.AdamW([twin], lr=0.01)
    if seed:
        _, (exp_avg, exp_avg_sq), counts = ours.columns_state(weight)
        assert counts == [seed] * 11
        theirs.state[twin] = {"step": torch.tensor(float(seed)), "exp_avg": exp_avg, "exp_avg_sq": exp_avg_sq}
    before = weight.detach().clone()
    weight.grad = torch.randn(7, 11, generator=generator)
    twin.grad = weight.grad.clone()
    ours.step()
    theirs.step()
    assert ulps(weight.detach(), twin.detach(), torch.maximum(before.abs(), weight.detach().abs())) <= 4


@pytest.mark.parametrize(
    ("rule", "seed"),
    [*(("adamw", seed) for seed in range(60)), *((rule, seed) for rule in OTHERS for seed in range(20))],
)
def test_synchronous_is_torch_on_fp32_masters(rule: str, seed: int) -> None:
    case = case_of(seed, rule=rule, grads_depend_on_weights=False, apply_lag=None, **SYNC)
    assert_close_to_torch(case, run(case, REFERENCE[rule]))


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


def test_plan_follows_the_module_and_sees_conv1d_transposed() -> None:
    class Conv1D(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(3, 7))  # [in, out]

    model = nn.ModuleList([Conv1D(), nn.Linear(4, 2)])
    extra = nn.Parameter(torch.zeros(2, 2))
    groups = [{"params": [extra, model[1].weight]}, {"params": [model[0].weight, model[1].bias]}]
    planned = plan(groups, ZenFlowConfig(), model)
    order = [model[0].weight, model[1].weight, model[1].bias, extra]
    assert all(w.param is param for w, param in zip(planned, order, strict=True))
    assert [w.columns for w in planned] == [3, 4, 2, 2]
    assert [w.transposed for w in planned] == [True, False, False, False]
    assert [w.group for w in planned] == [1, 0, 1, 0]


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


def test_a_skipped_step_cancels_the_pending_selection() -> None:
    weight, optimizer = single(ZenFlowConfig(topk_ratio=0.5, update_interval=4, select_interval=1, skip_nonfinite=True))
    changed(weight, optimizer, [9.0, 9.0, 1.0, 1.0])
    changed(weight, optimizer, [1.0, 1.0, 9.0, 9.0])
    assert changed(weight, optimizer, [1.0, math.nan, 9.0, 9.0]) == []
    optimizer.flush()
    assert optimizer.selected(weight) == [0, 1]


def test_flush_in_mean_mode_uses_the_last_steps_hyperparameters() -> None:
    weight, optimizer = single(ZenFlowConfig(topk_ratio=0.0, update_interval=4, deferred_update="mean"))
    changed(weight, optimizer, [1.0, 1.0, 1.0, 1.0])
    optimizer.param_groups[0]["lr"] = 5.0  # a scheduler's step comes before the flush
    optimizer.flush()
    assert weight.detach().sub(0.9).abs().max() < 1e-6


def test_log_survives_zero_grad_in_place() -> None:
    weight, optimizer = single(ZenFlowConfig(topk_ratio=0.0, update_interval=2))
    changed(weight, optimizer, [1.0, 1.0, 1.0, 1.0])
    optimizer.zero_grad(set_to_none=False)
    optimizer.flush()
    assert bool((weight < 1).all())


def test_refuses_sparse_gradients() -> None:
    table = nn.Embedding(4, 3, sparse=True)
    optimizer = ReferenceAdamW(table.parameters())
    table(torch.tensor([1])).sum().backward()
    with pytest.raises(UnsupportedError, match="SparseAdam"):
        optimizer.step()
    table.weight.grad = None
    optimizer.step()


def test_an_optimizer_compared_with_itself_is_equal() -> None:
    case: Case = case_of(5)
    for (_, a), (_, b) in zip(run(case, ReferenceAdamW), run(case, ReferenceAdamW), strict=True):
        assert all(bool(same_bits(x, y).all()) for x, y in zip(a, b, strict=True))
