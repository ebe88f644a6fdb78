"""Invariants I1, I2, I2b and I5 of the whole family over random cases of the whole knob space."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, event, given, note, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from tests.support.oracle import ReferenceAdamW
from tests.support.tiers import combinations, fast, repeated
from tests.support.zenflow.cases import (
    FIXED_CASES,
    Case,
    Make,
    Trace,
    assert_same,
    case_of,
    draw_case,
    examples,
    run,
    same_bits,
)
from tests.support.zenflow.family_cases import OTHERS, OURS, REFERENCE, draw_rule
from tests.support.zenflow.rule_cases import NAMES
from tests.support.zenflow.torch_oracle import assert_close_to_torch
from zenflow import ZenFlowAdamW, ZenFlowConfig

SYNC: dict[str, Any] = {"update_interval": 1, "overlap_step": False, "apply_lag": None}
RANDOMS = st.randoms(use_true_random=False)


def thorough(count: int) -> Callable[[Any], Any]:
    """Settings of a property test here: a case is a whole training run, so examples are few and have no deadline."""
    return settings(
        max_examples=examples(count),
        deadline=None,
        print_blob=True,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.function_scoped_fixture],
    )


def check_against_reference(case: Case, make: Make | None = None) -> None:
    assert_same(case, run(case, make or OURS[case.rule]), run(case, REFERENCE[case.rule]))


# I1: where everything is synchronous, the split is invisible.


@given(RANDOMS)
@thorough(75)
def test_i1_synchronous_is_torch(rng: random.Random) -> None:
    case = draw_case(rng, rule=draw_rule(rng), grads_depend_on_weights=False, **SYNC)
    note(repr(case))
    event(case.rule)
    assert_close_to_torch(case, run(case, OURS[case.rule]))


@pytest.mark.parametrize("seed", range(repeated(20)))
@pytest.mark.parametrize("rule", NAMES)
def test_i1_one_step_is_torch(rule: str, seed: int) -> None:
    case = case_of(seed, rule=rule, steps=1, grads_depend_on_weights=False, **SYNC)
    assert_close_to_torch(case, run(case, OURS[rule]))


@pytest.mark.parametrize("rule", NAMES)
def test_i1_knobs_of_the_split_do_not_matter_to_a_bit(rule: str) -> None:
    base = case_of(4, rule=rule, steps=12, grads_depend_on_weights=True, flush_after=frozenset(), **SYNC)
    knobs: dict[str, Any] = {"topk_ratio": 0.0, "offload_ratio": 0.0, "select_interval": 1, "bucket_bytes": 64_000_000}
    plain = run(base, OURS[rule], config=replace(base.config, **knobs))
    for values in combinations(topk_ratio=(0.0, 0.4, 1.0), offload_ratio=(0.3, 1.0), bucket_bytes=(1, 100)):
        knobs = dict(zip(("topk_ratio", "offload_ratio", "bucket_bytes"), values, strict=True))
        assert_same(base, run(base, OURS[rule], config=replace(base.config, **knobs)), plain)


# I2: with windows, overlap, lag and reselection the weights are the reference's, bit for bit, after every step.


@given(RANDOMS)
@thorough(180)
def test_i2_equals_the_reference(rng: random.Random) -> None:
    case = draw_case(rng, rule=draw_rule(rng))
    note(repr(case))
    event(f"{case.config.deferred_update}, {'overlap' if case.config.overlap_step else 'no overlap'}")
    event(case.rule)
    check_against_reference(case)


@pytest.mark.parametrize("seed", range(FIXED_CASES))
def test_i2_equals_the_reference_on_fixed_cases(seed: int) -> None:
    check_against_reference(case_of(seed))


@pytest.mark.parametrize(
    ("native", "rule", "seed"), combinations(native=["require", "off"], rule=OTHERS, seed=range(repeated(20)))
)
def test_i2_equals_the_reference_on_either_engine(
    native: str, rule: str, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ZENFLOW_NATIVE", native)
    case = case_of(1000 + seed, rule=rule, steps=14, offload_ratio=1.0)
    check_against_reference(case)


@pytest.mark.parametrize("seed", range(repeated(30)))
def test_i2_adamw_equals_the_reference_without_the_native_engine(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ZENFLOW_NATIVE", "off")
    check_against_reference(case_of(seed))


@pytest.mark.parametrize("mode", ["replay", "mean"])
@pytest.mark.parametrize("interval", range(1, 8))
def test_i2_for_every_window_and_lag(interval: int, mode: str) -> None:
    for lag in fast({1, interval}, all_of=range(1, interval + 1)):
        fixed = {"update_interval": interval, "apply_lag": lag, "deferred_update": mode, "overlap_step": True}
        check_against_reference(case_of(100 * interval + lag, steps=3 * interval + 2, topk_ratio=0.3, **fixed))


@pytest.mark.parametrize("rule", NAMES)
@pytest.mark.parametrize("seed", range(repeated(8)))
def test_i2_nonfinite_gradients_go_through_without_the_skip_flag(seed: int, rule: str) -> None:
    fixed: dict[str, Any] = {"skip_nonfinite": False, "max_grad_norm": None, "nonfinite_at": frozenset({4})}
    check_against_reference(case_of(seed, rule=rule, steps=9, **fixed))


@pytest.mark.parametrize("rule", ["adamw", "sgd"])
@pytest.mark.parametrize("seed", range(repeated(6)))
def test_i2_does_not_depend_on_the_hosts_speed(seed: int, rule: str, slow_host: Callable[..., Make]) -> None:
    """slow_host: from conftest; builds an optimizer whose host is held up at random moments, by seed."""
    case = case_of(seed, rule=rule, steps=16, overlap_step=True, topk_ratio=0.3, offload_ratio=1.0)
    check_against_reference(case, slow_host(seed, rule))


@pytest.mark.parametrize(("rule", "seed"), [*(("adamw", seed) for seed in range(4)), *((rule, 4) for rule in OTHERS)])
@pytest.mark.parametrize("threads", fast([2, 8], all_of=[1, 2, 8]))
def test_i2_does_not_depend_on_threads_and_their_delays(
    threads: int, rule: str, seed: int, native_host: Callable[..., Make]
) -> None:
    """native_host: from conftest; builds an optimizer whose engine has that many threads, each late at random."""
    case = case_of(100 + seed, rule=rule, steps=16, overlap_step=True, topk_ratio=0.3, offload_ratio=1.0)
    check_against_reference(case, native_host(threads, seed, rule))


@pytest.mark.parametrize("seed", range(4))
def test_i2_two_runs_are_equal(seed: int) -> None:
    case = case_of(seed, steps=12, overlap_step=True)
    assert_same(case, run(case, ZenFlowAdamW), run(case, ZenFlowAdamW))


# I2b: where gradients do not depend on the weights, replay is the plain optimizer, only late.


def flushed(trace: Trace) -> Trace:
    return [(event, weights) for event, weights in trace if "flush" in event]


@given(RANDOMS)
@thorough(100)
def test_i2b_replay_is_the_plain_optimizer_after_a_flush(rng: random.Random) -> None:
    case = draw_case(rng, rule=draw_rule(rng), grads_depend_on_weights=False, deferred_update="replay")
    note(repr(case))
    event(case.rule)
    late = flushed(run(case, OURS[case.rule]))
    plain = replace(case.config, offload_ratio=0.0, full_warm_up_rounds=0, **SYNC)
    assert_same(case, late, flushed(run(case, REFERENCE[case.rule], config=plain)))
    assert_close_to_torch(case, late)


# I5: a user's gradient accumulation is untouched; a real model, a real backward.


class Model(nn.Module):
    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 6)
        self.hidden = nn.Linear(6, 9)
        self.norm = nn.LayerNorm(9)
        self.out = nn.Linear(9, 6)
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.embedding.weight
        self.to(dtype)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        x = x + self.out(torch.tanh(self.norm(self.hidden(x))))
        logits: Tensor = self.head(x)
        return nn.functional.cross_entropy(logits.float().flatten(0, 1), tokens.roll(1, dims=1).flatten())


def batches(count: int, seed: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(0, 11, (2, 5), generator=generator) for _ in range(count)]


def assert_models_equal(a: nn.Module, b: nn.Module) -> None:
    for (name, p), q in zip(a.named_parameters(), b.parameters(), strict=True):
        assert bool(same_bits(p.detach(), q.detach()).all()), name


KNOBS: dict[str, Any] = {"topk_ratio": 0.3, "update_interval": 3, "select_interval": 2, "bucket_bytes": 40}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("to_none", [True, False])
@pytest.mark.parametrize("passes", [1, 2, 3])
def test_i5_accumulated_gradients(passes: int, to_none: bool, dtype: torch.dtype) -> None:
    torch.manual_seed(1)
    ours = Model(dtype)
    theirs = copy.deepcopy(ours)
    # Without a factor nothing copies the gradient on its way, and zero_grad may clear it in place.
    config = ZenFlowConfig(max_grad_norm=0.5 if passes == 2 else None, **KNOBS)
    optimizer = ZenFlowAdamW(ours.parameters(), lr=0.02, config=config, module=ours)
    oracle = ReferenceAdamW(theirs.parameters(), lr=0.02, config=config, module=theirs)
    params = list(theirs.parameters())
    for step in range(10):
        total: list[Tensor] | None = None
        for batch in batches(passes, seed=step):
            ours(batch).backward()
            grads = torch.autograd.grad(theirs(batch), params)
            total = list(grads) if total is None else [old + new for old, new in zip(total, grads, strict=True)]
        assert total is not None
        for param, grad in zip(params, total, strict=True):
            param.grad = grad.clone()
        optimizer.step()
        optimizer.zero_grad(set_to_none=to_none)
        oracle.step()
        ours(batches(1, seed=step)[0])  # a forward, for updates that wait for one
        assert_models_equal(ours, theirs)
    optimizer.flush()
    oracle.flush()
    assert_models_equal(ours, theirs)
    optimizer.close()


def train_scaled(cls: type[Any], seed: int) -> Model:
    """Real GradScaler, real backward, an overflow at step 4 and the scheduler's learning rates."""
    torch.manual_seed(seed)
    model = Model(torch.float32)
    optimizer = cls(model.parameters(), lr=0.05, config=ZenFlowConfig(**KNOBS), module=model)
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0, growth_interval=3)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    for step, batch in enumerate(batches(10, seed), start=1):
        scaler.scale(model(batch) * (float("inf") if step == 4 else 1.0)).backward()
        scaler.step(optimizer)
        scaler.update()
        scheduler.step()
        optimizer.zero_grad()
    assert scaler.get_scale() == 1024.0  # from 256: doubled at 3, halved at 4, doubled at 7 and 10
    optimizer.flush()
    if hasattr(optimizer, "close"):
        optimizer.close()
    return model


@pytest.mark.parametrize(("rule", "seed"), [*(("adamw", seed) for seed in range(3)), *((rule, 1) for rule in OTHERS)])
def test_gradscaler_and_scheduler_drive_both_alike(rule: str, seed: int) -> None:
    assert_models_equal(train_scaled(OURS[rule], seed), train_scaled(REFERENCE[rule], seed))


def test_flush_before_the_first_step_and_twice() -> None:
    weight = nn.Parameter(torch.ones(3, 4))
    optimizer = ZenFlowAdamW([weight], config=ZenFlowConfig(update_interval=4))
    optimizer.flush()
    weight.grad = torch.ones(3, 4)
    optimizer.step()
    optimizer.flush()
    once = weight.detach().clone()
    optimizer.flush()
    assert bool(same_bits(weight.detach(), once).all())
    assert bool((once < 1).all())
    optimizer.close()
