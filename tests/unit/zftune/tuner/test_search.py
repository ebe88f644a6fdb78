"""The search on response surfaces that it has never seen."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from tests.support.tiers import fast
from tests.support.zftune.tuner.surfaces import START, TOKENS, Driver, Surface, make
from zftune.errors import ZftuneError
from zftune.store.types import TrialState
from zftune.tuner.messages import ENDED_EARLY, sentence
from zftune.tuner.pace import Pace
from zftune.tuner.record import state_adapter
from zftune.tuner.search import MOST_VOIDS, Search, SearchOptions
from zftune.tuner.space import Forecaster, Setting
from zftune.tuner.states import (
    OF_INCUMBENT,
    BarredSetting,
    Opening,
    Outcome,
    Request,
    Stopped,
    Unit,
    UnmeasuredSteps,
)

SEEDS = fast(range(4), all_of=range(12))


def units(search: Search) -> int:
    return sum(len(trial.gains) for trial in search.book.trials)


def ran(driver: Driver, role: str) -> list[Request]:
    return [one for one in driver.requests if one.role == role]


@pytest.mark.parametrize("noise", [0.03, 0.08])
def test_it_ends_with_a_setting_that_is_not_slower_and_states_its_gain(noise: float) -> None:
    regrets, held = [], []
    for seed in SEEDS:
        search, driver = make(seed, noise)
        driver.run(search)
        assert isinstance(search.state, Stopped)
        surface, book = driver.surface, search.book
        begun, ended = surface.ms(START), surface.ms(book.incumbent.setting)
        assert ended <= begun
        gain = book.gain
        if gain is not None:
            held.append(abs(1 - ended / begun - gain.share) <= 3 * gain.error + 0.01)
        assert search.cost.spent_s <= search.cost.allowed_s
        regrets.append(ended / surface.best_ms(START) - 1)
    assert all(held)
    assert sorted(regrets)[len(regrets) // 2] < 0.06


def test_nothing_is_adopted_where_all_settings_are_equal() -> None:
    adopted = 0
    for seed in range(fast(12, all_of=100)):
        search, driver = make(seed, 0.15, hold=True)
        driver.surface = Surface(100.0, 0.0, 0.0, 0.0, 0.0, 4.0, 0.0)
        driver.run(search, most=60)
        adopted += bool(search.book.adoptions)
    assert adopted <= fast(2, all_of=4)


def test_a_unit_is_the_incumbent_the_challenger_and_the_incumbent_again() -> None:
    search, driver = make(1, 0.03)
    driver.run(search, most=3)
    start, look, after = driver.requests
    assert (start.role, start.setting, start.steps) == ("start", START, 64)
    best = min(search.space.settings(), key=driver.surface.planner_ms)
    assert (look.role, look.setting, look.discard) == ("explore", best, best.update_interval)
    assert (look.steps, look.steps % best.update_interval) == (look.block, 0)
    assert (after.role, after.setting) == ("a2", START)
    assert units(search) == 1
    driver.run(search, most=30)
    for first, second, third in zip(driver.requests, driver.requests[1:], driver.requests[2:], strict=False):
        if second.role == "b":
            assert first.role in ("a1", "a2")  # the block that ended the unit before serves again
            assert third.role == "a2"
            assert second.steps == 2 * second.block


def test_a_gain_that_one_unit_shows_is_adopted_soon() -> None:
    """Its second unit comes next, not another setting's first."""
    for seed in SEEDS:
        search, driver = make(seed, 0.01)
        driver.run(search, most=40)
        assert search.book.adoptions


def test_next_is_the_same_until_it_is_told() -> None:
    search, driver = make(2, 0.03)
    driver.run(search, most=4)
    assert search.next() == search.next()


@pytest.mark.parametrize("sampler", ["belief", "gp", "tpe", "random", "none"])
def test_the_same_seed_gives_the_same_run(sampler: str) -> None:
    runs = []
    for _ in range(2):
        search, driver = make(4, 0.05, sampler=sampler, most_measurements=16)
        driver.run(search)
        runs.append((driver.requests, search.notes))
    assert runs[0] == runs[1]
    assert len(runs[0][0]) > (4 if sampler == "none" else 10)


