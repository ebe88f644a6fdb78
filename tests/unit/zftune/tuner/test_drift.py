"""Times change while a search goes on, or after it: what is noticed, what is forgotten, and who is asked again."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from tests.support.zftune.tuner.drifting import FAST, World
from tests.support.zftune.tuner.surfaces import START, TOKENS
from zenflow import StepStats
from zftune.planner.rates import Rates
from zftune.store.types import TrialState
from zftune.tuner.scores import Gain, Pace, Sample, changed, departure, differs
from zftune.tuner.space import Setting
from zftune.tuner.states import Choosing, MeasuringBaseline, Outcome, Trial

RATES = Rates(forward_ms=10.0, backward_ms=20.0, d2h_gbps=12.0, h2d_gbps=11.0, host_gbps=90.0, update_gelements_s=3.0)


def stats(step_ms: float, *, stall: dict[str, float] | None = None, **more: Any) -> StepStats:
    """A step with what a pace looks at."""
    known = dict.fromkeys(StepStats.__dataclass_fields__, 0)
    return StepStats(**{**known, "step_ms": step_ms, "stall_ms": stall or {}, **more})


def test_a_pace_tells_each_resource() -> None:
    sent, host = random.randrange(10**6, 10**7), random.randrange(10**6, 10**7)
    steps = [stats(50.0, stall={"d2h": 12.0, "host": 3.0}, d2h_bytes=sent, host_bytes=host, host_ms=4.0)] * 5
    found = Pace.of(steps)
    assert found is not None
    assert found.busy_ms == pytest.approx(35.0)
    assert found.host_gbps == pytest.approx(host / 4e-3 / 1e9)
    assert found.link_gbps == pytest.approx(sent / 50e-3 / 1e9)  # it was busy all the time


def test_a_link_that_nobody_waited_for_tells_nothing() -> None:
    found = Pace.of([stats(50.0, stall={"d2h": 1.0}, d2h_bytes=10**6)])
    assert found is not None
    assert (found.link_gbps, found.host_gbps) == (None, None)
    assert Pace.of([replace(stats(50.0), stall_ms=None)]) is None  # no stream: nobody knows who waited
    assert Pace.of([]) is None


def test_rates_change_by_what_the_same_setting_shows() -> None:
    before = Pace(busy_ms=40.0, host_gbps=50.0, link_gbps=None)
    now = Pace(busy_ms=80.0, host_gbps=25.0, link_gbps=6.0)
    found = changed(RATES, before, now)
    assert (found.forward_ms, found.backward_ms) == (20.0, 40.0)
    assert (found.host_gbps, found.update_gelements_s) == (45.0, 1.5)
    assert (found.d2h_gbps, found.h2d_gbps) == (6.0, 5.5)
    assert changed(RATES, None, now) == RATES
    assert changed(RATES, before, replace(before)) == RATES
    assert changed(RATES, replace(before, link_gbps=8.0), replace(before, link_gbps=4.0)).d2h_gbps == 6.0


@pytest.mark.parametrize("interval", [1, 3, 16])
def test_a_departure_is_no_single_slow_step(interval: int) -> None:
    usual = [random.uniform(90, 110) for _ in range(48)]
    assert departure(usual, interval, 100.0) is None
    spike = [*usual[:-1], 400.0]
    assert departure(spike, interval, 100.0) is None
    for factor in (0.7, 1.4):
        moved = [*usual, *(factor * one for one in usual)]
        found = departure(moved, interval, 100.0)
        assert found == pytest.approx(factor, rel=0.1)
    assert departure([150.0] * (2 * interval - 1), interval, 100.0) is None  # not two whole windows


def test_an_incumbent_differs_beyond_its_noise_only() -> None:
    random_ = np.random.default_rng(3)

    def sample(ms: float, noise: float = 0.02) -> Sample:
        return Sample.of([ms * float(np.exp(noise * random_.standard_normal())) for _ in range(20)], 4, TOKENS)

    assert differs([sample(100)], sample(120), seed=0)
    assert differs([sample(100)], sample(80), seed=0)
    assert not differs([sample(100)], sample(106), seed=0)
    assert not differs([sample(100, 0.4)], sample(115, 0.4), seed=0)
    assert not differs([], sample(100), seed=0)


def test_a_hold_ends_as_soon_as_steps_take_another_time() -> None:
    world = World()
    world.settle()
    assert world.search.book.incumbent.setting == FAST
    world.run(1)
    held = world.driver.outcomes[-1]
    world.factor = 1.5
    world.run(1)
    ended = world.driver.outcomes[-1]
    assert (held.status, ended.status) == ("measured", "aborted")
    assert len(ended.steps_ms) < len(held.steps_ms) / 4
    assert world.kinds[-1] == "reopen"
    assert isinstance(world.search.state, MeasuringBaseline)


def test_a_hold_that_did_not_count_says_nothing() -> None:
    world = World()
    world.settle()
    request = world.search.next()
    assert request is not None
    slow = tuple([200.0] * 40)
    world.search.tell(Outcome("void", slow, (), TOKENS, reason="the GPU was hot"))
    assert world.kinds[-1] == "stop"
    assert world.search.next() == request


def test_an_incumbent_that_could_not_be_measured_is_measured_later() -> None:
    world = World()
    hot = Outcome("void", (100.0,) * 20, (100.0,) * 4, TOKENS, reason="the GPU was hot")
    world.driver.fault = lambda request: hot if len(world.driver.requests) < 4 else world.measure(request)
    world.run(5)
    assert [request.role for request in world.driver.requests] == ["start", "start", "start", "hold", "start"]
    assert world.driver.requests[3].incumbent_step_ms is None  # nothing is usual yet
    assert world.search.book.incumbent.samples
    world.settle()
    assert world.search.book.incumbent.setting == FAST


def test_the_planner_is_asked_again_with_what_it_learnt() -> None:
    world = World()
    world.settle()
    fresh = Setting(topk_ratio=0.15, update_interval=2, apply_lag=2)
    world.plan = [FAST, fresh]
    world.factor = 2.0
    world.run(3)
    assert world.learnt == [(Pace(busy_ms=100.0), Pace(busy_ms=200.0))]
    assert world.search.next() is not None
    world.plan = [fresh, FAST]
    world.factor = 1.0
    world.run(3)
    asked = world.driver.requests[-1]
    assert (asked.role, asked.setting) == ("explore", fresh)
    assert world.learnt[-1] == (Pace(busy_ms=200.0), Pace(busy_ms=100.0))


def test_times_that_change_in_a_comparison_are_noticed() -> None:
    world = World()
    world.run(2)
    request = world.search.next()
    assert request is not None
    assert request.role == "a2"
    world.factor = 1.4
    world.run(1)
    assert world.kinds[-1] == "reopen"
    assert isinstance(world.search.state, MeasuringBaseline)
    assert world.search.book.incumbent.setting == START
    world.settle()
    assert world.search.book.incumbent.setting == START  # its rival, measured in other times, has to be compared anew


def test_an_abort_casts_doubt_on_an_incumbent_that_was_not_measured_just_before() -> None:
    world = World(sampler="random", patience=20, grant_s=1e9)
    world.fast = 1.0  # nothing is adopted
    world.run(3)
    assert isinstance(world.search.state, Choosing)
    world.factor = 2.0
    world.run(2)
    roles = [request.role for request in world.driver.requests]
    assert roles == ["start", "explore", "explore", "explore", "start"]
    assert [one.status for one in world.driver.outcomes[-2:]] == ["aborted", "measured"]
    assert world.kinds[-1] == "reopen"
    assert world.search.book.incumbent_step_ms == pytest.approx(200, rel=0.05)


def test_longer_steps_begin_the_search_again() -> None:
    world = World()
    world.run(2)
    world.tokens, world.factor = 2 * TOKENS, 2.0
    world.run(1)
    note = world.search.notes[-1]
    assert note.kind == "reopen"
    assert f"{2 * TOKENS} tokens now instead of {TOKENS}" in note.reason
    assert note.details["tokens"] == 2 * TOKENS
    world.run(1)
    assert world.search.book.incumbent_step_ms == pytest.approx(200, rel=0.05)
    assert world.kinds.count("reopen") == 1


def test_what_was_called_off_says_nothing_of_tokens() -> None:
    world = World()
    world.run(1)
    world.search.tell(Outcome("void", (), (), 1, reason="paused", called_off=True))
    assert "reopen" not in world.kinds


def test_the_offload_ratio_is_raised_at_once_where_memory_is_short() -> None:
    world = World(limit_bytes=800)
    world.run(1)
    assert world.search.book.incumbent.setting.offload_ratio == 0.6
    world.settle()
    offloaded = 1 - world.bytes_of(world.search.book.incumbent.setting) / 1000
    world.more_bytes = 600
    world.run(1)  # nothing but the incumbent runs
    found = world.search.book.incumbent.setting
    assert "memory" in world.kinds
    assert world.bytes_of(found) + 600 <= 800 or found.offload_ratio == 1
    assert 1 - world.bytes_of(found) / 1000 > offloaded
    request = world.search.next()
    assert request is not None
    assert (request.role, request.setting) == ("start", found)
    world.settle()
    assert world.bytes_of(world.search.book.incumbent.setting) + 600 <= 800


def test_a_peak_counts_where_times_do_not() -> None:
    world = World(limit_bytes=800)
    world.settle()
    before = world.search.book.incumbent
    world.factor, world.tokens, world.more_bytes = 2.0, 2 * TOKENS, 500
    steps = (100.0,) * 3
    peak = world.bytes_of(before.setting) + 500
    world.search.tell(Outcome("void", steps, (), 2 * TOKENS, peak, reason="the tokens of a step have changed"))
    assert world.kinds[-3:] == ["reopen", "memory", "reopen"]
    assert world.search.book.incumbent.setting.offload_ratio > before.setting.offload_ratio
    world.run(1)
    assert world.learnt == [(Pace(busy_ms=100.0), Pace(busy_ms=200.0))]


def test_where_nothing_is_enough_everything_is_offloaded_and_it_goes_on() -> None:
    world = World(limit_bytes=800)
    world.run(1)
    world.more_bytes = 10_000
    world.settle()
    assert world.search.book.incumbent.setting.offload_ratio == 1
    assert world.kinds.count("memory") == 1


def restless(world: World, turns: int = 40) -> World:
    """Times change before any search is over."""
    for turn in range(turns):
        if world.search.next() is None:
            break
        world.run(1)
        if turn % 4 == 3:
            world.factor = 3.0 - world.factor
    return world


def long(**options: Any) -> World:
    """A search that takes many measurements."""
    return World(sampler="random", patience=99, most_measurements=99, grant_s=1e9, **options)


def test_where_times_keep_changing_it_waits_ever_longer_and_says_why_once() -> None:
    world = restless(long())
    (remark,) = (note for note in world.search.notes if note.kind == "remark")
    begins = "Step times changed 4 times before the search came to its end. From here on it waits ever longer"
    assert remark.reason.startswith(begins)
    waits = [note.reason for note in world.search.notes if note.kind == "hold"]
    assert waits[:2] == [
        "Step times keep changing: the search begins again once they stay as they are for 200 steps.",
        "Step times keep changing: the search begins again once they stay as they are for 400 steps.",
    ]
    asked = [(request.role, request.steps) for request in world.driver.requests]
    assert ("hold", 200) in asked
    assert ("hold", 400) in asked
    world.search.options = replace(world.search.options, patience=1)
    world.settle()  # times stay as they are
    world.factor *= 2.0
    world.run(2)
    assert world.driver.requests[-1].role == "start"  # at once, as before
    assert world.kinds.count("remark") == 1


def test_where_it_may_not_wait_it_ends() -> None:
    world = restless(long(hold=False, watch=False))
    assert world.search.next() is None
    last = world.search.notes[-1].reason
    assert last.startswith("Step times changed 4 times before the search came to its end. It ends; the best settings")


def test_a_rollback_returns_to_what_ran_and_never_to_what_took_too_much_memory() -> None:
    world = World(limit_bytes=800)
    world.more_bytes = 500
    world.run(1)
    book = world.search.book
    room = book.incumbent
    assert room.number != 0  # the start took too much
    world.run(1)
    adopted = book.append(Trial(len(book.trials), replace(room.setting, update_interval=8, apply_lag=8), "planner"))
    book.adopt(adopted, Gain(0.1, 0.01), room.samples)
    book.move_to(replace(adopted.setting, topk_ratio=0.0))  # that takes too much now, too
    assert book.roll_back() is adopted
    assert book.incumbent is room
    assert (book.judge(adopted.setting).reason, book.adoptions) == ("somebody has rolled it back", [])
    assert book.gain_share == 0


def test_updates_come_earlier_at_once_where_the_weights_move_too_far() -> None:
    world = World()
    world.settle()
    before = world.search.book.incumbent.setting
    assert before == FAST
    book = world.search.book
    assert book.gain_share > 0
    world.movement_percent = 0.1
    world.run(1)  # nothing but the incumbent runs
    assert book.gain is None  # nobody has compared it
    found = book.incumbent.setting
    assert (found.topk_ratio, found.update_interval, found.apply_lag) == (0.2, 3, 1)
    assert "movement" in world.kinds
    (note,) = (one for one in world.search.notes if one.kind == "movement")
    assert note.reason == (
        "Adopted for the quality: update_interval 3, apply_lag 1: under update_interval 4, apply_lag 4 weights would "
        "move 0.32% before late updates arrive, the quality allows 0.171% (up to about 0.3% of loss in a "
        "long fine-tuning)."
    )
    request = world.search.next()
    assert request is not None
    assert (request.role, request.setting) == ("start", found)
    world.settle()
    assert all(
        0.1 * (1 - one.setting.topk_ratio) * one.setting.mean_staleness_steps <= 0.172
        for one in book.trials[note.trial or 0 :]
        if one.state is TrialState.MEASURED
    )


def test_a_little_beyond_the_bound_is_noise_and_what_moves_less_allows_more() -> None:
    world = World()
    world.settle()
    world.movement_percent = 1.05 * 0.1715 / (0.8 * 4)
    world.run(1)
    assert world.search.book.incumbent.setting == FAST
    assert "movement" not in world.kinds
    late = Setting(topk_ratio=0.2, update_interval=8, apply_lag=8)
    assert world.search.book.space.violation(late) is not None
    world.movement_percent = 0.02
    world.run(1)
    assert world.search.book.space.violation(late) is None
