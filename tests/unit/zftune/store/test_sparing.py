"""Trials in flight that are no crash, and runs that are closed for others."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from zftune.errors import StoreError
from zftune.store import open_store
from zftune.store.store import Store
from zftune.store.types import Barred, Decision, Hardware, Key, Measurement, Model, Run, RunState, TrialState

KEY = Key(
    model_id="a" * 16, hw_id="b" * 16, backend="zenflow", stage=0, dtype="bfloat16", world_size=1, micro_batch=1,
    sequence=64, checkpointing=False, quality="published",
)  # fmt: skip
MEASURED = Measurement(role="explore", steps=20, step_ms=1.0, token_us=1.0, began_unix_s=1.0)


@pytest.fixture
def store(url: str) -> Iterator[Store]:
    with open_store(url) as store:
        yield store


def begun(store: Store, *, measured: bool = False) -> tuple[Run, int]:
    """A run with one trial in flight."""
    run = store.begin_run(KEY, Model(model_id=KEY.model_id), Hardware(hw_id=KEY.hw_id), knobs={})
    trial = store.add_trial(run, {"topk_ratio": 0.2}, source="search")
    if measured:
        store.add_measurement(run, trial.trial_id, MEASURED, state=TrialState.MEASURED)
    store.mark_in_flight(run, trial.trial_id)
    return run, trial.trial_id


def state(store: Store, run: Run) -> TrialState:
    return store.trials(run.run_id)[0].state


@pytest.mark.parametrize("measured", [False, True])
def test_what_does_not_run_any_more_is_no_crash(store: Store, *, measured: bool) -> None:
    run, trial = begun(store, measured=measured)
    store.mark_planned(run, trial)
    assert state(store, run) is (TrialState.MEASURED if measured else TrialState.PLANNED)
    store.mark_planned(run, trial)
    store.lose_run(run)
    assert state(store, run) is (TrialState.MEASURED if measured else TrialState.VOID)


def test_a_run_that_is_lost_leaves_a_crash_behind(store: Store) -> None:
    run, _ = begun(store)
    store.lose_run(run)
    assert state(store, run) is TrialState.CRASHED
    assert store.runs()[0].state is RunState.LOST
    assert store.barred(KEY) == [Barred({"topk_ratio": 0.2}, "crash")]
    with pytest.raises(StoreError, match="takes no more"):
        store.renew_lease(run)


def died(store: Store, run: Run) -> Run:
    """The next life of a run whose training was killed."""
    store.lose_run(run)
    return store.resume_run(run.run_id)


@pytest.mark.parametrize("again", [False, True])
def test_a_setting_that_was_measured_to_its_end_does_not_crash_by_one_death(store: Store, *, again: bool) -> None:
    """Also where it is tried again under another number, as after the search began again."""
    run, trial = begun(store, measured=True)
    run = died(store, run)
    assert state(store, run) is TrialState.MEASURED
    (remark,) = store.decisions(run.run_id)
    assert (remark.kind, remark.trial) == ("remark", 0)
    assert "no crash of it, unless it happens once more" in remark.reason
    if again:
        trial = store.add_trial(run, {"topk_ratio": 0.2}, source="search").trial_id
    store.mark_in_flight(run, trial)
    run = died(store, run)
    assert store.trials(run.run_id)[-1].state is TrialState.CRASHED
    assert store.barred(KEY) == [Barred({"topk_ratio": 0.2}, "crash")]


@pytest.mark.parametrize("measured", [False, True])
@pytest.mark.parametrize("reaped", [False, True])
@pytest.mark.parametrize("url", ["file"], indirect=True)  # a server has no locks that tell
def test_a_trial_of_a_training_that_lives_is_spared(url: str, store: Store, *, reaped: bool, measured: bool) -> None:
    with open_store(url) as other:
        run, _ = begun(other, measured=measured)
        with pytest.raises(StoreError, match="is still running"):
            store.spare_trials(run.run_id)
    if reaped:
        store.reap()
        assert state(store, run) is (TrialState.MEASURED if measured else TrialState.CRASHED)
    store.spare_trials("0" * 32)  # there is none such
    store.spare_trials(run.run_id)
    assert state(store, run) is (TrialState.MEASURED if measured else TrialState.VOID)
    assert store.barred(KEY) == []
    assert store.decisions(run.run_id) == []
    store.resume_run(run.run_id)
    assert state(store, run) is (TrialState.MEASURED if measured else TrialState.VOID)


def test_what_was_rolled_back_is_not_tried_again(store: Store) -> None:
    run, trial = begun(store, measured=True)
    store.add_decision(run, Decision(kind="adopt", reason="fast", trial=0))
    store.mark_planned(run, trial)
    assert store.barred(KEY) == []
    store.add_decision(run, Decision(kind="rollback", reason="not wanted", trial=0))
    assert store.barred(KEY) == [Barred({"topk_ratio": 0.2}, "rollback")]
