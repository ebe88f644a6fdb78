"""Rows of a run, one at a time: what a search writes in one transaction with its state."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from zftune.store.account import Account
from zftune.store.store import Store
from zftune.store.types import Decision, Measurement, NewTrial, Progress, Run, TrialRecord, TrialState


def add_trial(store: Store, run: Run, knobs: Mapping[str, Any], *, source: str, **more: Any) -> TrialRecord:
    (made,) = store.record(run, Progress(trials=(NewTrial(knobs=knobs, source=source, **more),)))
    return made


def mark_in_flight(store: Store, run: Run, trial_id: int) -> None:
    store.record(run, Progress(states={_number(store, run, trial_id): (TrialState.IN_FLIGHT, None)}))


def add_measurement(
    store: Store,
    run: Run,
    trial_id: int,
    measurement: Measurement,
    *,
    state: TrialState | None = None,
    account: Account | None = None,
) -> None:
    number = _number(store, run, trial_id)
    states = {} if state is None else {number: (state, None)}
    store.record(run, Progress(measured=(number, measurement), states=states), account)


def add_decision(store: Store, run: Run, decision: Decision, *, account: Account | None = None) -> None:
    store.record(run, Progress(decisions=(decision,)), account)


def _number(store: Store, run: Run, trial_id: int) -> int:
    return next(one.number for one in store.trials(run.run_id) if one.trial_id == trial_id)
