"""The search on response surfaces that it has never seen."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from statistics import NormalDist

import numpy as np
import pytest

from tests.support.tiers import fast
from tests.support.zftune.tuner.surfaces import START, TOKENS, Driver, Surface, make
from zftune.store.types import TrialState
from zftune.tuner.scores import gain
from zftune.tuner.search import Search, SearchOptions
from zftune.tuner.space import Forecast, Setting
from zftune.tuner.states import OF_INCUMBENT, BarredSetting, Outcome, Request, Stopped

SEEDS = fast(range(4), all_of=range(10))


@pytest.mark.parametrize("noise", [0.03, 0.08])
def test_it_never_ends_worse_than_it_began_and_stays_within_its_budgets(noise: float) -> None:
    regrets = []
    for seed in SEEDS:
        search, driver = make(seed, noise)
        driver.run(search)
        assert isinstance(search.state, Stopped)
        surface, book = driver.surface, search.book
        begun, ended = surface.ms(START), surface.ms(book.incumbent.setting)
        gain = book.gain
        stated = (0.0, 0.0) if gain is None else (gain.share, 2 * gain.error)
        assert 1 - ended / begun >= min(0.0, stated[0]) - stated[1] - 1e-9
        assert search.measurements <= 24
        # A step that has begun is finished: by so much the cost may be beyond what was allowed.
        slowest_s = max(max((*one.steps_ms, *one.discarded_ms)) for one in driver.outcomes) / 1e3
        assert search.cost.spent_s <= search.cost.allowed_s + slowest_s
        regrets.append(ended / surface.best_ms(START) - 1)
    assert sorted(regrets)[len(regrets) // 2] < (0.03 if noise < 0.05 else 0.05)


def test_a_small_budget_ends_it() -> None:
    search, driver = make(5, 0.03, grant_s=0.5, grant_steps=5, cost_share=0.0)
    driver.run(search)
    assert search.cost.spent_s <= 0.5 + 1.0
    assert "Exploring has cost" in search.notes[-1].reason


@pytest.mark.parametrize("grant_s", [1e6, 0.8])
def test_what_is_left_counts_down_to_the_end_where_nothing_faster_turns_up(grant_s: float) -> None:
    """Patience ends it, or what exploring may cost, if that is less."""
    search, driver = make(5, 0.0, grant_s=grant_s, grant_steps=1, cost_share=0.0)

    def slower(request: Request) -> Outcome | None:
        if request.role in OF_INCUMBENT:
            return None
        return Outcome("measured", (1.05 * search.book.incumbent_step_ms,) * request.steps, tokens=TOKENS)

    driver.fault = slower
    left: list[tuple[int, int]] = []
    while search.next() is not None:
        left.append(search.left())
        driver.run(search, most=1)
    if grant_s > 1:
        assert left[1:] == [(8 - made, 23 - made) for made in range(8)]
    else:
        assert "Exploring has cost" in search.notes[-1].reason
        assert left[2][0] < 7
    assert search.left() == (0, 0)


@pytest.mark.parametrize(("before_ms", "spent_s"), [(None, 0.5), (140.0, 0.1), (200.0, 0.0)])
def test_what_exploring_costs_is_beside_what_the_best_took_right_before(
    before_ms: float | None, spent_s: float
) -> None:
    """As in the account of the run."""
    search, driver = make(1, 0.0)
    driver.run(search, most=1)

    def tried(request: Request) -> Outcome:
        return Outcome("measured", (search.book.incumbent_step_ms + 50,) * 10, tokens=TOKENS, before_ms=told)

    told = None if before_ms is None else search.book.incumbent_step_ms + before_ms - 100
    driver.fault = tried
    driver.run(search, most=1)
    assert search.cost.spent_s == pytest.approx(spent_s)


def test_it_waits_for_more_time_where_it_may() -> None:
    search, driver = make(5, 0.03, grant_s=0.2, grant_steps=2, hold=True)
    driver.run(search, most=4000)
    holds = [request for request in driver.requests if request.role == "hold"]
    assert holds
    assert all(request.setting == search.book.trials[0].setting or search.book.adoptions for request in holds)
    assert search.cost.spent_s <= search.cost.allowed_s + 1.0
    assert len([request for request in driver.requests if request.role == "explore"]) >= 8
    told = [note.reason for note in search.notes if note.kind == "hold"]
    assert all("may need more than is left, since 25% is kept for the planner's settings" in one for one in told)
    search, driver = make(5, 0.03, grant_s=0.2, grant_steps=2)
    driver.run(search, most=4000)
    assert search.notes[-1].reason.endswith(": the next setting may need more than is left.")


def test_a_measurement_that_did_not_count_is_made_again_only_where_that_may_be_paid() -> None:
    for hold in (True, False):
        search, driver = make(1, 0.03, grant_s=1.3, grant_steps=1, hold=hold)

        def void(request: Request, search: Search = search) -> Outcome | None:
            """Each costs 1.4 s."""
            if request.role != "explore":
                return None
            return Outcome("void", (search.book.incumbent_step_ms + 140,) * 10, tokens=TOKENS, reason="late")

        driver.fault = void
        driver.run(search, most=3)
        explored = [request.role for request in driver.requests]
        assert explored == ["start", "explore", *(["hold"] if hold else [])]
        assert search.cost.spent_s == pytest.approx(1.4)
        assert hold or "Exploring has cost" in search.notes[-1].reason


@pytest.mark.parametrize("seed", SEEDS)
def test_changes_of_knobs_are_paid_from_the_budget_too(seed: int) -> None:
    """Here each costs as much as five steps; what is known of no change yet cannot be kept for it."""
    search, driver = make(seed, 0.03, grant_s=1.0, grant_steps=10, hold=True)
    driver.change_s = 5 * driver.surface.ms(START) / 1e3
    beyond: list[float] = []

    def look(search: Search) -> None:
        beyond.append(search.cost.spent_s - search.cost.allowed_s)

    driver.within = look
    driver.run(search, most=2000)
    assert len([request for request in driver.requests if request.role == "explore"]) >= 4
    first = next(index for index, request in enumerate(driver.requests) if request.role == "explore")
    assert max(beyond[: first + 2]) <= 2 * driver.change_s
    slowest_s = max(max((*one.steps_ms, *one.discarded_ms)) for one in driver.outcomes) / 1e3
    assert max(beyond[first + 2 :]) <= slowest_s  # a step that has begun is finished


@pytest.mark.parametrize("seed", [0, 3, 7])
def test_a_trial_may_spend_what_is_left_but_the_way_back_and_a_quarter_that_is_kept(seed: int) -> None:
    search, driver = make(seed, 0.03, grant_s=1.0, grant_steps=10, hold=True)
    driver.change_s = 5 * driver.surface.ms(START) / 1e3
    kept, ways_back, held = list[float](), list[float](), list[float]()
    while len(kept) < 8:
        request = search.next()
        assert request is not None
        cost = search.cost
        if request.role == "hold":
            held.append(cost.left_s / cost.allowed_s)
        elif request.role not in OF_INCUMBENT:
            assert request.allowance_s == pytest.approx(cost.left_s - cost.change_s)
            ways_back.append(cost.change_s)
            if request.role == "explore" and search.book.trials[request.trial].source not in ("planner", "preset"):
                kept.append(cost.left_s / cost.allowed_s)
        driver.run(search, most=1)
    assert min(kept) >= 0.25
    assert max(ways_back) == pytest.approx(driver.change_s, rel=0.2)
    assert max(held) > 0  # there was something left, and it was kept


def test_the_start_is_measured_first_and_the_planners_setting_next() -> None:
    search, driver = make(1, 0.03)
    driver.run(search, most=3)
    start, planned, again = driver.requests
    assert (start.role, start.setting, start.incumbent_step_ms) == ("start", START, None)
    best = min(search.book.space.settings(), key=driver.surface.planner_ms)
    assert (planned.role, planned.setting) == ("explore", best)
    assert planned.discard == best.update_interval
    assert planned.steps % best.update_interval == 0
    assert planned.steps >= 20
    assert (again.role, again.setting) == ("a2", START)  # the incumbent before it was measured just now


def test_measurements_that_are_left_are_named_with_what_another_setting_takes() -> None:
    for seed in range(4):
        search, driver = make(seed, 0.03, most_measurements=6)
        driver.run(search)
        made, reason = search.measurements, search.notes[-1].reason
        more = f": another setting may take 4 with its comparison, and {6 - made} {'is' if made == 5 else 'are'} left"
        assert reason == f"{made} of 6 measurements were made{more if made < 6 else ''}."


def test_next_is_the_same_until_it_is_told() -> None:
    search, driver = make(2, 0.03)
    driver.run(search, most=4)
    assert search.next() == search.next()


@pytest.mark.parametrize("sampler", ["tpe", "random", "none"])
def test_the_same_seed_gives_the_same_run(sampler: str) -> None:
    runs = []
    for _ in range(2):
        search, driver = make(4, 0.05, sampler=sampler)
        driver.run(search)
        runs.append((driver.requests, search.notes))
    assert runs[0] == runs[1]


def test_with_gp_too_and_its_proposals_are_allowed() -> None:
    requests = []
    for _ in range(2):
        search, driver = make(4, 0.03, sampler="gp", most_measurements=9)
        driver.run(search)
        requests.append(driver.requests)
    assert requests[0] == requests[1]
    assert any(trial.source == "search" and trial.samples for trial in search.book.trials)
    assert all(search.book.space.violation(request.setting) is None for request in requests[0])


def test_what_the_planner_rejects_is_written_down_and_never_run() -> None:
    search, driver = make(3, 0.03)
    driver.run(search)
    rejected = [trial for trial in search.book.trials if trial.state is TrialState.REJECTED]
    assert rejected
    run = {request.setting for request in driver.requests}
    for trial in rejected:
        assert trial.setting not in run
        assert trial.constraint > 0
        assert trial.reason
        assert trial.forecast is not None


def test_a_setting_that_does_not_fit_is_rejected() -> None:
    surface = Surface.random(0)

    def forecast(setting: Setting) -> Forecast:
        full = setting.topk_ratio > 0.1
        return Forecast(surface.planner_ms(setting), excess=0.5 if full else 0.0, reason="too large" if full else "")

    search = Search(surface.space(START), START, forecast, [], SearchOptions(sampler="tpe"))
    driver = make(0, 0.03)[1]
    driver.run(search)
    assert all(request.setting.topk_ratio <= 0.1 for request in driver.requests)
    assert "too large" in {trial.reason for trial in search.book.trials}


def faulty(status: str, when: Callable[[Request, int], bool]) -> Callable[[Request], Outcome | None]:
    count = 0

    def fault(request: Request) -> Outcome | None:
        nonlocal count
        count += 1
        if not when(request, count):
            return None
        return Outcome(status, (), (), TOKENS, reason=f"it was {status}")  # type: ignore[arg-type]

    return fault


def test_a_crashed_setting_is_never_tried_again() -> None:
    search, driver = make(1, 0.03)
    driver.fault = faulty("crashed", lambda request, count: request.role in ("explore", "b"))
    driver.run(search)
    challenged = [request.setting for request in driver.requests if request.role in ("explore", "b")]
    assert len(challenged) == len(set(challenged)) == 8
    assert search.book.incumbent.setting == START
    assert all(search.book.judge(setting).rejected for setting in challenged)
    later = Search(search.book.space, START, driver.surface.forecast, challenged[:1], SearchOptions(
        sampler="tpe", barred=tuple(BarredSetting(one, "crash") for one in challenged)
    ))  # fmt: skip
    driver.fault, driver.requests = (lambda request: None), []
    driver.run(later)
    assert not {request.setting for request in driver.requests} & set(challenged)


def test_a_void_measurement_is_made_again_and_given_up_after_three() -> None:
    search, driver = make(1, 0.03)
    driver.fault = faulty("void", lambda request, count: count == 2)
    driver.run(search, most=4)
    assert [request.role for request in driver.requests] == ["start", "explore", "explore", "a2"]
    search, driver = make(1, 0.03)
    driver.fault = faulty("void", lambda request, count: request.role == "explore")
    driver.run(search)
    assert [request.role for request in driver.requests[:5]] == ["start", "explore", "explore", "explore", "explore"]
    assert driver.requests[1].setting == driver.requests[3].setting != driver.requests[4].setting
    assert search.measurements == 1
    assert search.book.incumbent.setting == START


def test_a_comparison_that_is_given_up_is_told_of_the_challenger() -> None:
    """Also where it is the incumbent whose measurements do not count."""
    search, driver = make(1, 0.03)
    driver.fault = faulty("void", lambda request, count: request.role == "a2")
    driver.run(search, most=5)
    challenger = driver.requests[1]
    note = next(note for note in search.notes if note.kind == "void")
    assert note.trial == challenger.trial != 0
    assert note.reason.startswith(f"Given up: {challenger.setting} could not be compared, since 3 measurements of ")
    assert str(START) in note.reason


def test_when_nothing_can_be_measured_it_ends() -> None:
    search, driver = make(1, 0.03)
    driver.fault = faulty("void", lambda request, count: True)
    driver.run(search)
    assert len(driver.requests) == 3
    assert isinstance(search.state, Stopped)


def test_a_slow_setting_is_aborted_after_a_few_steps() -> None:
    search, driver = make(1, 0.03)
    surface = driver.surface
    slow = min(search.book.space.settings(), key=surface.planner_ms)
    search.book.forecast(slow)
    real = Surface.ms

    class Slow(Surface):
        def ms(self, setting: Setting) -> float:
            return real(self, setting) * (5 if setting == slow else 1)

    driver.surface = Slow(**vars(surface))
    driver.run(search, most=2)
    assert driver.outcomes[1].status == "aborted"
    assert len(driver.outcomes[1].steps_ms) == max(8, slow.update_interval)
    assert search.book.trials[1].state is TrialState.ABORTED
    assert "ms that the best so far took when that was measured last" in search.notes[-1].reason


def flat(ms: Callable[[Setting], float], planned: list[Setting], **options: object) -> tuple[Search, Driver]:
    """A search over three settings with times of one's own."""
    surface = Surface.random(0)

    class Flat(Surface):
        def ms(self, setting: Setting) -> float:
            return ms(setting)

        def planner_ms(self, setting: Setting) -> float:
            return 100.0

    known = Flat(**vars(surface))
    search = Search(
        known.space(START),
        START,
        known.forecast,
        planned,
        SearchOptions(sampler="none", **options),  # type: ignore[arg-type]
    )
    return search, make(0, 0.01)[1].__class__(known, 0.01, make(0, 0.01)[1].random)


