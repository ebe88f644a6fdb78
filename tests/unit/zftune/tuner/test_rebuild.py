"""The store's rows are all that a search needs to go on."""

from __future__ import annotations

import contextlib
import sqlite3
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.seeds import fresh_seeds
from tests.support.tiers import fast
from tests.support.zftune.tuner.surfaces import START, Driver, Surface, coverage, make
from zftune.errors import ZftuneError
from zftune.store import open_store
from zftune.store.store import Store
from zftune.store.types import Barred, Hardware, Key, Model, Run, RunState, TrialState
from zftune.tuner.recorder import StoreRecorder
from zftune.tuner.recording import MachineInfo, Recording, RunFacts
from zftune.tuner.rows import Followed, rebuild
from zftune.tuner.search import Search, SearchOptions
from zftune.tuner.space import Forecast, Setting, Space, space_for
from zftune.tuner.states import OF_INCUMBENT, Outcome, Request, Stopped

KEY = Key(
    model_id="m" * 16, hw_id="h" * 16, backend="zenflow", stage=0, dtype="bfloat16", world_size=1, micro_batch=1,
    sequence=64, checkpointing=False, quality="published",
)  # fmt: skip
FACTS = RunFacts(model=Model(model_id=KEY.model_id, dtype="bfloat16"), micro_batch=1, sequence=64)
HERE = MachineInfo(hardware=Hardware(hw_id=KEY.hw_id), usable_cores=None, versions={})


def begin(store: Store) -> Run:
    return store.begin_run(KEY, Model(model_id=KEY.model_id), Hardware(hw_id=KEY.hw_id), knobs=START.knobs())


def go(search: Search, driver: Driver, recorder: StoreRecorder, most: int) -> None:
    for _ in range(most):
        request = search.next()
        if request is None:
            break
        assert recorder.before(search, request) is None
        driver.run(search, most=1)
        recorder.after(search, request, driver.outcomes[-1])
    assert recorder.notices == []


def again(store: Store, run: Run, seed: int) -> Search:
    search, _ = make(seed, 0.05)
    rows = store.trials(run.run_id)
    rebuild(search, rows, {row.trial_id: store.measurements(row.trial_id) for row in rows})
    return search


@pytest.mark.parametrize("seed", fast([4], all_of=[1, 4, 6]))
def test_a_rebuilt_search_asks_the_same_next(store: Store, seed: int) -> None:
    run = begin(store)
    search, driver = make(seed, 0.05)
    recorder = StoreRecorder(store, run)
    for _ in range(30):
        if search.next() is None:
            break
        go(search, driver, recorder, 1)
        rebuilt = again(store, run, seed)
        assert rebuilt.book.incumbent.setting == search.book.incumbent.setting
        assert rebuilt.measurements == search.measurements
        assert rebuilt.cost == search.cost
        assert rebuilt.next() == search.next()
        assert rebuilt.notes == search.notes
    assert search.next() is None
    recorder.finish(search)
    assert [note.reason for note in search.notes] == [one.reason for one in store.decisions(run.run_id)]


def test_a_setting_that_was_in_flight_when_the_run_died_has_crashed(store: Store) -> None:
    run = begin(store)
    search, driver = make(1, 0.05)
    recorder = StoreRecorder(store, run)
    go(search, driver, recorder, 1)
    request = search.next()
    assert request is not None
    assert recorder.before(search, request) is None  # killed here
    store.renew_lease(run, lease_s=-1.0)
    assert len(store.reap()) == 1

    run = store.resume_run(run.run_id)
    resumed, driver = make(1, 0.05)
    recorder = StoreRecorder(store, run)
    assert [crash.trial for crash in recorder.resume(resumed).crashes] == [request.trial]
    assert resumed.book.trials[request.trial].state is TrialState.CRASHED
    assert [note.kind for note in resumed.notes[-2:]] == ["crash", "resume"]
    asked = resumed.next()
    assert asked is not None
    assert (asked.role, asked.setting) == ("start", resumed.book.incumbent.setting)
    go(resumed, driver, recorder, 40)
    assert request.setting not in {one.setting for one in driver.requests}
    recorder.finish(resumed)
    rebuilt = again(store, run, 1)
    assert rebuilt.next() is None
    assert rebuilt.notes == resumed.notes
    assert store.barred(KEY) == [Barred(request.setting.knobs(), "crash")]


