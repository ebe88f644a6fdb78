"""The runs of a store, with their trials, measurements and decisions.

A run is written to by the one process that holds its lock and its lease (see `zftune.store.locks`). Both end by
themselves; `reap` closes what ended so.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping
from dataclasses import asdict, astuple
from typing import Any

from sqlalchemy import and_, delete, func, or_, select, update
from sqlalchemy.orm import Session

from zftune.errors import StoreError
from zftune.store.account import Account, Beat, Pulse, beat_of, died, runs_with_pulse, trains
from zftune.store.locks import RunLocks
from zftune.store.opening import Database
from zftune.store.presets import save_facts
from zftune.store.tables import (
    REASON_LENGTH,
    CurveRow,
    DecisionRow,
    MeasurementRow,
    RunRow,
    TrialRow,
    account_of,
    curve_of,
    decision_of,
    measurement_of,
    measurement_row,
    run_of,
    trial_of,
)
from zftune.store.types import (
    LEASE_S,
    Barred,
    Curve,
    Decision,
    Hardware,
    Key,
    Measurement,
    Model,
    NewTrial,
    Progress,
    Run,
    RunRecord,
    RunState,
    TrialRecord,
    TrialState,
)

_OPEN = (TrialState.PLANNED, TrialState.IN_FLIGHT)
_CRASH = "the run ended without goodbye while this setting was in flight"
_VOID = "the search was interrupted before this setting was measured"
_RUNNING = "run '{}' is still running: wait until it has ended"


def was_measured(session: Session, trial_id: int) -> bool:
    """Whether a trial has a measurement that counts."""
    valid = (MeasurementRow.trial_id == trial_id, MeasurementRow.void_reason.is_(None))
    return session.scalar(select(func.count()).where(*valid)) != 0


TAKEN_FOR_DEAD = "taken_for_dead"
"""In the details of a crash that was not measured: its run ended without goodbye while the setting was in flight.

