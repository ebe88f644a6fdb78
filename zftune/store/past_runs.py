"""The runs of a store as they were written down, and how settings are cleared of crashes that were none of theirs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from sqlalchemy import and_, delete, func, or_, select
from sqlalchemy.orm import Session

from zftune.store.account import Account, beat_of, died, trains
from zftune.store.locks import RunLocks
from zftune.store.opening import Database
from zftune.store.tables import (
    CurveRow,
    DecisionRow,
    MeasurementRow,
    RunRow,
    TrialRow,
    account_of,
    curve_of,
    decision_of,
    measurement_of,
    run_of,
    trial_of,
)
from zftune.store.types import (
    Barred,
    Curve,
    Decision,
    Key,
    Measurement,
    RunRecord,
    RunState,
    TrialRecord,
    TrialState,
)


def was_measured(session: Session, trial_id: int) -> bool:
    """Whether a trial has a measurement that counts."""
    valid = (MeasurementRow.trial_id == trial_id, MeasurementRow.void_reason.is_(None))
    return session.scalar(select(func.count()).where(*valid)) != 0


TAKEN_FOR_DEAD = "taken_for_dead"
"""In the details of a crash that was not measured: its run ended without goodbye while the setting was in flight.

And in those of a remark: the setting had been measured to its end before, and one such death is no crash."""


def survivors(session: Session, run_id: str) -> list[TrialRow]:
    """Trials in flight that one death is no crash of: their setting was measured to its end, and did not die before.

    Args:
        session: of the transaction.
        run_id: of a run that ended without goodbye.
    """
    trials = session.scalars(select(TrialRow).where(TrialRow.run_id == run_id).order_by(TrialRow.number)).all()
    valid = select(MeasurementRow.trial_id).join(TrialRow).where(TrialRow.run_id == run_id)
    measured = set(session.scalars(valid.where(MeasurementRow.void_reason.is_(None))))
    remarks = select(DecisionRow.trial_id).where(DecisionRow.run_id == run_id, DecisionRow.kind == "remark")
    died = set(session.scalars(remarks.where(DecisionRow.details[TAKEN_FOR_DEAD].as_boolean())))
    proven, doubted = ([one.knobs for one in trials if one.trial_id in those] for those in (measured, died))
    flying = (one for one in trials if one.state is TrialState.IN_FLIGHT)
    return [one for one in flying if one.knobs in proven and one.knobs not in doubted]


def spare(session: Session, run_id: str, *, void: str) -> None:
    """No trial of a training that lives crashed, also where it was taken for dead since the run was gone on with last.

    Args:
        session: of the transaction.
        run_id: of the run.
        void: the reason that is written where one was not measured.
    """
    of_it = (DecisionRow.trial_id == TrialRow.trial_id, DecisionRow.kind == "crash")
    presumed = select(DecisionRow.decision_id).where(*of_it, DecisionRow.details[TAKEN_FOR_DEAD].as_boolean()).exists()
    # A run that is gone on with tells its search of a crash, as a measurement: that one was a training which died.
    told = (MeasurementRow.trial_id == TrialRow.trial_id, MeasurementRow.aggregates["status"].as_string() == "crashed")
    believed = select(MeasurementRow.measurement_id).where(*told).exists()
    dead = and_(TrialRow.state == TrialState.CRASHED, presumed, ~believed)
    resumed = select(func.max(DecisionRow.decision_id)).where(
        DecisionRow.run_id == run_id, DecisionRow.kind == "resume"
    )
    since = DecisionRow.decision_id > func.coalesce(resumed.scalar_subquery(), 0)
    remarks = (DecisionRow.run_id == run_id, DecisionRow.kind == "remark", since)
    for remark in session.scalars(select(DecisionRow).where(*remarks)).all():
        if TAKEN_FOR_DEAD in remark.details:
            session.delete(remark)
    flying = or_(TrialRow.state == TrialState.IN_FLIGHT, dead)
    for row in session.scalars(select(TrialRow).where(TrialRow.run_id == run_id, flying)).all():
        if row.state is TrialState.CRASHED:  # what was decided of it has that one reason
            session.execute(
                delete(DecisionRow).where(DecisionRow.trial_id == row.trial_id, DecisionRow.kind == "crash")
            )
        measured = was_measured(session, row.trial_id)
        row.state, row.reason = TrialState.MEASURED if measured else TrialState.VOID, None if measured else void


class PastRuns:
    """The part of a store that reads runs."""

    _database: Database
    _clock: Callable[[], float]
    _living: RunLocks

    def runs(self) -> list[RunRecord]:
        """All, the newest first.

        Raises:
            StoreError: the store could not be read.
        """
        order = select(RunRow).order_by(RunRow.began_unix_s.desc(), RunRow.run_id)
        return self._database.read(lambda session: [run_of(row) for row in session.scalars(order)])

    def trials(self, run_id: str) -> list[TrialRecord]:
        """Of a run, in order.

        Raises:
            StoreError: the store could not be read.
        """
        order = select(TrialRow).where(TrialRow.run_id == run_id).order_by(TrialRow.number)
        return self._database.read(lambda session: [trial_of(row) for row in session.scalars(order)])

    def measurements(self, trial_id: int) -> list[Measurement]:
        """Of a trial, in order.

        Raises:
            StoreError: the store could not be read.
        """
        order = select(MeasurementRow).where(MeasurementRow.trial_id == trial_id)
        order = order.order_by(MeasurementRow.measurement_id)
        return self._database.read(lambda session: [measurement_of(row) for row in session.scalars(order)])

    def decisions(self, run_id: str) -> list[Decision]:
        """Of a run, in order.

        Raises:
            StoreError: the store could not be read.
        """
        order = (
            select(DecisionRow, TrialRow.number)
            .outerjoin(TrialRow, TrialRow.trial_id == DecisionRow.trial_id)
            .where(DecisionRow.run_id == run_id)
            .order_by(DecisionRow.decision_id)
        )
        return self._database.read(lambda session: [decision_of(*row) for row in session.execute(order)])

    def curve(self, run_id: str) -> Curve:
        """How a run went; empty where nothing was written of that.

        Raises:
            StoreError: the store could not be read.
        """

        def work(session: Session) -> Curve:
            row = session.get(CurveRow, run_id)
            return Curve() if row is None else curve_of(row)

        return self._database.read(work)

    def account(self, run_id: str) -> Account | None:
        """What a run took, spent and gained so far; None: nobody has counted yet.

        Raises:
            StoreError: the store could not be read.
        """

        def work(session: Session) -> Account:
            row = session.get(RunRow, run_id)
            return Account() if row is None else account_of(row)

        found, beat = self._database.read(work), beat_of(self._living, run_id)
        found = found if beat is None else found.taken(beat.process, beat.count)
        return found if found.process else None

    def is_trained(self, run_id: str) -> bool:
        """Whether the process that trains a run is known to live, whether or not somebody tunes it."""
        return trains(self._living, run_id)

    def trained_by(self, run_id: str) -> str | None:
        """The process that trains a run, as it calls itself, where it is known to live; reads no database."""
        beat = beat_of(self._living, run_id)
        return beat.process if beat is not None and self.is_trained(run_id) else None

    def has_died(self, run_id: str) -> bool:
        """Whether the process that trained a run is known to have ended without goodbye, whoever wrote for it."""
        return died(self._living, run_id)

    def heard_of_unix_s(self, run_id: str) -> float | None:
        """When the process that trains a run last wrote something down of itself; None: it is not known."""
        beat = beat_of(self._living, run_id)
        return None if beat is None else beat.at_unix_s

    def lease_left_s(self, run_id: str) -> float:
        """For how many seconds a run still counts as one that runs, whoever wrote to it; 0: a lock tells, or it ended.

        Raises:
            StoreError: the store could not be read.
        """
        if self._living.lives(run_id) is not None:
            return 0.0
        running = (RunRow.run_id == run_id, RunRow.state == RunState.RUNNING)
        until = self._database.read(lambda session: session.scalar(select(RunRow.lease_until_unix_s).where(*running)))
        return 0.0 if until is None else max(0.0, until - self._clock())

    def barred(self, key: Key) -> list[Barred]:
        """Settings not to be tried again for a model on a machine.

        Those that were in flight when a run crashed, and those that somebody has rolled back.

        Raises:
            StoreError: the store could not be read.
        """
        rolled_back = select(DecisionRow.trial_id).where(DecisionRow.kind == "rollback")
        wanted = (
            select(TrialRow.knobs, TrialRow.state)
            .join(RunRow, RunRow.run_id == TrialRow.run_id)
            .where(RunRow.model_id == key.model_id, RunRow.hw_id == key.hw_id, RunRow.backend == key.backend)
            .where(or_(TrialRow.state == TrialState.CRASHED, TrialRow.trial_id.in_(rolled_back)))
            .order_by(TrialRow.trial_id)
        )
        rows = self._database.read(lambda session: list(session.execute(wanted)))
        return [Barred(knobs, "crash" if state is TrialState.CRASHED else "rollback") for knobs, state in rows]

    def unfinished_run(self, key: Key, knobs: Mapping[str, Any], settings: Mapping[str, Any]) -> RunRecord | None:
        """The newest run of a search that measured something, if it ended before the search did.

        Args:
            key: what was trained.
            knobs: what it began with.
            settings: of the search; what a run has beside these may be anything.

        Raises:
            StoreError: the store could not be read.
        """
        for run in self.runs():
            same = all(run.settings.get(name) == value for name, value in settings.items())
            if not same or run.key != key or run.knobs != knobs or run.state is RunState.RUNNING:
                continue
            if self.is_trained(run.run_id):  # its daemon has ended, and the next one takes it up
                continue
            if run.state is RunState.FINISHED:
                return None
            trials = self.trials(run.run_id)
            if any(one.void_reason is None for trial in trials for one in self.measurements(trial.trial_id)):
                guarded = any(one.kind == "guard" for one in self.decisions(run.run_id))
                return None if guarded else run
        return None