FAST = Setting(topk_ratio=0.2, update_interval=4, apply_lag=4)
FRESH = Setting(topk_ratio=0.2, update_interval=2, apply_lag=2)
SLOW = Setting(topk_ratio=0.05, update_interval=4, apply_lag=4)


def test_ties_go_to_the_least_staleness() -> None:
    times = {START: 100.0, FAST: 80.0, FRESH: 80.4}
    search, driver = flat(lambda setting: times[setting], [FAST, FRESH])
    driver.run(search)
    assert search.book.incumbent.setting == FRESH
    assert any(
        note.reason.startswith("Adopted for a mean staleness of 2.0 steps instead of 4.0") for note in search.notes
    )
    gain = search.book.gain
    assert gain is not None
    assert gain.share == pytest.approx(0.196, abs=0.02)


@pytest.mark.parametrize("seed", [2, 12, 22])
def test_a_tie_is_not_counted_as_one_more_setting_that_was_not_faster(seed: int) -> None:
    search, driver = make(seed, 0.02, sampler="random", grant_s=20.0)
    driver.run(search)
    *tried, stop = search.notes
    assert " for a mean staleness of " in tried[-1].reason or " for less memory" in tried[-1].reason
    kept = {note.trial for note in tried if note.kind == "keep"}
    assert stop.reason == f"The last {len(kept)} settings that were tried were not adopted for their speed."
    assert len(kept) == search.options.patience