def test_a_setting_that_was_only_planned_is_asked_for_again(store: Store) -> None:
    run = begin(store)
    search, driver = make(4, 0.05)
    recorder = StoreRecorder(store, run)
    request = search.next()
    while request is not None and (request.role != "explore" or request.trial < 2):
        go(search, driver, recorder, 1)
        request = search.next()
    assert request is not None
    recorder._trials(search)  # written down, not in flight
    store.finish_run(run)
    run = store.resume_run(run.run_id)
    resumed, driver = make(4, 0.05)
    recorder = StoreRecorder(store, run)
    assert recorder.resume(resumed) == Followed()
    go(resumed, driver, recorder, 1)
    now = resumed.next()
    assert now is not None
    assert (now.setting, now.role, now.steps) == (request.setting, "explore", request.steps)
    go(resumed, driver, recorder, 3)


def test_rows_of_another_search_are_refused(store: Store) -> None:
    run = begin(store)
    search, driver = make(1, 0.05)
    go(search, driver, StoreRecorder(store, run), 3)
    rows = store.trials(run.run_id)
    measurements = {row.trial_id: store.measurements(row.trial_id) for row in rows}
    other, _ = make(1, 0.05)
    other.book.trials[0].setting = Setting(topk_ratio=0.3)
    with pytest.raises(ZftuneError, match="began with another setting"):
        rebuild(other, rows, measurements)


def watching(planned: Sequence[Setting] = (), **options: Any) -> Search:
    """A search that looks on at step times once it has stopped."""
    space = space_for(START, "published", coverage=coverage, offload_ratios=(1.0,))
    settings = SearchOptions(sampler="none" if planned else "random", hold=True, watch=True, **options)
    return Search(space, START, lambda setting: Forecast(100.0), planned, settings)


def earlier(recorder: StoreRecorder, search: Search, here: Space, own: Setting) -> None:
    """Have updates come earlier in a training that goes on, where that asks for it."""
    recording = Recording(recorder._store, FACTS, "published", HERE)
    recording.recorder = recorder
    known = len(recording.notices)
    recording.bound(search, here, own)
    assert recording.notices[known:] == []


class Written:
    """A search whose measurements take what they are told to, written down."""

    def __init__(self, store: Store, search: Search) -> None:
        self.store, self.run, self.search = store, begin(store), search
        self.recorder = StoreRecorder(store, self.run)
        self.draw = np.random.default_rng(1)

    def go(self, ms: float = 100.0, **more: Any) -> Request:
        request = self.search.next()
        assert request is not None
        assert self.recorder.before(self.search, request) is None
        counts = request.discard, request.steps
        discarded, steps = (tuple(ms * np.exp(0.01 * self.draw.standard_normal(count))) for count in counts)
        outcome = Outcome(**{"status": "measured", "steps_ms": steps, "discarded_ms": discarded, "tokens": 64, **more})
        self.search.tell(outcome)
        self.recorder.after(self.search, request, outcome)
        return request

    def go_on(self, search: Search) -> None:
        """In another life of the run."""
        self.run = self.store.resume_run(self.run.run_id)
        self.search, self.recorder = search, StoreRecorder(self.store, self.run)
        assert self.recorder.resume(search) == Followed()

    def read_back(self, search: Search) -> Followed:
        rows = self.store.trials(self.run.run_id)
        measurements = {row.trial_id: self.store.measurements(row.trial_id) for row in rows}
        return rebuild(search, rows, measurements, self.store.decisions(self.run.run_id))


LATE = Setting(topk_ratio=0.1, update_interval=16, apply_lag=16)
"""The quality does not allow it."""


def test_a_step_back_for_the_quality_is_read_back_with_its_number(store: Store) -> None:
    """It comes after all that were thought of, also after those that nobody measured."""
    written = Written(store, watching([LATE]))
    written.go(movement_percent=0.05)
    assert written.go(movement_percent=5.0).role == "hold"  # that was rejected, and no other is left
    assert [one.source for one in written.search.book.trials] == ["start", "planner", "planner"]
    written.go(movement_percent=5.0)
    read = watching([LATE])
    assert written.read_back(read) == Followed()
    assert read.book.incumbent.number == 2
    assert known(read) == known(written.search)


