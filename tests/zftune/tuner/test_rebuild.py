"""The store's rows are all that a search needs to go on."""

from __future__ import annotations

import contextlib
import sqlite3
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.zftune.tuner.surfaces import START, Driver, make
from zftune.errors import ZftuneError
from zftune.store import open_store
from zftune.store.store import Store
from zftune.store.types import Barred, Hardware, Key, Model, Run, RunState, TrialState
from zftune.tuner.recorder import StoreRecorder, rebuild
from zftune.tuner.search import Search
from zftune.tuner.space import Forecast, Setting
from zftune.tuner.states import Outcome

KEY = Key(
    model_id="m" * 16, hw_id="h" * 16, backend="zenflow", stage=0, dtype="bfloat16", world_size=1, micro_batch=1,
    sequence=64, checkpointing=False, quality="published",
)  # fmt: skip


@pytest.fixture
def store() -> Iterator[Store]:
    with open_store("sqlite://", environment={"HOME": "/nowhere"}) as store:
        yield store


def begin(store: Store) -> Run:
    return store.begin_run(KEY, Model(model_id=KEY.model_id), Hardware(hw_id=KEY.hw_id), knobs=START.knobs())


def go(search: Search, driver: Driver, recorder: StoreRecorder, most: int) -> None:
    """Run it, writing everything down."""
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


@pytest.mark.parametrize("seed", [1, 4, 6])
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
    assert [crash.trial for crash in recorder.resume(resumed)] == [request.trial]
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
    assert list(recorder.resume(resumed)) == []
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
    del measurements[rows[0].trial_id]
    with pytest.raises(ZftuneError, match="do not follow from those before them"):
        rebuild(make(1, 0.05)[0], rows, measurements)


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
    monkeypatch.setattr("zftune.store.engines.BUSY_TIMEOUT_S", 0.1)
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