And in those of a remark: the setting had been measured to its end before, and one such death is no crash."""


def survivors(session: Session, run_id: str) -> list[TrialRow]:
    """Trials in flight that do not count as crashed: their setting was measured to its end before and never crashed."""
    trials = session.scalars(select(TrialRow).where(TrialRow.run_id == run_id).order_by(TrialRow.number)).all()
    valid = select(MeasurementRow.trial_id).join(TrialRow).where(TrialRow.run_id == run_id)
    measured = set(session.scalars(valid.where(MeasurementRow.void_reason.is_(None))))
    remarks = select(DecisionRow.trial_id).where(DecisionRow.run_id == run_id, DecisionRow.kind == "remark")
    died = set(session.scalars(remarks.where(DecisionRow.details[TAKEN_FOR_DEAD].as_boolean())))
    proven, doubted = ([one.knobs for one in trials if one.trial_id in those] for those in (measured, died))
    flying = (one for one in trials if one.state is TrialState.IN_FLIGHT)
    return [one for one in flying if one.knobs in proven and one.knobs not in doubted]


def spare(session: Session, run_id: str, *, void: str) -> None:
    """Mark no trial of a living training as crashed, even if it was counted as dead since the last resumption.

    `void` is the reason of trials that were not measured.
    """
    resumptions = (DecisionRow.run_id == run_id, DecisionRow.kind == "resume")
    resumed = session.scalar(select(func.max(DecisionRow.decision_id)).where(*resumptions)) or 0
    since = DecisionRow.decision_id > resumed  # before it, a training had died
    of_it = (DecisionRow.trial_id == TrialRow.trial_id, DecisionRow.kind == "crash", since)
    presumed = select(DecisionRow.decision_id).where(*of_it, DecisionRow.details[TAKEN_FOR_DEAD].as_boolean()).exists()
    dead = and_(TrialRow.state == TrialState.CRASHED, presumed)
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


class Runs:
    """The part of a store that keeps runs."""

    _database: Database
    _clock: Callable[[], float]
    _living: RunLocks

    def runs(self) -> list[RunRecord]:
        """All, the newest first."""
        order = select(RunRow).order_by(RunRow.began_unix_s.desc(), RunRow.run_id)
        return self._database.read(lambda session: [run_of(row) for row in session.scalars(order)])

    def run(self, run_id: str) -> RunRecord | None:
        """One of them; None: there is no such run."""

        def work(session: Session) -> RunRecord | None:
            row = session.get(RunRow, run_id)
            return None if row is None else run_of(row)

        return self._database.read(work)

    def trials(self, run_id: str) -> list[TrialRecord]:
        """Of a run, in order."""
        order = select(TrialRow).where(TrialRow.run_id == run_id).order_by(TrialRow.number)
        return self._database.read(lambda session: [trial_of(row) for row in session.scalars(order)])

    def measurements(self, trial_id: int) -> list[Measurement]:
        """Of a trial, in order."""
        order = select(MeasurementRow).where(MeasurementRow.trial_id == trial_id)
        order = order.order_by(MeasurementRow.measurement_id)
        return self._database.read(lambda session: [measurement_of(row) for row in session.scalars(order)])

    def decisions(self, run_id: str) -> list[Decision]:
        """Of a run, in order."""
        order = (
            select(DecisionRow, TrialRow.number)
            .outerjoin(TrialRow, TrialRow.trial_id == DecisionRow.trial_id)
            .where(DecisionRow.run_id == run_id)
            .order_by(DecisionRow.decision_id)
        )
        return self._database.read(lambda session: [decision_of(*row) for row in session.execute(order)])

    def curve(self, run_id: str) -> Curve:
        """How a run went; empty where nothing was written of that."""

        def work(session: Session) -> Curve:
            row = session.get(CurveRow, run_id)
            return Curve() if row is None else curve_of(row)

        return self._database.read(work)

    def account(self, run_id: str) -> Account | None:
        """What a run took, spent and gained so far; None: nobody has counted yet."""

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
        """For how many seconds a run still counts as running, whoever wrote to it; 0: a lock tells, or it ended."""
        if self._living.lives(run_id) is not None:
            return 0.0
        running = (RunRow.run_id == run_id, RunRow.state == RunState.RUNNING)
        until = self._database.read(lambda session: session.scalar(select(RunRow.lease_until_unix_s).where(*running)))
        return 0.0 if until is None else max(0.0, until - self._clock())

    def barred(self, key: Key) -> list[Barred]:
        """Settings not to be tried again for a model on a machine.

        Those that were in flight when a run crashed, and those that somebody has rolled back.
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

        A run may have settings beside `settings`.
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

    def begin_run(
        self,
        key: Key,
        model: Model,
        hardware: Hardware,
        *,
        knobs: Mapping[str, Any],
        settings: Mapping[str, Any] | None = None,
        versions: Mapping[str, str] | None = None,
        usable_cores: float | None = None,
        lease_s: float = LEASE_S,
        elapsed_s: float = 0.0,
        run_id: str | None = None,
    ) -> Run:
        """Add a run.

        It counts as lost after `lease_s` without a renewal where no lock tells. `run_id` has 32 hexadecimal digits;
        None, or if the store has it: random ones. `usable_cores` is by affinity and control group.
        """
        if run_id is None or self._database.read(lambda session: session.get(RunRow, run_id)) is not None:
            run_id = secrets.token_hex(16)
        run = Run(run_id, secrets.token_hex(16))

        def work(session: Session) -> Run:
            now = self._clock()
            save_facts(session, model, hardware, imported=False)
            session.add(
                RunRow(
                    **asdict(key),
                    run_id=run.run_id,
                    token=run.token,
                    state=RunState.RUNNING,
                    knobs=dict(knobs),
                    settings=dict(settings or {}),
                    versions=dict(versions or {}),
                    usable_cores=usable_cores,
                    began_unix_s=now - elapsed_s,
                    lease_until_unix_s=now + lease_s,
                )
            )
            return run

        self._living.hold(run.run_id)  # before anybody knows of it
        try:
            return self._database.write(work)
        except StoreError:
            self._living.release(run.run_id)
            raise

    def renew_lease(self, run: Run, lease_s: float = LEASE_S, account: Account | None = None) -> None:
        """Extend a run's lease by `lease_s`; `account` None: as before."""

        def work(session: Session) -> None:
            _own(session, run, account).lease_until_unix_s = self._clock() + lease_s

        self._database.write(work)

    def pulse(self, run: Run) -> Pulse:
        """Where the process that writes to a run says what it counts, if it trains itself."""
        return Pulse(self._living, run.run_id, run.token)

    def finish_run(self, run: Run, account: Account | None = None) -> None:
        """Close a run: open trials are void. `account` None: as before."""
        self._end_run(run, RunState.FINISHED, TrialState.VOID, account)

    def interrupt_run(self, run: Run, account: Account | None = None) -> None:
        """Say goodbye before the search is over: nothing crashed, and the run is there to be resumed."""
        self._end_run(run, RunState.LOST, TrialState.VOID, account)

    def lose_run(self, run: Run, account: Account | None = None) -> None:
        """Close a run whose training has fallen silent, as `reap` does: what was in flight is marked crashed."""
        self._end_run(run, RunState.LOST, TrialState.CRASHED, account)

    def _end_run(self, run: Run, state: RunState, in_flight: TrialState, account: Account | None) -> None:
        def work(session: Session) -> None:
            row = _own(session, run, account)
            row.state, row.ended_unix_s = state, self._clock()
            self._close_trials(session, run.run_id, in_flight=in_flight)

        self._database.write(work)
        self._living.release(run.run_id)

    def spare_trials(self, run_id: str) -> None:
        """Trials in flight are no crash if the training lives and only its writer has ended.

        They may have been counted as dead already. Raises StoreError: it could not be written, or the run is still
        running.
        """

        def work(session: Session) -> None:
            if self._living.lives(run_id):  # whoever takes it over later writes later
                raise StoreError(_RUNNING.format(run_id))
            spare(session, run_id, void=_VOID)

        self._database.write(work)

    def resume_run(self, run_id: str, lease_s: float = LEASE_S) -> Run:
        """Take over a run that was lost or finished; who held it before can write no more. Raises StoreError: it could
        not be written, there is no such run, or it is still running, here or elsewhere.
        """
        run = Run(run_id, secrets.token_hex(16))
        taken = self._living.take(run_id)
        if taken is None:
            raise StoreError(_RUNNING.format(run_id))

        def work(session: Session) -> Run:
            row, now = session.get(RunRow, run_id, with_for_update=True), self._clock()
            if row is None:
                raise StoreError(f"run '{run_id}' is not in the store")
            if row.state is RunState.RUNNING:
                if not taken.died and row.lease_until_unix_s >= now:
                    raise StoreError(_RUNNING.format(run_id))
                self._close_trials(session, run_id, in_flight=_fate(beat_of(self._living, run_id)))
            self._take_beat(session, run_id)
            row.token, row.state, row.ended_unix_s = run.token, RunState.RUNNING, None
            row.lease_until_unix_s = now + lease_s
            return run

        try:
            return self._database.write(work)
        except StoreError:
            self._living.close(run_id)
            raise

    def record(self, run: Run, progress: Progress, account: Account | None = None) -> list[TrialRecord]:
        """Write down what a search has come to, all of it or nothing; the new trials. It is on the disk then."""

        def work(session: Session) -> list[TrialRecord]:
            row, now = _own(session, run, account), self._clock()
            made = [trial_of(_add_trial(session, run, trial, now)) for trial in progress.trials]
            for number, (state, reason) in progress.states.items():
                trial = _numbered(session, run, number)
                trial.state, trial.reason = state, _cut(reason)
                trial.ended_unix_s = None if state in _OPEN else now
            if progress.measured is not None:
                number, measurement = progress.measured
                session.add(measurement_row(_numbered(session, run, number).trial_id, measurement))
            for decision in progress.decisions:
                _decide(session, run.run_id, decision, now)
            if progress.search is not None:
                row.search = dict(progress.search)
            return made

        return self._database.write(work)

    def search_state(self, run_id: str) -> dict[str, Any] | None:
        """What a run's search knows; None: it has not begun."""
        return self._database.read(lambda session: session.scalar(select(RunRow.search).where(RunRow.run_id == run_id)))

    def save_curve(self, run: Run, curve: Curve) -> None:
        """Keep how a run went so far, in place of what was kept of that."""
        points, changes = [astuple(one) for one in curve.points], [[one.step, dict(one.knobs)] for one in curve.changes]

        def work(session: Session) -> None:
            _own(session, run)
            session.merge(CurveRow(run_id=run.run_id, points=points, changes=changes))

        self._database.write(work)

    def reap(self) -> list[str]:
        """Close the runs whose process has ended, and return them: what was in flight is marked crashed, what was
        planned is void.

        A run that nobody has a lock on has ended; where there are no locks, one whose lease has ended. One whose daemon
        alone has ended goes on; what its training has written down of itself until it ended is taken into its account,
        and nothing crashed where the incumbent ran then. Locks' files of processes that were killed before their run
        was written down, or after its end was, are removed.
        """
        files = self._living.files()  # before it is read who runs: a file is there before its run

        def work(session: Session) -> tuple[list[str], set[str]]:
            now, found, running = self._clock(), [], set()
            for run_id in runs_with_pulse(self._living):
                self._take_beat(session, run_id)
            rows = select(RunRow).where(RunRow.state == RunState.RUNNING).order_by(RunRow.run_id)  # each in one order
            for row in session.scalars(rows.with_for_update()):
                running.add(row.run_id)
                if self._goes_on(row, now):
                    continue
                beat = beat_of(self._living, row.run_id)
                row.state = RunState.LOST
                row.ended_unix_s = min(now, row.lease_until_unix_s if beat is None else beat.at_unix_s)
                self._close_trials(session, row.run_id, in_flight=_fate(beat))
                found.append(row.run_id)
            return found, running

        found, running = self._database.write(work)
        for run_id in {*found} | (files - running):
            self._living.bury(run_id)
        return found

    def _goes_on(self, row: RunRow, now: float) -> bool:
        """Whether the run's process, or the one that trains it, lives."""
        if trains(self._living, row.run_id):
            return True
        lives = self._living.lives(row.run_id)
        return row.lease_until_unix_s >= now if lives is None else lives

    def _take_beat(self, session: Session, run_id: str) -> None:
        """Take what the process that trains a run has counted into its account."""
        row, beat = session.get(RunRow, run_id, with_for_update=True), beat_of(self._living, run_id)
        if row is not None and beat is not None:
            row.account = asdict(account_of(row).taken(beat.process, beat.count))

    def _close_trials(self, session: Session, run_id: str, *, in_flight: TrialState) -> None:
        """End what is open in a run. A setting that was measured before stays so, unless it crashed."""
        now = self._clock()
        session.flush()
        total = account_of(session.get_one(RunRow, run_id)).total
        about = {TAKEN_FOR_DEAD: True, "spent_s": round(total.spent_s, 3), "elapsed_s": round(total.seconds, 3)}
        for one in survivors(session, run_id) if in_flight is TrialState.CRASHED else ():
            measured = was_measured(session, one.trial_id)
            one.state, one.reason = TrialState.MEASURED if measured else TrialState.VOID, None if measured else _VOID
            one.ended_unix_s = now
            _decide(session, run_id, Decision("remark", one.number, {**about, "because": "survived"}), now)
        if in_flight is TrialState.VOID:
            valid = select(MeasurementRow.trial_id).where(MeasurementRow.void_reason.is_(None))
            again = (TrialRow.run_id == run_id, TrialRow.state == TrialState.IN_FLIGHT, TrialRow.trial_id.in_(valid))
            session.execute(update(TrialRow).where(*again).values(state=TrialState.MEASURED, ended_unix_s=now))
        for was, state in ((TrialState.IN_FLIGHT, in_flight), (TrialState.PLANNED, TrialState.VOID)):
            reason = _CRASH if state is TrialState.CRASHED else _VOID
            those = (TrialRow.run_id == run_id, TrialRow.state == was)
            numbers = list(session.scalars(select(TrialRow.number).where(*those).order_by(TrialRow.number)))
            session.execute(update(TrialRow).where(*those).values(state=state, reason=reason, ended_unix_s=now))
            for number in numbers if state is TrialState.CRASHED else ():
                _decide(session, run_id, Decision("crash", number, {**about, "because": "died"}), now)