def test_but_not_where_it_is_slower() -> None:
    times = {START: 100.0, FAST: 80.0, FRESH: 82.5}
    search, driver = flat(lambda setting: times[setting], [FAST, FRESH])
    driver.run(search)
    assert search.book.incumbent.setting == FAST


def test_then_to_the_least_memory() -> None:
    small, large = (Setting(topk_ratio=k, update_interval=4, apply_lag=4) for k in (0.15, 0.3))
    times = {START: 100.0, large: 80.0, small: 80.2}
    search, driver = flat(lambda setting: times[setting], [large, small])
    driver.run(search)
    assert search.book.incumbent.setting == small
    assert any("Adopted for less memory" in note.reason for note in search.notes)


def test_a_gain_below_two_percent_is_not_adopted() -> None:
    search, driver = flat(lambda setting: 98.6 if setting == FAST else 100.0, [FAST])
    driver.run(search)
    assert search.book.incumbent.setting == START
    assert search.book.gain is None


def around(middle_ms: float, noise: float, steps: int, seed: int) -> Outcome:
    """A measurement with just these figures."""
    places = [NormalDist().inv_cdf((step + 0.5) / steps) for step in range(steps)]
    np.random.default_rng(seed).shuffle(places)
    return Outcome("measured", tuple(middle_ms * (1 + noise * place) for place in places), tokens=TOKENS)


