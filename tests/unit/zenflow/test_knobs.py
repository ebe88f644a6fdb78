"""Knobs that change while it trains: the weights after every step, and the windows' ends, are the reference's."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import event, given, note
from torch import nn

from tests.support.tiers import combinations, fast, repeated
from tests.support.zenflow.case_data import Presence
from tests.support.zenflow.cases import Case, Make, Param, Trace, case_of, draw_case, run, same_bits
from tests.support.zenflow.change_cases import closing_steps, compare
from tests.support.zenflow.family_cases import OTHERS, OURS, REFERENCE, draw_rule
from tests.support.zenflow.knob_cases import SPLIT, draw_knobs, merged, with_auto, with_changes, with_joins
from tests.support.zenflow.rule_cases import NAMES
from tests.support.zenflow.torch_oracle import assert_close_to_torch
from tests.unit.zenflow.test_invariants import RANDOMS, SYNC, thorough
from zenflow import ConfigError, ZenFlowAdamW, ZenFlowConfig
from zenflow.late_weights import LateWeights, PendingUpdate
from zenflow.windows import Windows

CLIPPING = ("max_grad_norm", "skip_nonfinite")


def without_knobs(case: Case) -> Case:
    """The case without its changes of knobs."""
    return replace(case, between=tuple(h for h in case.between if h[1] != "knobs"))


def other_than_knobs(trace: Trace) -> Trace:
    return [(event, weights) for event, weights in trace if not event.startswith("knobs")]


@given(RANDOMS)
@thorough(60)
def test_i2_with_changing_knobs(rng: random.Random) -> None:
    case = draw_case(rng, rule=draw_rule(rng))
    case = with_auto(rng, case) if rng.random() < 0.2 else case
    case = with_changes(rng, case, share=rng.choice([0.1, 0.25, 0.5]))
    note(repr(case))
    event(case.rule)
    compare(case)


@pytest.mark.parametrize("seed", range(repeated(40)))
def test_i2_with_changing_knobs_on_fixed_cases(seed: int) -> None:
    compare(with_changes(random.Random(seed), case_of(seed, steps=20, rounded_grads=False)))


@pytest.mark.parametrize(
    ("native", "rule", "seed"), combinations(native=["require", "off"], rule=OTHERS, seed=range(3))
)
def test_i2_with_changing_knobs_on_either_engine(
    native: str, rule: str, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ZENFLOW_NATIVE", native)
    case = case_of(2000 + seed, rule=rule, steps=14, offload_ratio=1.0, rounded_grads=False)
    compare(with_changes(random.Random(seed), case))


@pytest.mark.parametrize("before", [{"update_interval": 3}, {"overlap_step": False}, {"full_warm_up_rounds": 4}])
@pytest.mark.parametrize("after", range(8))
def test_i2_one_change_of_the_split_after_each_step(after: int, before: dict[str, Any]) -> None:
    """In warm-up, inside a window, at its end, with a window in flight: each place once."""
    fixed: dict[str, Any] = {"topk_ratio": 0.25, "offload_ratio": 1.0, "steps": 12, "bucket_bytes": 20, "apply_lag": 3}
    for seed, knobs in enumerate([{"topk_ratio": 0.6}, {"offload_ratio": 0.3}]):
        case = case_of(300 + seed, **{"update_interval": 3, **fixed, **before})
        compare(merged(case, [(after, "knobs", knobs)]))


@pytest.mark.parametrize("knobs", [{"topk_ratio": 0.5}, {"offload_ratio": 0.4}, {"update_interval": 2}])
@pytest.mark.parametrize("skipped", [False, True])
def test_i2_a_change_whose_step_is_skipped_or_without_gradients(knobs: dict[str, Any], skipped: bool) -> None:
    fixed: dict[str, Any] = {"topk_ratio": 0.25, "update_interval": 4, "offload_ratio": 1.0, "apply_lag": None}
    for seed in range(fast(1, all_of=3)):
        case = case_of(400 + seed, steps=12, found_inf_at=frozenset({6} if skipped else ()), **fixed)
        params = case.params if skipped else tuple(replace(p, presence="sometimes") for p in case.params)
        compare(merged(replace(case, params=params), [(5, "knobs", knobs)]))


@pytest.mark.parametrize("seed", range(repeated(5)))
def test_i2_there_and_back_again(seed: int) -> None:
    """The state goes through every tier and back."""
    case = case_of(500 + seed, steps=24, topk_ratio=0.25, offload_ratio=1.0, update_interval=3, apply_lag=None)
    ways: list[dict[str, Any]] = [
        {"offload_ratio": r, "topk_ratio": k} for r, k in ((0, 0), (1, 1), (0.5, 0), (1, 0.3))
    ]
    compare(merged(case, [(4 * i + 3, "knobs", knobs) for i, knobs in enumerate(ways)]))


@pytest.mark.parametrize("seed", range(4))
def test_i2_with_changing_knobs_whatever_the_hosts_speed(seed: int, slow_host: Callable[..., Make]) -> None:
    case = case_of(600 + seed, steps=16, overlap_step=True, topk_ratio=0.3, offload_ratio=1.0, rounded_grads=False)
    compare(with_changes(random.Random(seed), case), slow_host(seed))


@pytest.fixture
def late_by_chance(monkeypatch: pytest.MonkeyPatch) -> random.Random:
    """Whether a bucket counts as late is drawn from this, however fast the machine is."""
    rng, leave = random.Random(0), LateWeights.leave

    def drawn(waits: LateWeights, flight: PendingUpdate) -> bool:
        if rng.random() < 0.5:
            return False
        if flight.job.transfer is None:
            return leave(waits, flight)
        with monkeypatch.context() as patch:
            patch.setattr(type(flight.job.transfer), "done", lambda _: False)
            return leave(waits, flight)

    monkeypatch.setattr(LateWeights, "leave", drawn)
    return rng


@pytest.mark.parametrize("seed", range(fast(10, all_of=100)))
def test_i2_with_changing_knobs_whichever_buckets_are_late(seed: int, late_by_chance: random.Random) -> None:
    late_by_chance.seed(seed)
    case = case_of(500 + seed, steps=20, pipeline="bucket", offload_ratio=1.0, bucket_bytes=80, rounded_grads=False)
    compare(with_changes(random.Random(seed), replace(case, with_module=True), share=0.1))


@pytest.mark.parametrize("presence", ["always", "sometimes"])
@pytest.mark.parametrize("seed", range(fast(10, all_of=100)))
def test_i2_late_buckets_that_a_step_waits_for(
    seed: int, presence: Presence, late_by_chance: random.Random, monkeypatch: pytest.MonkeyPatch
) -> None:
    late_by_chance.seed(seed)
    taken: list[object] = []
    monkeypatch.setattr(Windows, "take_outside_write", lambda *weight_and_write: taken.append(weight_and_write))
    knobs: dict[str, Any] = {"look_ahead": "guess", "window_phase": "staggered", "update_interval": 3, "apply_lag": 2}
    knobs |= {"deferred_update": "replay", "pipeline": "bucket", "offload_ratio": 1.0, "bucket_bytes": 80}
    knobs |= {"select_strategy": "step", "select_interval": 1, "topk_ratio": 0.4, "full_warm_up_rounds": 0}
    shape = Param("linear", 7, 13, 0, presence, bf16=False)  # four buckets: two are due when the last one closes
    group = {"lr": 0.1, "betas": (0.0, 0.9), "eps": 1e-8, "weight_decay": 0.3}  # where nothing coasts
    case = case_of(seed, steps=20, rounded_grads=False, **knobs)
    compare(replace(case, params=(shape,), groups=(group,), with_module=True, flush_after=frozenset({9, 14})))
    assert not taken, "its own writes were taken for somebody else's"


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("threads", [1, 4])
def test_i2_with_changing_knobs_whatever_the_threads(threads: int, seed: int, native_host: Callable[..., Make]) -> None:
    case = case_of(700 + seed, steps=16, overlap_step=True, topk_ratio=0.3, offload_ratio=1.0, rounded_grads=False)
    compare(with_changes(random.Random(seed), case, fixed=("host_threads",)), native_host(threads, seed))


@given(RANDOMS)
@thorough(35)
def test_i2b_replay_is_the_plain_optimizer_whatever_was_changed(rng: random.Random) -> None:
    case = draw_case(rng, rule=draw_rule(rng), grads_depend_on_weights=False, deferred_update="replay")
    case = with_auto(rng, case) if rng.random() < 0.2 else case
    case = with_joins(rng, case) if rng.random() < 0.3 else case
    case = with_changes(rng, case, fixed=("deferred_update", *CLIPPING))
    note(repr(case))
    event(case.rule)
    late = [(event, weights) for event, weights in run(case, OURS[case.rule]) if "flush" in event or "join" in event]
    plain = replace(case.config, offload_ratio=0.0, full_warm_up_rounds=0, **SYNC)
    expected = run(without_knobs(case), REFERENCE[case.rule], config=plain)
    for (_, a), (_, b) in zip(late, [t for t in expected if "flush" in t[0] or "join" in t[0]], strict=True):
        assert all(bool(same_bits(x, y).all()) for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize("seed", range(repeated(5)))
@pytest.mark.parametrize("rule", NAMES)
def test_i1_synchronous_is_torch_whatever_the_split_becomes(rule: str, seed: int) -> None:
    case = case_of(seed, rule=rule, grads_depend_on_weights=False, steps=9, **SYNC)
    fixed = ("update_interval", "apply_lag", "overlap_step", *CLIPPING)
    changing = with_changes(random.Random(seed), case, fixed=fixed)
    assert_close_to_torch(without_knobs(changing), other_than_knobs(run(changing, OURS[rule])))


def trained(steps: int, **knobs: Any) -> tuple[nn.Parameter, ZenFlowAdamW]:
    weight = nn.Parameter(torch.ones(2, 8))
    optimizer = ZenFlowAdamW([weight], lr=0.1, config=ZenFlowConfig(**{"update_interval": 4, **knobs}))
    for _ in range(steps):
        weight.grad = torch.ones(2, 8)
        optimizer.step()
    return weight, optimizer


def test_the_step_that_set_knobs_returns() -> None:
    weight, optimizer = trained(0)
    assert optimizer.set_knobs(topk_ratio=0.5) == 1
    assert optimizer.set_knobs(update_interval=3) == 1
    for _ in range(5):
        weight.grad = torch.ones(2, 8)
        optimizer.step()
    assert optimizer.set_knobs(update_interval=2) == 6
    assert optimizer.set_knobs(topk_ratio=0.5) == 6
    for _ in range(4):
        weight.grad = torch.ones(2, 8)
        optimizer.step()
    assert closing_steps(optimizer) == [3, 6, 8]
    optimizer.close()


@pytest.mark.parametrize(
    ("knobs", "match"),
    [
        ({"topk_ratio": 2}, "topk_ratio is 2; it must be a number from 0 to 1"),
        ({"bucket_bytes": 3}, "bucket_bytes cannot be changed"),
        ({"apply_lag": 5}, "apply_lag is 5; it must be"),
        ({"update_interval": 2}, "apply_lag is 3; it must be"),
        ({"steps_per_epoch": 1}, "steps_per_epoch cannot be changed"),
        ({"lr": 1}, "lr cannot be changed"),
    ],
)
def test_a_refused_change_changes_nothing(knobs: dict[str, Any], match: str) -> None:
    seen = []
    for refused in (False, True):
        weight, optimizer = trained(2, apply_lag=3)
        if refused:
            with pytest.raises(ConfigError, match=match):
                optimizer.set_knobs(**{"overlap_step": False, "topk_ratio": 0.5, **knobs})
        for _ in range(4):
            weight.grad = torch.ones(2, 8)
            optimizer.step()
        seen.append((closing_steps(optimizer), weight.detach().clone()))
        optimizer.close()
    assert seen[0][0] == seen[1][0] == [4]
    assert bool(same_bits(seen[0][1], seen[1][1]).all())


def test_skipping_what_is_not_finite_begins_after_the_change() -> None:
    weight, optimizer = trained(1, topk_ratio=0.0)
    optimizer.set_knobs(skip_nonfinite=True)
    weight.grad = torch.ones(2, 8)
    optimizer.step()
    weight.grad = torch.full((2, 8), float("nan"))
    optimizer.step()
    optimizer.flush()
    assert bool(weight.isfinite().all())
    optimizer.set_knobs(skip_nonfinite=False)
    optimizer.step()
    optimizer.step()
    optimizer.flush()
    assert bool(weight.isnan().all())
    optimizer.close()


def test_drawn_changes_are_of_every_kind() -> None:
    rng = random.Random(1)
    drawn = [draw_knobs(rng, ZenFlowConfig()) for _ in range(300)]
    assert {name for knobs in drawn for name in knobs} >= {*SPLIT, "update_interval", "deferred_update", "pipeline"}
    assert any(len(knobs) > 2 for knobs in drawn)