def test_a_step_back_of_a_search_that_had_ended_is_read_back(store: Store) -> None:
    """Also where its training was killed before it measured anything."""
    written = Written(store, watching())
    while written.search._restarts == 0:
        written.go(100.0 if len(written.search.notes) < 2 else 150.0)
    assert written.go(status="crashed").role == "start"
    assert isinstance(written.search.state, Stopped)
    for _ in range(2):
        written.recorder.finish(written.search, unfinished=True)
        written.go_on(watching())
        earlier(written.recorder, written.search, watching().book.space, replace(START, apply_lag=1))
    assert written.go().role == "start"
    read = watching()
    assert written.read_back(read) == Followed()
    assert known(read) == known(written.search)


def test_the_lease_outlasts_a_long_measurement(store: Store) -> None:
    run = begin(store)
    search, _ = make(1, 0.05)
    search.book._forecasts[START] = Forecast(20_000.0)
    request = search.next()
    assert request is not None
    assert StoreRecorder(store, run).before(search, request) is None
    assert store.runs()[0].lease_until_unix_s > time.time() + 20.0 * (request.steps + request.discard)


def test_where_the_store_takes_no_more_the_search_ends_and_training_goes_on(store: Store) -> None:
    run = begin(store)
    search, driver = make(1, 0.05)
    recorder = StoreRecorder(store, run)
    go(search, driver, recorder, 1)
    store.finish_run(run)  # somebody else's now
    request = search.next()
    assert request is not None
    refused = recorder.before(search, request)
    assert refused is not None
    assert refused.startswith("No setting can be tried safely: run '")
    search.stop(refused)
    recorder.after(search, request, Outcome("void"))
    recorder.finish(search)
    assert len(recorder.notices) == 1
    assert search.next() is None


@pytest.mark.parametrize("heard", [True, False])
def test_a_store_that_takes_no_more_for_a_while_is_not_left_with_a_trial_in_flight(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, heard: bool
) -> None:
    monkeypatch.setattr("zftune.store.opening.BUSY_TIMEOUT_S", 0.1)
    path = tmp_path / "zftune.db"
    with open_store(str(path), environment={"HOME": str(tmp_path)}) as store:
        run = begin(store)
        search, driver = make(1, 0.05)
        recorder = StoreRecorder(store, run)
        while (request := search.next()) is not None and request.trial == 0:
            assert recorder.before(search, request) is None
            driver.run(search, most=1)
            recorder.after(search, request, driver.outcomes[-1])
        assert request is not None
        assert recorder.before(search, request) is None
        with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as other:
            other.execute("BEGIN EXCLUSIVE")
            driver.run(search, most=1)
            recorder.after(search, request, driver.outcomes[-1])
            assert len(recorder.notices) == 1
            assert store.trials(run.run_id)[request.trial].state is TrialState.IN_FLIGHT
            other.execute("ROLLBACK")
        if heard:
            recorder.finish(search)
        else:
            recorder.lose()  # much later: that trial was survived
        assert len(recorder.notices) == 1
        assert store.trials(run.run_id)[request.trial].state is TrialState.VOID
        assert [one.state for one in store.runs()] == [RunState.LOST]  # not finished: it lacks what was not written


# --- whatever happens ------------------------------------------------------------------------------------------------

RUNS = fast(1, all_of=5)
ROWS = fast(40, all_of=150)


def known(search: Search) -> dict[str, Any]:
    """All that a search goes by, but for what it has planned."""
    book, cost = search.book, search.cost
    trials = [(one.setting, one.source, one.state, one.samples, one.device_bytes) for one in book.trials]
    return {
        "incumbent": book.incumbent.number,
        "adopted": book.adoptions,
        "trials": trials,
        "tokens": book.tokens,
        "bound": (book.space.budget, book.space.movement_percent),
        "barred": book._barred,
        "state": search.state,
        "counted": (search.measurements, search._misses, search._restarts, search._last_role),
        "tied": (search._ties, search._tied),
        "usual": search._change,
        "cost": (cost.spent_s, cost.elapsed_s, cost.start_step_s, cost.change_s),
        "decided": [(one.kind, one.reason, one.trial) for one in search.notes if one.kind != "resume"],
    }


