"""I3: saved at any step, loaded into a new optimizer over a new model, a run goes on as if nothing had been."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import event, given, note, reject
from torch import Tensor, nn

from tests.support.tiers import fast, repeated
from tests.support.zenflow.cases import Case, Make, Session, Transfer, assert_same, case_of, run
from tests.support.zenflow.checkpoint_cases import (
    Place,
    Stop,
    by_copy,
    by_dict,
    by_distributed_checkpoint,
    by_file,
    draw_eventful,
    draw_stops,
    eventful,
    run_with_stops,
)
from tests.support.zenflow.family_cases import OTHERS, OURS, REFERENCE
from tests.support.zenflow.knob_cases import draw_knobs, live_knobs, merged, with_auto
from tests.support.zenflow.rule_cases import NAMES
from tests.unit.zenflow.test_invariants import RANDOMS, thorough
from zenflow import ConfigError, ZenFlowConfig

PLACES: tuple[Place, ...] = ("at once", "before", "after")


@given(RANDOMS)
@thorough(50)
def test_i3_a_run_that_was_saved_and_loaded_goes_on(rng: random.Random) -> None:
    case = draw_eventful(rng)
    stops = draw_stops(rng, case)
    transfer = rng.choice([by_dict, by_copy, by_file])
    note(f"{case!r}\nstops {stops}, {transfer.__name__}")
    event(case.rule)
    assert_same(case, run_with_stops(case, stops, transfer), run(case, OURS[case.rule]))


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("seed", range(repeated(12)))
def test_i3_on_fixed_cases(seed: int, place: Place) -> None:
    case = eventful(seed)
    step = random.Random(seed).randint(1, case.steps)
    assert_same(case, run_with_stops(case, [(step, place)]), run(case, OURS[case.rule]))


@pytest.mark.parametrize("seed", range(fast(1, all_of=3)))
@pytest.mark.parametrize("rule", NAMES)
def test_i3_saved_and_loaded_after_every_step(rule: str, seed: int) -> None:
    """Every place of a window, the model loaded before the optimizer and after it in turn."""
    case = eventful(20 + seed, rule=rule, topk_ratio=0.3, overlap_step=True, bucket_bytes=20)
    stops = [(step, "at once" if step % 3 else "after") for step in range(case.steps + 1)]
    assert_same(case, run_with_stops(case, stops, by_file), run(case, OURS[rule]))  # type: ignore[arg-type]


@pytest.mark.parametrize("step", range(11))
@pytest.mark.parametrize("mode", ["replay", "mean"])
def test_i3_at_each_step_of_long_windows(mode: Any, step: int) -> None:
    """With a selection pending, buckets in flight, in warm-up, with a loss scale and skipped steps."""
    knobs: dict[str, Any] = {"update_interval": 4, "select_interval": 2, "full_warm_up_rounds": 1, "apply_lag": 4}
    amp: dict[str, Any] = {"grad_scale": 300.0, "found_inf_at": frozenset({3, 8}), "flush_after": frozenset()}
    case = case_of(77, steps=12, topk_ratio=0.3, offload_ratio=1.0, overlap_step=True, bucket_bytes=20, **knobs, **amp)
    case = replace(case, config=replace(case.config, deferred_update=mode))
    assert_same(case, run_with_stops(case, [(step, "before")]), run(case, OURS[case.rule]))


@pytest.mark.parametrize("step", [1, 3, 4, 6])
def test_i3_with_a_change_of_knobs_pending(step: int) -> None:
    for seed, knobs in enumerate([{"topk_ratio": 0.6, "update_interval": 2}, {"apply_lag": 1}, {"offload_ratio": 0.4}]):
        case = case_of(80 + seed, steps=12, topk_ratio=0.3, offload_ratio=1.0, update_interval=3, apply_lag=None)
        case = merged(case, [(step, "knobs", knobs)])
        expected = run(case, OURS[case.rule])
        for place in fast(PLACES[seed:][:1], all_of=PLACES):
            assert_same(case, run_with_stops(case, [(step, place)]), expected)


@pytest.mark.parametrize("seed", range(repeated(5)))
def test_i3_with_the_sums_of_an_auto_window(seed: int) -> None:
    case = with_auto(random.Random(seed), case_of(90 + seed, steps=14, topk_ratio=0.4, offload_ratio=1.0))
    stops = [(step, PLACES[step % 3]) for step in range(1, 14, 2)]
    assert_same(case, run_with_stops(case, stops), run(case, OURS[case.rule]))


@pytest.mark.parametrize("seed", range(4))
def test_i3_whatever_the_hosts_speed(seed: int, slow_host: Callable[..., Make]) -> None:
    case = case_of(100 + seed, steps=12, overlap_step=True, topk_ratio=0.3, offload_ratio=1.0)
    stops = draw_stops(random.Random(seed), case)
    assert_same(case, run_with_stops(case, stops, make=slow_host(seed)), run(case, OURS[case.rule]))


@pytest.mark.parametrize("seed", range(repeated(6)))
def test_i3_through_distributed_checkpoints(seed: int) -> None:
    case = eventful(110 + seed, topk_ratio=0.3, offload_ratio=0.9)
    stops = draw_stops(random.Random(seed), case)
    trace = run_with_stops(case, stops, by_distributed_checkpoint)
    assert_same(case, trace, run(case, OURS[case.rule]))


@pytest.mark.parametrize("seed", range(repeated(12)))
def test_state_dict_changes_nothing(seed: int) -> None:
    """It applies nothing that is not due and flushes nothing: at every place of every window."""
    case = eventful(120 + seed)
    stops = [(step, place) for step in range(case.steps + 1) for place in PLACES]
    looked = run_with_stops(case, stops, at_stop=lambda session: session.optimizer.state_dict())
    assert_same(case, looked, run(case, OURS[case.rule]))


@pytest.mark.parametrize("seed", range(repeated(6)))
def test_a_state_dict_is_of_its_moment(seed: int) -> None:
    """What the optimizer does later does not show in it, nor what another one does that loaded it."""
    case = eventful(130 + seed, topk_ratio=0.3, offload_ratio=0.8)

    def late(old: Any, new: Any) -> None:
        state = old.state_dict()
        for param in (param for group in old.param_groups for param in group["params"]):
            param.grad = torch.ones_like(param)
        old.step()
        old.flush()
        new.load_state_dict(state)
        again = new.state_dict()
        new.load_state_dict(state)
        torch.testing.assert_close(again["state"], state["state"], rtol=0, atol=0, equal_nan=True)

    assert_same(case, run_with_stops(case, [(5, "before"), (9, "before")], late), run(case, OURS[case.rule]))


@pytest.mark.parametrize("rule", NAMES)
def test_state_is_never_empty_and_looks_like_torchs(rule: str) -> None:
    weights = [nn.Parameter(torch.ones(3, 4)), nn.Parameter(torch.ones(5)), nn.Parameter(torch.ones(2, 3, 4))]
    optimizer = OURS[rule]([{"params": weights[:2]}, {"params": weights[2:], "lr": 0.5}], config=ZenFlowConfig())
    for step in range(4):
        assert bool(optimizer.state)
        state = optimizer.state_dict()
        assert state.keys() == {"state", "param_groups"}
        assert [group["params"] for group in state["param_groups"]] == [[0, 1], [2]]
        assert state["param_groups"][1]["lr"] == 0.5
        assert isinstance(state["param_groups"][0]["zenflow"], str)
        assert state["state"].keys() == {0, 1, 2}
        for index, weight in enumerate(weights):
            of_weight = state["state"][index]
            assert isinstance(of_weight["log"], tuple)
            tensors = [value for value in of_weight.values() if isinstance(value, Tensor)]
            assert any(tensor.shape == weight.shape and tensor.dtype == torch.float32 for tensor in tensors)
            weight.grad = torch.ones_like(weight)
        if step != 1:
            optimizer.step()
    optimizer.close()


@pytest.mark.parametrize("transfer", [by_dict, by_file, by_distributed_checkpoint])
@pytest.mark.parametrize("rule", NAMES)
def test_before_the_first_step(rule: str, transfer: Transfer) -> None:
    case = case_of(140, rule=rule, steps=6)
    assert_same(case, run_with_stops(case, [(0, "after")], transfer), run(case, OURS[rule]))


@given(RANDOMS)
@thorough(25)
def test_other_knobs_are_taken_up_at_the_next_step(rng: random.Random) -> None:
    case = draw_eventful(rng)
    stop = rng.randint(0, case.steps)
    case = replace(case, between=tuple(happening for happening in case.between if happening[0] <= stop))
    note(f"{case!r}\nstop {stop}")
    other_knobs_are_taken_up(case, stop, rng)


@pytest.mark.parametrize("seed", range(fast(5, all_of=10)))
def test_other_knobs_are_taken_up_on_fixed_cases(seed: int) -> None:
    case = case_of(150 + seed, steps=12, rule=(["adamw", *OTHERS] * 3)[seed], rounded_grads=False)
    stop = seed % 10 + 1
    case = merged(case, [(stop, "knobs", {"topk_ratio": 0.7})]) if seed % 3 == 0 else case
    other_knobs_are_taken_up(case, stop, random.Random(seed))


def other_knobs_are_taken_up(case: Case, stop: int, rng: random.Random) -> None:
    """As if set_knobs had been called instead of saving and loading into an optimizer with knobs of its own.

    What counts as its own are knobs that it was built with and the saved one was not, but for those that hold already.
    """
    built = told = case.config.resolved()
    for _, kind, what in case.between:
        told = told.changed(what) if kind == "knobs" else told
    fixed = {"skip_nonfinite"} if case.nonfinite_at else set()
    knobs = draw_knobs(rng, built, [name for name in live_knobs(built) if name not in fixed])
    taken = {n: v for n, v in knobs.items() if v != live_knobs(built)[n] and v != live_knobs(told)[n]}
    try:
        told.changed(taken)
    except ConfigError:  # a lag beyond the window
        return

    sessions: list[Session] = []

    def oracle(session: Session) -> None:
        sessions.append(session)
        if taken:
            session.optimizer.set_knobs(**taken)

    stops: list[Stop] = [(stop, "after")]
    expected = run_with_stops(case, stops, make=REFERENCE[case.rule], at_stop=oracle)
    if sessions[0].optimizer.events["decisions on an ulp"]:
        reject()
    ours = run_with_stops(case, stops, at_stop=lambda session: session.renew(by_dict, built.changed(knobs)))
    assert_same(case, ours, expected)


def test_random_stops_meet_what_they_claim() -> None:
    """Of the stops of these cases, how many find something that only the optimizer's state knows."""
    met: Counter[str] = Counter()

    def look(session: Session) -> None:
        oracle, weights = session.optimizer, session.optimizer._weights
        auto = oracle.config.update_interval == "auto"
        met["window in flight"] += any(weight.due for weight in weights)
        met["predictions in flight"] += any(weight.coming for weight in weights)
        met["gradients logged"] += any(weight.log for weight in weights)
        met["skipped step logged"] += any(entry.skipped for weight in weights for entry in weight.log)
        met["selection pending"] += any(weight.pending is not None for weight in weights)
        met["change of knobs pending"] += oracle._next is not None
        met["knobs changed before"] += session.built != oracle.config
        met["group joined"] += len(session.group_order) > len(case.groups) - len(case.joining)
        met["warm-up"] += 0 < session.step < case.config.full_warm_up_rounds
        met["sums of an auto window"] += auto and any(weight.energy.steps for weight in weights)
        met["before the first step"] += session.step == 0

    for seed in range(160):
        rng = random.Random(seed)
        case = draw_eventful(rng)
        run_with_stops(case, draw_stops(rng, case), make=REFERENCE[case.rule], at_stop=look)
    least = dict.fromkeys(met, 4) | {"window in flight": 15, "gradients logged": 30, "selection pending": 10}
    assert {name: met[name] for name in least if met[name] < least[name]} == {}, dict(met)