def _fate(beat: Beat | None) -> TrialState:
    """What became of the setting in flight where a training ended without goodbye, by its last words.

    A daemon may have been killed long before its training was; that went on under the incumbent.
    """
    return TrialState.VOID if beat is not None and beat.trial is None else TrialState.CRASHED


def _own(session: Session, run: Run, account: Account | None = None) -> RunRow:
    row = session.get(RunRow, run.run_id, with_for_update=True)
    if row is None or row.token != run.token or row.state is not RunState.RUNNING:
        raise StoreError(f"run '{run.run_id}' was closed or taken over after its lease had ended: it takes no more")
    if account is not None:
        row.account = asdict(account)
    return row


def _add_trial(session: Session, run: Run, trial: NewTrial, now: float) -> TrialRow:
    last = session.scalar(select(func.max(TrialRow.number)).where(TrialRow.run_id == run.run_id))
    row = TrialRow(
        run_id=run.run_id,
        number=0 if last is None else last + 1,
        knobs=dict(trial.knobs),
        source=trial.source,
        state=TrialState.PLANNED if trial.rejected is None else TrialState.REJECTED,
        reason=_cut(trial.rejected),
        predicted_step_ms=trial.predicted_step_ms,
        constraint=trial.constraint,
        created_unix_s=now,
        ended_unix_s=None if trial.rejected is None else now,
    )
    session.add(row)
    session.flush()
    return row


def _numbered(session: Session, run: Run, number: int) -> TrialRow:
    return session.scalars(select(TrialRow).where(TrialRow.run_id == run.run_id, TrialRow.number == number)).one()


def _decide(session: Session, run_id: str, decision: Decision, now: float) -> None:
    at_unix_s = min(now, decision.at_unix_s or now)
    values = {**asdict(decision), "details": dict(decision.details), "at_unix_s": at_unix_s}
    about = (TrialRow.run_id == run_id, TrialRow.number == values.pop("trial"))
    trial_id = None if decision.trial is None else session.scalars(select(TrialRow.trial_id).where(*about)).one()
    session.add(DecisionRow(run_id=run_id, trial_id=trial_id, **values))


def _cut(reason: str | None) -> str | None:
    return reason if reason is None or len(reason) <= REASON_LENGTH else reason[: REASON_LENGTH - 1] + "…"