def test_its_trials_are_an_optuna_study() -> None:
    import optuna

    search, driver = make(3, 0.05)
    driver.run(search)
    study = search._studied().study
    assert isinstance(study, optuna.Study)
    visits = [one for one in search.book.trials[1:] if one.gains]
    told = [one for one in study.get_trials(states=[optuna.trial.TrialState.COMPLETE]) if one.intermediate_values]
    assert [list(one.intermediate_values.values()) for one in told] == [one.gains for one in visits]
    assert [one.user_attrs["knobs"] for one in told] == [one.setting.knobs() for one in visits]
    assert search.book.adoptions
    best = study.best_trial.user_attrs["knobs"]
    assert driver.surface.ms(Setting(**best)) <= driver.surface.ms(START)


def test_a_block_that_is_much_slower_has_no_second_one_and_counts() -> None:
    search, driver = make(0, 0.0)
    driver.surface = Slow(**vars(driver.surface))
    driver.run(search, most=40)
    looked = next(i for i, one in enumerate(driver.requests) if one.role == "explore" and one.setting != START)
    assert len(driver.outcomes[looked].steps_ms) >= 8
    trial = search.book.trials[driver.requests[looked].trial]
    assert trial.state is TrialState.MEASURED
    assert trial.gains[0] == pytest.approx(-math.log(2))
    assert not ran(driver, "b")


class Slow(Surface):
    """All but the start take twice as long."""

    def ms(self, setting: Setting) -> float:
        return 100.0 if setting == START else 200.0


def test_what_is_far_slower_is_ended_early() -> None:
    request = Request(START, "b", 1, 4, 32, 16, 130.0, 100.0, 100.0)
    assert not request.ends_early([], [900.0] * 4)
    assert request.ends_early([], [301.0] * 8)
    assert not request.ends_early([], [299.0] * 8)
    assert request.ends_early([], [131.0] * 16)
    assert not request.ends_early([], [129.0] * 16)
    assert replace(request, allowance_s=1.0).ends_early([600.0] * 2, [120.0] * 8)


