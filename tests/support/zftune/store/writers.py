"""What the processes of the process tests do with a store."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from itertools import count
from pathlib import Path

from tests.support.zftune.store import rows
from tests.support.zftune.store.examples import HARDWARE, KEY, KNOBS, MODEL, measurement, other
from zftune.store import open_store
from zftune.store.types import Decision, TrialState

TRIALS = 12


def tune(path: str, number: int, begin: str) -> None:
    """Tune a model of its own: two presets, a run with trials, and a decision for each."""
    while not Path(begin).exists():
        os.sched_yield()
    model_id = f"{number:016x}"
    key, model = replace(KEY, model_id=model_id), replace(MODEL, model_id=model_id)
    with open_store(path) as store:
        assert store.notices == []
        run = store.begin_run(key, model, HARDWARE, knobs=KNOBS)
        for value in range(TRIALS):
            trial = rows.add_trial(store, run, {**KNOBS, "update_interval": value + 1}, source="search")
            rows.mark_in_flight(store, run, trial.trial_id)
            rows.add_measurement(store, run, trial.trial_id, measurement(700.0 + value), state=TrialState.MEASURED)
            rows.add_decision(store, run, Decision(kind="keep", details={"text": "not faster"}, trial=trial.number))
        for _ in range(2):
            store.save_preset(other(model_id=model_id))
        store.finish_run(run)


def search(path: str, acknowledged: str) -> None:
    """Search until killed; each line of `acknowledged` is written after the store has said that it is kept."""
    log = os.open(acknowledged, os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def acknowledge(what: str, value: str | int) -> None:
        os.write(log, (json.dumps([what, value]) + "\n").encode())

    with open_store(path) as store:
        if store.notices:
            acknowledge("notice", store.notices[0])
        run = store.begin_run(KEY, MODEL, HARDWARE, knobs=KNOBS, lease_s=1.0)
        acknowledge("run", run.run_id)
        for window in count(1):
            trial = rows.add_trial(store, run, {**KNOBS, "update_interval": window}, source="search")
            acknowledge("trial", trial.trial_id)
            rows.mark_in_flight(store, run, trial.trial_id)
            acknowledge("in_flight", trial.trial_id)
            rows.add_measurement(store, run, trial.trial_id, measurement(), state=TrialState.MEASURED)
            acknowledge("measured", trial.trial_id)
            rows.add_decision(store, run, Decision(kind="keep", details={"text": "not faster"}, trial=trial.number))
            acknowledge("decision", trial.trial_id)
