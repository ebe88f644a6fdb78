"""Trials that were in flight and did not crash."""

from __future__ import annotations

from sqlalchemy import and_, delete, func, or_, select
from sqlalchemy.orm import Session

from zftune.store.tables import DecisionRow, MeasurementRow, TrialRow
from zftune.store.types import TrialState


def was_measured(session: Session, trial_id: int) -> bool:
    """Whether a trial has a measurement that counts."""
    valid = (MeasurementRow.trial_id == trial_id, MeasurementRow.void_reason.is_(None))
    return session.scalar(select(func.count()).where(*valid)) != 0


def spare(session: Session, run_id: str, *, crash: str, void: str) -> None:
    """No trial of a training that lives crashed, also where it was taken for dead since the run was gone on with last.

    Args:
        session: of the transaction.
        run_id: of the run.
        crash: the reason that was written where it was taken for dead.
        void: the reason that is written in its place.
    """
    # A run that is gone on with tells its search of a crash, as a measurement: that one was a training which died.
    told = (MeasurementRow.trial_id == TrialRow.trial_id, MeasurementRow.void_reason == crash)
    believed = select(MeasurementRow.measurement_id).where(*told).exists()
    dead = and_(TrialRow.state == TrialState.CRASHED, TrialRow.reason == crash, ~believed)
    flying = or_(TrialRow.state == TrialState.IN_FLIGHT, dead)
    for row in session.scalars(select(TrialRow).where(TrialRow.run_id == run_id, flying)).all():
        measured = was_measured(session, row.trial_id)
        row.state, row.reason = TrialState.MEASURED if measured else TrialState.VOID, None if measured else void
        taken_back = (DecisionRow.trial_id == row.trial_id, DecisionRow.kind == "crash", DecisionRow.reason == crash)
        session.execute(delete(DecisionRow).where(*taken_back))