def test_a_unit_begins_only_where_it_can_be_paid() -> None:
    search, driver = make(1, 0.02, cost_floor_s=3.0, cost_share=0.01, hold=True)
    driver.change_s = 2.0
    most = []

    def look(search: Search) -> None:
        most.append(search.cost.spent_s - search.cost.allowed_s)

    driver.within = look
    driver.run(search, most=150)
    assert ran(driver, "hold")
    assert {note.details["because"] for note in search.notes if note.kind == "hold"} == {"budget"}
    longest_s = max(one.seconds for one in driver.outcomes)
    assert max(most) <= 2 * driver.change_s + longest_s
    assert max(most[len(most) // 2 :]) <= driver.change_s + 0.5
    search, driver = make(1, 0.02, cost_floor_s=3.0, cost_share=0.0)
    driver.change_s = 2.0
    driver.run(search)
    assert (search.notes[-1].kind, search.notes[-1].details["because"]) == ("stop", "budget")


def test_a_dear_change_makes_blocks_longer() -> None:
    search, driver = make(1, 0.02, hold=True)
    driver.change_s = 30 * driver.surface.ms(START) / 1e3
    driver.run(search, most=12)
    assert search.cost.change_s == pytest.approx(driver.change_s, rel=0.3)
    last = [one for one in driver.requests if one.role in ("explore", "b")][-1]
    assert 24 <= last.block <= 72


def test_it_rests_once_nothing_is_worth_a_unit_and_compares_what_it_replaced() -> None:
    search, driver = make(5, 0.02, hold=True)
    driver.run(search, most=400)
    assert search.book.adoptions
    assert len(ran(driver, "hold")) > 100
    rests = [i for i, one in enumerate(driver.requests) if one.role == "hold"]
    after = [one.setting for one in driver.requests[rests[0] :] if one.role not in OF_INCUMBENT]
    replaced = search.book.trials[search.book.chain[-1].replaced].setting
    assert replaced in after
    assert len(after) < len(rests) / 5
    search, driver = make(5, 0.02)
    driver.run(search)
    assert (search.notes[-1].kind, search.notes[-1].details["because"]) == ("stop", "idle")


def test_a_crash_is_never_tried_again() -> None:
    search, driver = make(3, 0.03)

    def crash(request: Request) -> Outcome | None:
        return Outcome("crashed", tokens=TOKENS, reason="no memory") if request.setting.topk_ratio == 0.0 else None

    driver.fault = crash
    driver.run(search)
    crashed = [one for one in search.book.trials if one.state is TrialState.CRASHED]
    assert {one.setting.topk_ratio for one in crashed} <= {0.0}
    assert len({one.setting for one in crashed}) == len(crashed)
    assert search.book.incumbent.setting not in {one.setting for one in crashed}


def test_what_is_barred_is_not_tried() -> None:
    search, driver = make(1, 0.03)
    best = min(search.space.settings(), key=driver.surface.planner_ms)
    search, driver = make(1, 0.03, barred=(BarredSetting(best, "crash"),))
    driver.run(search)
    assert best not in {one.setting for one in driver.requests}
    rejected = [one for one in search.book.trials if one.state is TrialState.REJECTED]
    assert [(one.setting, one.reason) for one in rejected] == [(best, "it crashed before")]


def test_a_measurement_that_does_not_count_is_made_again_and_then_given_up() -> None:
    search, driver = make(1, 0.03)
    driver.fault = lambda request: Outcome("void", tokens=TOKENS, reason="hot") if request.role == "explore" else None
    driver.run(search, most=2 + 2 * MOST_VOIDS)
    first = [one for one in driver.requests if one.trial == 1]
    assert len(first) == MOST_VOIDS
    assert search.book.trials[1].state is TrialState.VOID
    assert [note.kind for note in search.notes if note.trial == 1] == ["void"]
    again, driver = make(1, 0.03)
    driver.fault = lambda request: (
        Outcome("void", tokens=TOKENS, reason="paused", called_off=True) if request.role == "explore" else None
    )
    driver.run(again, most=20)
    assert again.book.trials[1].state is TrialState.PLANNED  # that says nothing against it


def test_other_tokens_widen_the_belief_and_forget_nothing() -> None:
    search, driver = make(2, 0.03, hold=True)
    driver.run(search, most=30)
    before = search._believed().gain(START, search.known.pool[search.known.lessons[0].challenger])
    driver.fault = lambda request: replace(driver.measure(request), tokens=2 * TOKENS)
    driver.run(search, most=2)
    after = search._believed().gain(START, search.known.pool[search.known.lessons[0].challenger])
    assert [note.kind for note in search.notes].count("reopen") == 1
    assert after[1] > before[1]
    assert abs(after[0]) > 0.2 * abs(before[0])
    assert search.book.tokens == 2 * TOKENS


def test_only_what_is_counted_of_the_machine_makes_it_plan_again() -> None:
    search, driver = make(2, 0.1, hold=True)
    learnt: list[tuple[Pace | None, Pace]] = []

    def replan(before: Pace | None, now: Pace) -> tuple[Forecaster, list[Setting]]:
        learnt.append((before, now))
        return driver.surface.forecast, [replace(START, topk_ratio=0.2)]

    search._replan = replan
    slow = [False]

    def measure(request: Request) -> Outcome:
        outcome = driver.measure(request)
        times = tuple((2.0 if slow[0] else 1.0) * ms for ms in outcome.steps_ms)
        return replace(outcome, steps_ms=times, pace=Pace(link_gbps=pace))

    pace = 10.0
    driver.fault = measure
    driver.run(search, most=40)
    slow[0] = True  # all steps take twice as long, and nothing that is counted has changed
    driver.run(search, most=40)
    assert learnt == []
    pace = 5.0
    driver.run(search, most=15)
    ((_, now),) = learnt
    assert now.link_gbps == 5.0
    note = next(one for one in search.notes if one.kind == "reopen")
    assert note.details["because"] == "pace"
    assert "the link's 10 GB/s to 5" in sentence(note)


def test_the_guard_and_a_rollback_end_it_for_good() -> None:
    search, driver = make(1, 0.03)
    driver.run(search)
    assert search.book.adoptions
    last = search.book.trials[search.book.adoptions[-1].trial].setting
    search.roll_back("by hand")
    assert search.next() is None
    assert search.judge(last)[1] == "somebody has rolled it back"
    search.guard("Stopped at step 9.")
    assert search.book.incumbent.setting == START
    assert search.book.gain is None


def test_memory_that_runs_short_raises_the_offload_ratio() -> None:
    search, driver = make(1, 0.03)
    tight = replace(START, offload_ratio=0.8)
    search = Search(search.space, tight, driver.surface.forecast, (), SearchOptions(hold=True))
    search.device_limit_bytes = 10**9
    driver.fault = lambda request: replace(driver.measure(request), device_bytes=int(1.05e9))
    driver.run(search, most=1)
    assert search.book.incumbent.setting.offload_ratio > 0.8
    assert [note.kind for note in search.notes] == ["start", "memory"]
    assert isinstance(search.state, Opening)


def test_movement_makes_updates_earlier() -> None:
    search, driver = make(1, 0.03, hold=True)
    driver.fault = lambda request: replace(driver.measure(request), movement_percent=0.5)
    driver.run(search, most=1)
    assert search.space.violation(search.book.incumbent.setting) is None
    assert "movement" in {note.kind for note in search.notes}


def test_what_others_take_from_the_thread_is_left_out_where_it_is_most_of_the_noise() -> None:
    draw = np.random.default_rng(0)
    search, driver = make(1, 0.02, hold=True)

    def beside(request: Request) -> Outcome:
        outcome = driver.measure(request)
        taken = tuple(100.0 * float(draw.random() < 0.3) for _ in outcome.steps_ms)
        return replace(outcome, steps_ms=tuple(map(sum, zip(outcome.steps_ms, taken, strict=True))), taken_ms=taken)

    driver.fault = beside
    driver.run(search, most=60)
    assert search.uses_own_time
    assert search.known.own_noise.variance < 0.5 * search.known.noise.variance
    assert all(len(pair.own) == len(pair.gains) for pair in search.known.pairs)
    assert search.book.adoptions


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("sampler", ["belief", "tpe", "random"])
def test_killed_anywhere_it_asks_what_the_uninterrupted_one_asks(seed: int, sampler: str) -> None:
    """Random outcomes of all kinds, random cuts: what is read back from the store goes on as if nothing had been."""
    draw = np.random.default_rng(seed)
    search, driver = make(seed, 0.05, sampler=sampler, hold=True)

    def outcome(request: Request) -> Outcome:
        chance = draw.random()
        if chance < 0.05:
            return Outcome("void", tokens=TOKENS, reason="hot", called_off=chance < 0.02)
        if chance < 0.07 and request.role not in OF_INCUMBENT:
            return Outcome("crashed", tokens=TOKENS, reason="no memory")
        found = driver.measure(request)
        more: dict[str, Any] = {"movement_percent": 1e-3} if chance < 0.1 else {}
        between = UnmeasuredSteps(0.1, 0.3 if chance < 0.5 else 0.0, 1)
        return replace(found, between=between, pace=Pace(link_gbps=5.0 if chance > 0.5 else 10.0), **more)

    driver.fault = outcome
    for _ in range(60):
        if draw.random() < 0.3:
            document = state_adapter().dump_python(search.snapshot(), mode="json")
            again, _ = make(seed, 0.05, sampler=sampler, hold=True)
            again.restore(state_adapter().validate_python(document), search.notes)
            assert again.next() == search.next()
            assert again.snapshot() == search.snapshot()
            search = again
        driver.run(search, most=1)
    assert units(search) > 5


def test_a_state_of_another_start_is_refused() -> None:
    search, driver = make(1, 0.03)
    driver.run(search, most=5)
    other = Search(search.space, replace(START, topk_ratio=0.2), driver.surface.forecast)
    with pytest.raises(ZftuneError, match="began with another setting"):
        other.restore(search.snapshot())


def test_a_training_that_goes_on_measures_the_incumbent_first() -> None:
    search, driver = make(1, 0.03)
    driver.run(search, most=2)
    assert isinstance(search.state, Unit)
    setting = search.book.trials[1].setting
    search.begin_again()
    request = search.next()
    assert request is not None
    assert request.role == "start"
    driver.run(search, most=2)
    assert driver.requests[-1].setting == setting  # whose look was interrupted
    search.stop(ENDED_EARLY)
    search.begin_again()
    assert search.next() is not None
    search.stop(because="command", by="by hand", final=True)
    search.begin_again()
    assert search.next() is None
