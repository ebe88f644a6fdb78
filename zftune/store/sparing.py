"""Trials that were in flight and did not crash."""

from __future__ import annotations

from sqlalchemy import delete, func, select
from sqlalchemy.orm import Session

from zftune.store.tables import DecisionRow, MeasurementRow, TrialRow
from zftune.store.types import TrialState


def was_measured(session: Session, trial_id: int) -> bool:
    """Whether a trial has a measurement that counts."""
    valid = (MeasurementRow.trial_id == trial_id, MeasurementRow.void_reason.is_(None))
    return session.scalar(select(func.count()).where(*valid)) != 0


def spare(session: Session, run_id: str, number: int, *, crash: str, void: str) -> None:
    """A trial of a training that lives did not crash, also where it was taken for dead.

    Args:
        session: of the transaction.
        run_id: of the run.
        number: of the trial in it.
        crash: the reason that was written where it was taken for dead.
        void: the reason that is written in its place.
    """
    row = session.scalar(select(TrialRow).where(TrialRow.run_id == run_id, TrialRow.number == number))
    if row is None or row.state not in (TrialState.IN_FLIGHT, TrialState.CRASHED):
        return
    if row.state is TrialState.CRASHED and row.reason != crash:
        return
    measured = was_measured(session, row.trial_id)
    row.state, row.reason = TrialState.MEASURED if measured else TrialState.VOID, None if measured else void
    taken_back = (DecisionRow.trial_id == row.trial_id, DecisionRow.kind == "crash", DecisionRow.reason == crash)
    session.execute(delete(DecisionRow).where(*taken_back))