class Restless:
    """A training whose machine, memory, tokens and movement change, that is killed at any moment and goes on."""

    def __init__(self, store: Store, seed: int) -> None:
        self.store, self.draw = store, np.random.default_rng(seed)
        draw = self.draw
        self.surface = Surface.random(seed % 2**32)
        waits = bool(draw.random() < 0.8)
        self.options = SearchOptions(
            seed=seed % 1000, sampler="random", most_measurements=int(draw.integers(6, 25)),
            patience=int(draw.integers(2, 9)), grant_s=float(draw.choice([2.0, 20.0, 200.0])),
            cost_share=float(draw.choice([0.03, 0.3])), hold=waits, watch=waits or bool(draw.random() < 0.5),
        )  # fmt: skip
        self.factor, self.tokens, self.more_bytes = 1.0, 64, 0
        self.noise = float(draw.choice([0.003, 0.02, 0.08]))
        self.movement_percent = float(draw.uniform(0.05, 0.4)) if draw.random() < 0.7 else None
        self.lives = 1
        self.is_measured = False
        """Whether a measurement has told how far weights move since the process began: until then it is its own."""
        self.is_torn = True
        """Whether it may be killed between a measurement's row and those of what came of it."""
        self.run = begin(store)
        self.search = self.make()
        self.recorder = StoreRecorder(store, self.run)

    def make(self) -> Search:
        """As a process does that begins: its own warm-up has another forecast, and has seen another movement."""
        surface = replace(self.surface, compute=self.surface.compute * float(self.draw.uniform(0.9, 1.1)))
        space = space_for(START, "published", coverage=coverage, threads=(2, 4), offload_ratios=(0.9, 1.0))
        if self.movement_percent is not None:
            space = space.moving(self.movement_percent * float(self.draw.uniform(0.9, 1.1)))
        planned = sorted(space.settings(), key=surface.planner_ms)[:1]
        search = Search(space, START, surface.forecast, planned, self.options)
        search.book.device_limit_bytes = round(1.05e9)
        return search

    def change(self) -> None:
        """Now and then, what the training cannot help."""
        draw = self.draw
        if draw.random() < 0.05:
            self.factor = float(draw.choice([1.0, 1.3, 2.0]))
        if draw.random() < 0.02:
            self.tokens = 192 - self.tokens
        if draw.random() < 0.02:
            self.more_bytes = round(6e8) - self.more_bytes
        if self.movement_percent is not None:
            self.movement_percent *= float(draw.uniform(0.95, 1.05)) * (3.0 if draw.random() < 0.02 else 1.0)

    def measure(self, request: Request) -> Outcome:
        """What comes of a request, times as noisy within it as from one to the next."""
        draw, chance = self.draw, self.draw.random()
        steps: list[float] = []
        discarded: list[float] = []
        if chance < 0.06:
            return Outcome("void", (100.0,) * 4, (), self.tokens, reason="busy", called_off=bool(chance < 0.02))
        if chance < 0.07 and request.role not in OF_INCUMBENT:
            return Outcome("crashed", reason="out of memory")
        usual = self.surface.ms(request.setting) * self.factor * float(np.exp(self.noise * draw.standard_normal()))
        best_ms = self.surface.ms(self.search.book.incumbent.setting) * self.factor
        before_ms = None if request.role in OF_INCUMBENT else best_ms
        more: dict[str, Any] = {
            "tokens": self.tokens, "movement_percent": self.movement_percent, "before_ms": before_ms,
            "device_bytes": self.surface.forecast(request.setting).device_bytes - round(7e8) + self.more_bytes,
        }  # fmt: skip
        for index in range(request.discard + request.steps):
            step_ms = usual * float(np.exp(self.noise * draw.standard_normal()))
            (discarded if index < request.discard else steps).append(step_ms)
            reason = request.abort_reason(discarded, steps, before_ms)
            if reason is not None:
                return Outcome("aborted", tuple(steps), tuple(discarded), reason=reason, **more)
        return Outcome("measured", tuple(steps), tuple(discarded), **more)

    def go(self) -> bool:
        self.change()
        request = self.search.next()
        if request is None:
            return False
        assert self.recorder.before(self.search, request) is None
        if self.draw.random() < 0.04:
            self.kill()
            return True
        outcome = self.measure(request)
        self.search.tell(outcome)
        self.is_measured |= outcome.movement_percent is not None
        if self.is_torn and self.draw.random() < 0.02:
            self.kill_within(request, outcome)
            return True
        self.recorder.after(self.search, request, outcome)
        assert self.recorder.notices == []
        if self.draw.random() < 0.06:
            self.compare()
        return True

    def compare(self, *, begins: bool = False) -> None:
        """Read it back; it begins as the other one did that was read back before."""
        rebuilt = self.rebuilt()
        if begins:
            rebuilt.begin_again()
        read, live = known(rebuilt), known(self.search)
        if not self.is_measured:
            del read["bound"], live["bound"]
        assert read == live

    def kill_within(self, request: Request, outcome: Outcome) -> None:
        """Once the measurement is written down, and nothing else of what came of it."""

        def end(search: Search) -> None:
            raise SystemExit

        vars(self.recorder)["_trials"] = end
        with pytest.raises(SystemExit):
            self.recorder.after(self.search, request, outcome)
        self.compare()
        self.kill()

    def kill(self) -> None:
        """Whatever is in flight then."""
        self.store.renew_lease(self.run, lease_s=-1.0)
        self.store.reap()
        self.run = self.store.resume_run(self.run.run_id)
        self.search, self.recorder = self.make(), StoreRecorder(self.store, self.run)
        assert self.recorder.resume(self.search).lost == 0
        self.lives += 1
        self.is_measured = False
        if self.draw.random() < 0.4:
            self.begin_earlier()
            self.compare(begins=True)
            if self.draw.random() < 0.4:
                self.kill()

    def begin_earlier(self) -> None:
        """As another training does: by how far its weights move, or where that is not known with its own settings."""
        here = space_for(START, "published", coverage=coverage, threads=(2, 4), offload_ratios=(0.9, 1.0))
        if self.movement_percent is not None and self.draw.random() < 0.5:
            here = here.moving(self.movement_percent * float(self.draw.uniform(0.5, 3.0)))
        earlier(self.recorder, self.search, here, replace(START, apply_lag=int(self.draw.integers(1, 5))))

    def rebuilt(self) -> Search:
        search = self.make()
        rows = self.store.trials(self.run.run_id)
        measurements = {row.trial_id: self.store.measurements(row.trial_id) for row in rows}
        assert rebuild(search, rows, measurements, self.store.decisions(self.run.run_id)).lost == 0
        return search


