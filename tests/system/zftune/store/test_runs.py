"""Runs, their trials, measurements and decisions; who may write, and what becomes of a run that was killed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from tests.support.zftune.fixtures import Clock
from tests.support.zftune.store import rows
from tests.support.zftune.store.examples import HARDWARE, KEY, KNOBS, MODEL, measurement
from tests.support.zftune.store.servers import emptied
from zftune.errors import StoreError
from zftune.store import open_store
from zftune.store.store import Store
from zftune.store.types import LEASE_S, Barred, Decision, Run, RunState, TrialState

pytestmark = pytest.mark.smoke


@pytest.fixture(params=["memory", "server"])
def store(request: pytest.FixtureRequest, clock: Clock) -> Iterator[Store]:
    """Without a file: only leases tell who lives."""
    url = "sqlite://" if request.param == "memory" else emptied(request.getfixturevalue("server"))
    with open_store(url, clock=clock) as opened:
        opened._database.ahead_s = 0.0
        yield opened


def begun(store: Store, **more: Any) -> Run:
    return store.begin_run(KEY, MODEL, HARDWARE, knobs=KNOBS, **more)


def states(store: Store, run: Run) -> list[TrialState]:
    return [trial.state for trial in store.trials(run.run_id)]


def test_a_search_is_kept_as_it_went(store: Store, clock: Clock) -> None:
    run = begun(store, settings={"seed": 1}, versions={"torch": "2.13.0"}, usable_cores=2.5)
    trial = rows.add_trial(store, run, KNOBS, source="planner", predicted_step_ms=700.0)
    never = rows.add_trial(
        store, run, {**KNOBS, "topk_ratio": 0.9}, source="search", constraint=2e9, rejected="needs 2 GB"
    )
    rows.mark_in_flight(store, run, trial.trial_id)
    assert states(store, run) == [TrialState.IN_FLIGHT, TrialState.REJECTED]
    clock.now += 5
    kept = measurement(790.0, steps_ms=(780.0, 790.0, 800.0), aggregates={"power_w": 300.0})
    rows.add_measurement(store, run, trial.trial_id, kept, state=TrialState.MEASURED)
    rows.add_measurement(store, run, trial.trial_id, measurement(void_reason="throttled"))
    rows.add_decision(store, run, Decision(kind="adopt", details={"text": "it is faster"}, step=40, trial=trial.number))
    store.finish_run(run)

    (record,) = store.runs()
    assert (record.state, record.settings, record.usable_cores) == (RunState.FINISHED, {"seed": 1}, 2.5)
    assert record.key == KEY
    first, second = store.trials(run.run_id)
    assert (first.number, first.state, first.ended_unix_s) == (0, TrialState.MEASURED, clock.now)
    assert (second.number, second.state, second.reason, second.constraint) == (1, never.state, "needs 2 GB", 2e9)
    assert store.measurements(trial.trial_id)[0] == kept
    assert store.measurements(trial.trial_id)[1].void_reason == "throttled"
    assert store.decisions(run.run_id) == [
        Decision(kind="adopt", details={"text": "it is faster"}, step=40, trial=trial.number, at_unix_s=clock.now)
    ]


def test_reaping_closes_what_nobody_renewed(store: Store, clock: Clock) -> None:
    dead, alive = begun(store), begun(store)
    flying, _ = (rows.add_trial(store, dead, {**KNOBS, "update_interval": s}, source="search") for s in (2, 8))
    rows.mark_in_flight(store, dead, flying.trial_id)
    other = rows.add_trial(store, alive, KNOBS, source="search")
    rows.mark_in_flight(store, alive, other.trial_id)
    clock.now += LEASE_S - 1
    assert store.reap() == []
    store.renew_lease(alive)
    clock.now += 2
    assert store.reap() == [dead.run_id]
    assert states(store, dead) == [TrialState.CRASHED, TrialState.VOID]
    assert states(store, alive) == [TrialState.IN_FLIGHT]
    assert [one.kind for one in store.decisions(dead.run_id)] == ["crash"]
    assert {one.run_id: one.state for one in store.runs()} == {
        dead.run_id: RunState.LOST,
        alive.run_id: RunState.RUNNING,
    }
    assert store.reap() == []
    assert store.barred(KEY) == [Barred({**KNOBS, "update_interval": 2}, "crash")]
    assert store.barred(replace(KEY, hw_id="1" * 16)) == []


def test_a_run_that_was_reaped_takes_no_more(store: Store, clock: Clock) -> None:
    run = begun(store)
    trial = rows.add_trial(store, run, KNOBS, source="search")
    clock.now += LEASE_S + 1
    store.renew_lease(run)  # nobody has closed it yet: it is still this process's
    clock.now += LEASE_S + 1
    store.reap()
    for write in (
        lambda: rows.add_trial(store, run, KNOBS, source="search"),
        lambda: rows.mark_in_flight(store, run, trial.trial_id),
        lambda: rows.add_measurement(store, run, trial.trial_id, measurement()),
        lambda: rows.add_decision(store, run, Decision(kind="stop", details={"text": "enough"})),
        lambda: store.renew_lease(run),
        lambda: store.finish_run(run),
    ):
        with pytest.raises(StoreError, match="taken over"):
            write()
    assert states(store, run) == [TrialState.VOID]
    assert store.measurements(trial.trial_id) == []


def test_resuming(store: Store, clock: Clock) -> None:
    before = begun(store)
    trial = rows.add_trial(store, before, KNOBS, source="search")
    rows.mark_in_flight(store, before, trial.trial_id)
    with pytest.raises(StoreError, match="still running"):
        store.resume_run(before.run_id)
    with pytest.raises(StoreError, match="not in the store"):
        store.resume_run("0" * 32)
    clock.now += LEASE_S + 1
    after = store.resume_run(before.run_id)
    assert states(store, after) == [TrialState.CRASHED]
    with pytest.raises(StoreError, match="taken over"):
        rows.add_trial(store, before, KNOBS, source="search")
    assert rows.add_trial(store, after, KNOBS, source="search").number == 1
    store.finish_run(after)
    assert store.runs()[0].state is RunState.FINISHED
    assert rows.add_trial(store, store.resume_run(before.run_id), KNOBS, source="search").number == 2


def test_a_run_is_called_as_its_training_is_once(store: Store) -> None:
    name = "ab" * 16
    first, second, third = begun(store, run_id=name), begun(store, run_id=name), begun(store)
    assert first.run_id == name
    assert len({one.run_id for one in store.runs()} & {first.run_id, second.run_id, third.run_id}) == 3


def test_an_interrupted_run_is_there_to_be_resumed(store: Store) -> None:
    run = begun(store)
    measured, flying, _ = (
        rows.add_trial(store, run, {**KNOBS, "update_interval": s}, source="search") for s in (2, 4, 8)
    )
    rows.add_measurement(store, run, measured.trial_id, measurement(), state=TrialState.MEASURED)
    for trial in (measured, flying):
        rows.mark_in_flight(store, run, trial.trial_id)
    store.interrupt_run(run)
    assert store.runs()[0].state is RunState.LOST
    assert states(store, run) == [TrialState.MEASURED, TrialState.VOID, TrialState.VOID]
    assert store.barred(KEY) == []
    with pytest.raises(StoreError, match="taken over"):
        rows.add_trial(store, run, KNOBS, source="search")
    rows.mark_in_flight(store, store.resume_run(run.run_id), measured.trial_id)


def test_what_is_left_to_be_finished(store: Store, clock: Clock) -> None:
    def ended(how: str, **settings: Any) -> Run:
        clock.now += 1
        run = begun(store, settings={"seed": 1, "budget_steps": clock.now, **settings})
        trial = rows.add_trial(store, run, KNOBS, source="start")
        if how != "unmeasured":
            rows.add_measurement(store, run, trial.trial_id, measurement(), state=TrialState.MEASURED)
        if how == "guarded":
            rows.add_decision(store, run, Decision(kind="guard", details={"text": "the loss is nan"}))
        store.finish_run(run) if how == "finished" else store.interrupt_run(run)
        return run

    def found(**settings: Any) -> str | None:
        record = store.unfinished_run(KEY, KNOBS, {"seed": 1, **settings})
        return None if record is None else record.run_id

    assert found() is None
    first = ended("interrupted")
    assert found() == first.run_id
    assert found(sampler="gp") is None
    assert store.unfinished_run(replace(KEY, sequence=KEY.sequence + 1), KNOBS, {"seed": 1}) is None
    assert store.unfinished_run(KEY, {**KNOBS, "topk_ratio": 0.3}, {"seed": 1}) is None
    begun(store, settings={"seed": 1})  # beside it
    assert found() == first.run_id
    for how in ("finished", "unmeasured", "guarded"):
        ended(how, seed=2, sampler=how)
        assert found(seed=2, sampler=how) is None
    ended("unmeasured")
    assert found() == first.run_id
    ended("finished")
    assert found() is None


def test_a_long_reason_is_cut(store: Store) -> None:
    run = begun(store)
    assert len(rows.add_trial(store, run, KNOBS, source="search", rejected="x" * 5000).reason or "") == 1000


@pytest.mark.parametrize("value", [float("nan"), float("inf"), object()])
def test_what_json_has_no_word_for_is_refused(store: Store, value: Any) -> None:
    run = begun(store)
    with pytest.raises(StoreError, match="could not be written"):
        rows.add_trial(store, run, {**KNOBS, "topk_ratio": value}, source="search")
    assert store.trials(run.run_id) == []
