"""The runs of a store as they were written down."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from sqlalchemy import or_, select

from zftune.store.engine import Database
from zftune.store.living import Living
from zftune.store.rows import decision_of, measurement_of, run_of, trial_of
from zftune.store.tables import DecisionRow, MeasurementRow, RunRow, TrialRow
from zftune.store.types import Decision, Key, Measurement, RunRecord, RunState, TrialRecord, TrialState


class PastRuns:
    """The part of a store that reads runs."""

    _database: Database
    _clock: Callable[[], float]
    _living: Living

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
        order = select(DecisionRow).where(DecisionRow.run_id == run_id).order_by(DecisionRow.decision_id)
        return self._database.read(lambda session: [decision_of(row) for row in session.scalars(order)])

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

    def crashed_knobs(self, key: Key) -> list[dict[str, Any]]:
        """Settings not to be tried again for a model on a machine.

        Those that were in flight when a run crashed, and those that somebody has rolled back.

        Raises:
            StoreError: the store could not be read.
        """
        barred = select(DecisionRow.trial_id).where(DecisionRow.kind == "rollback")
        wanted = (
            select(TrialRow.knobs)
            .join(RunRow, RunRow.run_id == TrialRow.run_id)
            .where(RunRow.model_id == key.model_id, RunRow.hw_id == key.hw_id, RunRow.backend == key.backend)
            .where(or_(TrialRow.state == TrialState.CRASHED, TrialRow.trial_id.in_(barred)))
            .order_by(TrialRow.trial_id)
        )
        return self._database.read(lambda session: list(session.scalars(wanted)))

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
            if run.state is RunState.FINISHED:
                return None
            trials = self.trials(run.run_id)
            if any(one.void_reason is None for trial in trials for one in self.measurements(trial.trial_id)):
                guarded = any(one.kind == "guard" for one in self.decisions(run.run_id))
                return None if guarded else run
        return None