def test_a_gain_that_measurements_of_one_setting_do_not_agree_about_is_measured_once_more() -> None:
    """Of a busy machine, where what was adopted turned out 2.9% slower: the two of the incumbent differ by 8.6%."""
    first = {"start": (84.0, 0.1, 20), "explore": (84.1, 0.17, 20), "a1": (83.4, 0.24, 60), "b": (71.5, 0.12, 60)}
    then = {"a2": [(76.8, 0.091, 60), (76.0, 0.1, 60)], "b": [(71.5, 0.12, 60), (75.0, 0.1, 60)]}

    def measured(request: Request) -> Outcome:
        figures = then[request.role].pop(0) if request.role in then else first[request.role]
        if request.setting == FRESH:
            figures = (95.0, 0.1, 20)
        # Right before the look the incumbent took longer, so that it is compared though it looked no faster.
        return replace(around(*figures, seed=len(driver.requests)), before_ms=90.0 if request.setting == FAST else None)

    search, driver = flat(lambda _setting: 100.0, [FRESH, FAST])
    driver.fault = measured
    driver.run(search, most=6)
    assert [one.role for one in driver.requests] == ["start", "explore", "explore", "a1", "b", "a2"]
    challenger = search.book.find(FAST)
    assert challenger is not None
    assert gain(search.book.incumbent.samples[-2:], challenger.samples[-1:], seed=0).holds  # by steps alone
    driver.run(search, most=2)
    assert [one.role for one in driver.requests[6:]] == ["b", "a2"]
    assert search.notes[-1].kind == "keep"
    assert search.notes[-1].details["needed"] > 2 * search.notes[-1].details["gain"] > 0
    assert search.book.incumbent.setting == START