@pytest.mark.parametrize("seed", fresh_seeds("rebuild", RUNS))
def test_a_search_that_is_read_back_knows_what_the_killed_one_knew(store: Store, seed: int) -> None:
    """In other times, with other movement, tokens and memory, cut short, without a result, killed at any row."""
    world = Restless(store, seed)
    for _ in range(ROWS):
        if not world.go():
            break


@pytest.mark.parametrize("seed", fresh_seeds("damage", RUNS))
def test_rows_that_do_not_follow_cost_what_was_compared_and_nothing_else(store: Store, seed: int) -> None:
    """Rows that are missing, or by which something else would have been decided, as by another version's rules."""
    world = Restless(store, seed)
    world.is_torn = False
    while len(world.search.book.trials) < 2 or world.draw.random() < 0.97:
        if not world.go():
            break
    rows = store.trials(world.run.run_id)
    kept = {row.trial_id: list(store.measurements(row.trial_id)) for row in rows}
    for measurements in kept.values():
        for at, one in reversed(list(enumerate(measurements))):
            chance = world.draw.random()
            if chance < 0.1:
                del measurements[at]
            elif chance < 0.3:
                slower = world.draw.uniform(0.5, 2.0)
                measurements[at] = replace(one, steps_ms=tuple(slower * step for step in one.steps_ms))
    read = world.make()
    lost = rebuild(read, rows, kept, store.decisions(world.run.run_id)).lost
    book, known_book = read.book, world.search.book
    if lost:
        assert book.incumbent.number == known_book.incumbent.number
        adopted, known_adopted = ([(one.trial, one.replaced) for one in of.adoptions] for of in (book, known_book))
        assert adopted == known_adopted
        assert book.gain_share == pytest.approx(known_book.gain_share, abs=1e-4)
        assert book.gain_age == known_book.gain_age
    assert [one.setting.knobs() for one in book.trials[: len(rows)]] == [row.knobs for row in rows]
    read.begin_again()
    world.search = read
    for _ in range(20):
        request = read.next()
        if request is None:
            break
        read.tell(world.measure(request))
