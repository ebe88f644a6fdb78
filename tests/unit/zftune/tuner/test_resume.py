"""What a search begins from: one that was not finished, a preset, or the user's own knobs."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from tests.support.tiers import fast
from tests.support.zftune.tuner.surfaces import START, Driver, Surface, recording_of
from zftune.errors import StoreError
from zftune.store.account import Counter
from zftune.store.store import Store
from zftune.store.types import (
    Evidence,
    Hardware,
    Model,
    Preset,
    PresetState,
    Ratios,
    RunState,
    TrialState,
    Withdrawal,
)
from zftune.tuner import messages
from zftune.tuner.evidence import Gain
from zftune.tuner.record import MachineInfo, Recording, stake_won
from zftune.tuner.search import Search, SearchOptions
from zftune.tuner.setup import Prepared, SearchRequest, begin
from zftune.tuner.space import Setting
from zftune.tuner.states import LEARNING_RATE, OF_INCUMBENT, Adoption, Remark

HERE = MachineInfo.now("made-up")
RATIOS = Ratios(2.0, 1.0)
NOISE = 0.03


class World:
    """A machine that trains one model, and a user who tunes it there again and again."""

    def __init__(self, store: Store, seed: int = 1) -> None:
        self.store, self.surface = store, Surface.random(seed)
        self.seed = seed
        self.space = self.surface.space(START)
        self.options = SearchOptions(seed=seed)
        self.recording: Recording | None = None

    def begin(self, micro_batch: int = 1, **more: Any) -> Prepared:
        wanted: dict[str, Any] = {"own": START, "space": self.space, "options": self.options, "ratios": RATIOS, **more}
        self.recording = recording_of(self.store, HERE, micro_batch=micro_batch)
        return begin(
            self.recording, SearchRequest(**wanted), lambda start, options: self.search(start, options, wanted)
        )

    def search(self, start: Setting, options: SearchOptions, wanted: dict[str, Any]) -> Search:
        planned = sorted(wanted["space"].settings(), key=self.surface.planner_ms)[:1]
        return Search(wanted["space"], start, self.surface.forecast, planned, options)

    def go(
        self, begun: Prepared, most: int = 1000, *, noise: float = NOISE, movement_percent: float | None = None
    ) -> Driver:
        search, recorder = begun.search, begun.recorder
        assert recorder is not None
        driver = Driver(self.surface, noise, np.random.default_rng(self.seed + 7))
        driver.fault = lambda request: replace(driver.measure(request), movement_percent=movement_percent)
        for _ in range(most):
            request = search.next()
            if request is None:
                break
            assert recorder.before(search, request) is None
            driver.run(search, most=1)
            recorder.after(search, request, driver.outcomes[-1])
        return driver

    def end(self, begun: Prepared, *, unfinished: bool = False) -> Recording:
        assert self.recording is not None
        self.recording.finish(begun.search, unfinished=unfinished)
        return self.recording

    def whole(self, **more: Any) -> Prepared:
        begun = self.begin(**more)
        self.go(begun)
        assert self.end(begun).notices == self.store.notices
        return begun


@pytest.fixture
def world(store: Store) -> World:
    return World(store)


def kept(world: World, setting: Setting, **more: Any) -> Preset:
    recording = recording_of(world.store, HERE)
    evidence = Evidence(
        step_ms=90.0, baseline="start", baseline_step_ms=120.0, measurements=9, steps=200, measured_unix_s=time.time()
    )
    return world.store.save_preset(
        Preset(
            **{
                "key": recording.key,
                "knobs": setting.knobs(),
                "evidence": evidence,
                "model": Model(model_id="a" * 16, dtype="bfloat16"),
                "hardware": Hardware(hw_id=recording.key.hw_id, rig="made-up"),
                "ratios": RATIOS,
                "usable_cores": recording._here.usable_cores,
                **more,
            }
        )
    )


def test_a_later_run_begins_from_what_an_earlier_one_found(world: World, store: Store) -> None:
    first = world.whole()
    assert first.sentence == ""
    assert first.search.book.trials[0].setting == START
    assert first.search.book.gain is not None
    (preset,) = store.presets()
    assert (preset.ratios, preset.knobs) == (RATIOS, first.search.book.incumbent.setting.knobs())

    second = world.begin()
    assert second.search.book.trials[0].setting == first.search.book.incumbent.setting
    assert f"Begins from preset {preset.name}, measured for this model on this hardware" in second.sentence
    fresh = world.begin(fresh=True)
    assert (fresh.sentence, fresh.search.book.trials[0].setting) == ("", START)


def test_a_preset_that_is_beaten_twice_is_withdrawn(world: World, store: Store) -> None:
    slow = kept(world, START)
    for losses in (1, 2):
        begun = world.begin()
        assert begun.search.book.trials[0].setting == START
        world.go(begun)
        recording = world.end(begun)
        assert stake_won(begun.search, START) is False
        (old,) = (one for one in store.presets() if one.name == slow.name)
        assert old.lost_comparisons == losses
        for one in store.presets():
            if one.name != slow.name:
                store.remove_preset(one.name)
    assert old.state is PresetState.WITHDRAWN
    assert recording.notices[-1] == f"Preset {slow.name} was slower in two later comparisons and is withdrawn."
    assert world.begin().sentence == ""


def test_a_preset_that_stands_stays(world: World, store: Store) -> None:
    best = min(world.space.settings(), key=world.surface.ms)
    kept(world, best)
    begun = world.whole()
    assert begun.search.book.incumbent.setting == best
    (preset,) = store.presets()
    assert (preset.lost_comparisons, preset.state) == (0, PresetState.ACTIVE)


@pytest.mark.parametrize(
    ("more", "reason"),
    [
        ({"imported": True}, "was imported and not measured here"),
        (
            {"ratios": Ratios(2.5, 0.8), "key": {"micro_batch": 2}},
            "is the nearest, not the same (micro_batch 2 instead",
        ),
    ],
)
def test_what_was_not_measured_here_is_compared_first(world: World, more: dict[str, Any], reason: str) -> None:
    best = min(world.space.settings(), key=world.surface.ms)
    if "key" in more:
        more = {**more, "key": replace(recording_of(world.store, HERE).key, **more["key"])}
    preset = kept(world, best, **more)
    begun = world.begin()
    assert begun.search.book.trials[0].setting == START
    assert begun.sentence.startswith("Looks at a preset first: ")
    assert reason in begun.sentence
    driver = world.go(begun)
    world.end(begun)
    assert [(one.role, one.setting) for one in driver.requests[:2]] == [("start", START), ("explore", best)]
    assert begun.search.book.trials[1].source == "preset"
    assert begun.search.book.incumbent.setting == best
    found = {one.name: one for one in world.store.presets()}
    assert found[preset.name].lost_comparisons == 0
    assert len(found) == 2  # what was an import is now measured here
    assert world.begin().search.book.trials[0].setting == best


def test_an_import_that_is_slower_here_loses(world: World, store: Store) -> None:
    slow = max(world.space.settings(), key=world.surface.ms)
    preset = kept(world, slow, imported=True)
    begun = world.begin()
    world.go(begun)
    world.end(begun)
    judged = next((trial.state for trial in begun.search.book.trials if trial.setting == slow), None)
    found = next(one for one in store.presets() if one.name == preset.name)
    assert found.lost_comparisons == (judged is not TrialState.REJECTED)


def test_far_ratios_are_left_to_the_planner(world: World) -> None:
    key = replace(recording_of(world.store, HERE).key, micro_batch=2)
    kept(world, min(world.space.settings(), key=world.surface.ms), key=key, ratios=Ratios(20.0, 1.0))
    assert world.begin().sentence == ""


@pytest.mark.parametrize(
    ("change", "wanted", "reason"),
    [
        ({"topk_ratio": 0.0, "update_interval": 16, "apply_lag": 16}, {}, "its weighted staleness would be "),
        ({"offload_ratio": 0.8}, {"least_ratio": 1.0}, "its offload_ratio 0.8 takes GPU memory: --tune-memory"),
        ({"topk_ratio": 0.2}, {"fixed": True}, "no loss is known"),
    ],
)
def test_a_preset_that_must_not_run_here_is_not_used(
    world: World, change: dict[str, Any], wanted: dict[str, Any], reason: str
) -> None:
    kept(world, replace(START, **change))
    if wanted.pop("fixed", False):
        wanted = {"space": replace(world.space, fixed_because="no loss is known")}
    begun = world.begin(**wanted)
    assert begun.search.book.trials[0].setting == START
    assert begun.sentence.startswith("Preset ")
    assert f" is not used: {reason}" in begun.sentence


def test_an_imported_preset_with_some_knobs_only(world: World) -> None:
    some: dict[str, Any] = {"topk_ratio": 0.4, "update_interval": 6, "offload_ratio": 0.8}
    kept(world, START, imported=True, knobs=some)
    driver = world.go(world.begin(), most=2)
    assert driver.requests[1].setting == replace(START, **some, apply_lag=6)
    kept(world, START, imported=True, knobs={**some, "update_interval": "auto"})
    assert "is not used: update_interval is 'auto'" in world.begin(fresh=False).sentence


def test_knobs_that_no_search_changes_stay_the_users(world: World) -> None:
    best = min(world.space.settings(), key=world.surface.ms)
    kept(world, replace(best, deferred_update="mean"))
    begun = world.begin()
    assert "was measured with other fixed settings" in begun.sentence
    assert world.go(begun, most=2).requests[1].setting == best


def test_a_preset_is_the_same_where_a_knob_without_effect_differs(world: World, store: Store) -> None:
    synchronous = replace(START, overlap_step=False)
    older = kept(world, replace(synchronous, apply_lag=1))
    other = kept(world, replace(synchronous, topk_ratio=0.2))
    begun = world.begin(fresh=True)
    book = begun.search.book
    trial = begun.search.add(synchronous, "search")
    trial.keep([4.0])
    book.adopt(trial, Adoption(trial.number, 0, 0.1, 0.01))
    book.gain = Gain(0.1, 0.01)
    assert world.recording is not None
    world.recording.keep_preset(begun.search)
    assert {one.name for one in store.presets()} == {older.name, other.name}
    world.recording.withdraw_preset(synchronous, Withdrawal("guard"))
    states = {one.name: one.state for one in store.presets()}
    assert states == {older.name: PresetState.WITHDRAWN, other.name: PresetState.ACTIVE}


@pytest.mark.parametrize("each", fast([3], all_of=[2, 3, 5]))
def test_a_search_that_is_interrupted_again_and_again_comes_to_its_end(world: World, store: Store, each: int) -> None:
    begun, lives, before = world.begin(), 0, 0
    while world.go(begun, each + (lives > 0)).requests and begun.search.next() is not None:
        begun.search.stop("Interrupted.")
        assert world.end(begun, unfinished=True).notices == store.notices
        lives += 1
        assert lives < 60
        before = begun.search.measurements
        kept = messages.count(before, "measurement")
        incumbent = begun.search.book.incumbent.setting
        (run,) = store.runs()
        assert run.state is RunState.LOST
        begun = world.begin()
        anew = "(--fresh, or fresh=True of zftune.attach, begins anew)"
        assert begun.sentence == f"Resumes run {run.run_id[:8]} with {kept} {anew}."
        asked = begun.search.next()
        assert asked is not None
        assert (asked.role, asked.setting) == ("start", incumbent)
    world.end(begun)
    (run,) = store.runs()
    assert run.state is RunState.FINISHED
    assert lives > 3
    trials = store.trials(run.run_id)
    assert not {trial.state for trial in trials} & {TrialState.IN_FLIGHT, TrialState.PLANNED, TrialState.CRASHED}
    assert world.surface.ms(begun.search.book.incumbent.setting) < 1.02 * world.surface.ms(START)
    roles = [one.role for trial in trials for one in store.measurements(trial.trial_id)]
    assert begun.search.measurements == len(roles)
    assert world.begin().sentence.startswith("Begins from preset")


def test_a_comparison_is_begun_anew(world: World) -> None:
    begun = world.begin()
    while (request := begun.search.next()) is not None and request.role != "b":
        world.go(begun, 1)
    assert request is not None
    world.end(begun, unfinished=True)
    again = world.begin()
    driver = world.go(again, 3)
    roles = [one.role for one in driver.requests]
    assert roles in (["start", "b", "a2"], ["start", "explore", "a2"])  # of this setting, or of another


def test_another_learning_rate_is_told_of_once_where_it_goes_on(world: World) -> None:
    told: list[str] = []
    for rate in (1e-3, 1e-3, 2e-4, 2e-4, 1e-3, 2e-4, None):
        begun = world.begin(learning_rate=rate)
        learning(begun, *() if rate is None else (rate,))
        world.go(begun, 1)
        told.append(begun.sentence)
        world.end(begun, unfinished=True)
    lower, higher = "is 0.0002 from here on, it was 0.001:", "is 0.001 from here on, it was 0.0002:"
    (run,) = world.store.runs()
    remarks = [one.details for one in world.store.decisions(run.run_id) if one.details.get("because") == "rate"]
    rates = [(one[LEARNING_RATE], one["before"]) for one in remarks]
    assert rates == [(2e-4, 1e-3), (1e-3, 2e-4), (2e-4, 1e-3)]
    assert [lower in one for one in told] == [False, False, True, False, False, True, False]
    assert [higher in one for one in told] == [False] * 4 + [True] + [False] * 2


def learning(begun: Prepared, *rates: float) -> None:
    """Let a process count steps with these learning rates, each at its highest as far as the optimizer keeps it."""
    counter = Counter(0.0)
    for number, rate in enumerate(rates, start=1):
        counter.step(float(number), 1, 1, rate)
    assert begun.recorder is not None
    begun.recorder.follow(lambda: counter.count)


RISES = (2e-5, 1.1e-4, 2e-4)


@pytest.mark.parametrize("begins_anew", [True, False])
@pytest.mark.parametrize(
    ("before", "rate", "told"),
    [
        ([RISES], 2e-4, None),  # what was written down as the search began was that of its warm-up
        ([RISES], 1.1e-4, None),  # again from the beginning, as it seems
        ([RISES], 1e-3, 2e-4),
        ([RISES[::-1]], 1.5e-4, None),  # it falls, as after a warm-up
        ([RISES[::-1]], 1e-5, 2e-4),
        ([RISES, RISES[:2]], 2e-4, None),  # the last one was killed in its warm-up
        ([RISES, (1e-3,)], 2e-4, 1e-3),
        ([()], 2e-4, None),  # nobody has counted
    ],
)
def test_a_schedule_is_compared_at_its_highest(
    world: World, before: list[tuple[float, ...]], rate: float, told: float | None, begins_anew: bool
) -> None:
    for rates in before:
        begun = world.begin(learning_rate=rates[0] if rates else 3e-4)
        learning(begun, *rates)
        world.go(begun, 1)
        world.end(begun, unfinished=True)
    sentence = world.begin(learning_rate=rate, begins_anew=begins_anew).sentence
    assert sentence.startswith("Resumes run")
    assert ("The learning rate is" in sentence) == (told is not None)
    assert told is None or f"is {rate:.3g} from here on, it was {told:.3g}:" in sentence
    assert "and losses of both" not in sentence or not begins_anew


def test_a_finished_or_another_search_is_not_gone_on_with(world: World) -> None:
    begun = world.begin()
    world.go(begun, 2)
    world.end(begun, unfinished=True)
    for more in (
        {"options": replace(world.options, seed=2)},
        {"own": replace(START, topk_ratio=0.2)},
        {"space": replace(world.space, dimensions=world.space.dimensions[:2])},
        {"micro_batch": 2},
        {"fresh": True},
    ):
        assert world.begin(**more).sentence == ""
        assert world.recording is not None
        world.store.reap()
    world.whole(fresh=True)
    assert world.begin().sentence.startswith("Begins from preset")


def test_a_store_that_fails_costs_a_sentence(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise StoreError("the store could not be read (disk I/O error)")

    for name in ("reap", "runs", "presets", "begin_run"):
        monkeypatch.setattr(world.store, name, fail)
    begun = world.begin()
    assert begun.recorder is None
    request = begun.search.next()
    assert request is not None
    assert request.role in OF_INCUMBENT
    assert world.recording is not None
    assert set(world.recording.notices) - set(world.store.notices) == {"the store could not be read (disk I/O error)."}


def test_a_remark_that_comes_back_is_written_down_once(world: World) -> None:
    """Of the search itself, by the training that has said it, and in the run's next life."""
    said = Remark("Step times changed 4 times.", 1.0, 1.0)
    begun = world.begin()
    world.go(begun, 2)
    for _ in range(2):
        begun.search.remark(said.reason)
    begun.search.remember(said)
    world.end(begun, unfinished=True)
    again = world.begin()
    assert again.recorder is not None
    again.search.remember(said)
    again.search.remember(replace(said, reason="Another one."))
    world.end(again, unfinished=True)
    remarks = [one for one in world.store.decisions(again.recorder.run_id) if one.kind == "remark"]
    kinds = [messages.sentence(one) for one in remarks if "Begins" not in one.details["text"]]
    assert kinds == [said.reason, "Another one."]