@pytest.mark.parametrize("seed", range(8))
def test_a_gain_of_ten_percent_is_found_where_steps_alone_are_noise(seed: int) -> None:
    search, driver = flat(lambda setting: 90.0 if setting == FAST else 100.0, [FRESH, FAST], seed=seed)
    driver.noise, driver.random = 0.05, np.random.default_rng(seed)
    driver.run(search)
    assert search.book.adopted.setting == FAST
    assert search.book.adoptions[0].gain.share == pytest.approx(0.1, abs=0.04)


def test_a_planners_choice_that_was_looked_at_once_is_measured_again_before_it_is_adopted() -> None:
    search, driver = flat(lambda setting: 80.0 if setting == FAST else 100.0, [FAST])
    driver.run(search)
    assert [one.role for one in driver.requests] == ["start", "explore", "a2", "b", "a2"]
    assert search.book.incumbent.setting == FAST


def test_a_look_is_not_judged_by_times_that_have_passed() -> None:
    slower = False
    search, driver = flat(lambda s: (100.0 if s == START else 80.0) * (1.4 if slower else 1), [SLOW, FAST])
    measure = driver.measure

    def beside_the_best(request: Request) -> Outcome:
        """As the executor, which knows what the last steps of the incumbent took."""
        found = measure(request)
        return found if request.setting == START else replace(found, before_ms=driver.surface.ms(START))

    driver.measure = beside_the_best  # type: ignore[method-assign]
    driver.run(search, most=1)
    slower = True  # whatever is looked at takes longer now than the start did
    driver.run(search)
    assert any(note.kind == "reopen" for note in search.notes)  # the best so far is measured again first
    assert not any("after one look" in note.reason for note in search.notes)


def test_it_begins_again_when_times_change() -> None:
    slower = False
    search, driver = flat(lambda s: (100.0 if s == START else 80.0) * (1.3 if slower else 1), [FAST], watch=True)
    driver.run(search, most=6)
    assert isinstance(search.state, Stopped)
    assert search.book.incumbent.setting == FAST
    assert driver.requests[-1].role == "hold"
    slower = True
    driver.run(search, most=1)
    assert search.notes[-1].kind == "reopen"
    request = search.next()
    assert request is not None
    assert (request.role, request.setting) == ("start", FAST)
    driver.run(search, most=1)
    assert search.book.incumbent_step_ms == pytest.approx(104, rel=0.02)


def test_the_guard_brings_the_start_back() -> None:
    search, driver = flat(lambda setting: 100.0 if setting == START else 80.0, [FAST])
    driver.run(search)
    assert search.book.incumbent.setting == FAST
    search.guard("The loss is nan.")
    assert search.book.incumbent.setting == START
    assert search.next() is None
    assert search.notes[-1].kind == "guard"


def test_every_reason_is_a_sentence_with_its_figures() -> None:
    search, driver = make(6, 0.08)
    driver.run(search)
    assert {"start", "adopt", "keep", "stop"} <= {note.kind for note in search.notes}
    for note in search.notes:
        assert note.reason.endswith(".")
        assert note.reason[0].isupper()
        assert any(character.isdigit() for character in note.reason)
        assert all(math.isfinite(value) for value in note.details.values())


def test_telling_it_more_than_it_asked_is_an_error() -> None:
    search, driver = flat(lambda setting: 100.0, [])
    driver.run(search)
    with pytest.raises(RuntimeError, match="the search is over"):
        search.tell(Outcome("measured", (1.0,) * 20))
