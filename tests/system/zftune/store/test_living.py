"""Who holds a run's lock lives; a process that is killed holds none."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from tests.support import fork_server
from tests.support.zftune.fixtures import Clock
from tests.support.zftune.store import rows
from tests.support.zftune.store.examples import HARDWARE, KEY, KNOBS, MODEL
from zftune.errors import StoreError
from zftune.store import open_store
from zftune.store.store import Store
from zftune.store.types import LEASE_S, TrialState

pytestmark = pytest.mark.smoke


def fly(path: str, told: Connection, *, child: bool = False) -> None:
    """Begin a run, let a setting fly, and wait to be killed; perhaps with a child that lives on for a while."""
    with open_store(path) as store:
        run = store.begin_run(KEY, MODEL, HARDWARE, knobs=KNOBS)
        rows.mark_in_flight(store, run, rows.add_trial(store, run, KNOBS, source="search").trial_id)
        sleeper = os.fork() if child else None
        if sleeper == 0:
            signal.pause()
        told.send((run.run_id, sleeper))
        signal.pause()


def begun(path: Path, *, child: bool = False) -> tuple[str, multiprocessing.process.BaseProcess, int | None]:
    context = fork_server.context()
    mine, others = context.Pipe()
    process = context.Process(target=fly, args=(str(path), others), kwargs={"child": child})
    process.start()
    assert mine.poll(60)
    run_id, sleeper = mine.recv()
    return run_id, process, sleeper


@pytest.mark.parametrize("how", ["reap", "resume"])
def test_a_killed_run_is_over_at_once(path: Path, store: Store, how: str) -> None:
    run_id, process, _ = begun(path)
    assert store.reap() == []
    with pytest.raises(StoreError, match="is still running"):
        store.resume_run(run_id)
    process.kill()
    process.join()
    if how == "reap":
        assert store.reap() == [run_id]
        assert [one.state for one in store.trials(run_id)].count(TrialState.CRASHED) == 1
        assert not (path.parent / f"{path.name}.runs" / run_id).exists()
    run = store.resume_run(run_id)
    assert [trial.state for trial in store.trials(run_id)] == [TrialState.CRASHED]
    assert [one.kind for one in store.decisions(run_id)] == ["crash"]
    with open_store(str(path)) as other:
        assert other.reap() == []
        with pytest.raises(StoreError, match="is still running"):
            other.resume_run(run_id)
    store.finish_run(run)
    assert list((path.parent / f"{path.name}.runs").iterdir()) == []


def test_a_run_that_this_store_holds_is_not_taken_over(path: Path, store: Store) -> None:
    run = store.begin_run(KEY, MODEL, HARDWARE, knobs=KNOBS)
    with pytest.raises(StoreError, match="is still running"):
        store.resume_run(run.run_id)
    with open_store(str(path)) as other:
        assert other.reap() == []  # it did not lose its lock
        with pytest.raises(StoreError, match="is still running"):
            other.resume_run(run.run_id)
    rows.add_trial(store, run, KNOBS, source="search")


def test_of_many_threads_that_want_a_dead_run_one_gets_it(path: Path, store: Store) -> None:
    dead = store.begin_run(KEY, MODEL, HARDWARE, knobs=KNOBS)
    store._living.close()  # as with a process that is killed
    at_once, taken, refused = threading.Barrier(8, timeout=60), [], []

    def take() -> None:
        at_once.wait()
        try:
            taken.append(store.resume_run(dead.run_id))
        except StoreError as error:
            refused.append(str(error))

    threads = [threading.Thread(target=take) for _ in range(8)]
    for one in threads:
        one.start()
    for one in threads:
        one.join()
    (run,) = taken
    assert refused == [f"run '{dead.run_id}' is still running: wait until it has ended"] * 7
    with open_store(str(path)) as other:
        assert other.reap() == []
    rows.add_trial(store, run, KNOBS, source="search")


def test_a_forked_child_does_not_keep_its_parents_run_alive(path: Path, store: Store) -> None:
    run_id, process, sleeper = begun(path, child=True)
    assert sleeper is not None
    process.kill()
    reaped, until = store.reap(), time.monotonic() + 60
    try:
        while not reaped and time.monotonic() < until:
            reaped = store.reap()
        assert reaped == [run_id]  # the child still sleeps
    finally:
        os.kill(sleeper, signal.SIGKILL)
    process.join()


def test_where_no_lock_can_be_had_the_lease_decides(path: Path, store: Store, clock: Clock) -> None:
    folder = path.parent / f"{path.name}.runs"
    folder.write_text("in the way")
    run = store.begin_run(KEY, MODEL, HARDWARE, knobs=KNOBS)
    with open_store(str(path), clock=clock) as other:
        assert other.reap() == []
        clock.now += LEASE_S + 1
        assert other.reap() == [run.run_id]
