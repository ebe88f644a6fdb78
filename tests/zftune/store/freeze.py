"""Writes the frozen database of the newest revision: `python -m tests.zftune.store.freeze`, once for each revision."""

from __future__ import annotations

import sqlite3
from dataclasses import replace
from pathlib import Path

from tests.zftune.store.examples import CURVE, HARDWARE, KEY, KNOBS, MODEL, PRESET, measurement
from zftune.store import open_store
from zftune.store.account import Account, Count
from zftune.store.opening import HEAD
from zftune.store.types import Decision, TrialState, Withdrawal


def freeze(path: Path) -> None:
    """A database with something in every table, and a run whose lease has ended."""
    with open_store(str(path), clock=lambda: 1_700_000_000.0) as store:
        for _ in range(2):
            name = store.save_preset(replace(PRESET, name="frozen")).name
        store.record_comparison(name, won=False)
        store.withdraw_preset(name, Withdrawal("rollback", "by hand"))
        run = store.begin_run(KEY, MODEL, HARDWARE, knobs=KNOBS, settings={"seed": 1}, versions={"torch": "2.13.0"})
        measured = store.add_trial(run, KNOBS, source="planner", predicted_step_ms=700.0)
        store.mark_in_flight(run, measured.trial_id)
        store.add_measurement(run, measured.trial_id, measurement(790.0), state=TrialState.MEASURED)
        store.add_decision(run, Decision(kind="adopt", reason="it is faster", trial=measured.number))
        store.save_curve(run, CURVE)
        flying = store.add_trial(run, {**KNOBS, "update_interval": 8}, source="search")
        store.mark_in_flight(run, flying.trial_id)
        store.renew_lease(run, account=Account().taken("f" * 32, Count(steps=8, seconds=6.5, tokens=128, spent_s=0.5)))
    connection = sqlite3.connect(path)
    connection.execute("PRAGMA journal_mode=DELETE")
    connection.execute("VACUUM")
    connection.close()
    path.with_name(path.name + ".lock").unlink()


if __name__ == "__main__":
    target = Path(__file__).parent / "data" / f"{HEAD}.db"
    if target.exists():
        raise SystemExit(f"{target} is frozen")
    freeze(target)
