"""Writes a search into the store while it goes on. Training never fails because of it."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from zftune.errors import ZftuneError
from zftune.store import Decision, Run, StoreError, TrialState
from zftune.tuner.rebuild import Told, measurement_row, rebuild
from zftune.tuner.search import Search
from zftune.tuner.states import OF_INCUMBENT, Outcome, Request

if TYPE_CHECKING:
    from zftune.store.store import Store

_LEASE_EVERY_S = 30.0


class StoreRecorder:
    """One run's trials, measurements and decisions.

    Args:
        store: open.
        run: begun or resumed.
    """

    def __init__(self, store: Store, run: Run) -> None:
        self.notices: list[str] = []
        """Sentences: why nothing more is written."""
        self._store, self._run = store, run
        self._ids: list[int] = []
        self._outcomes = 0
        self._notes = 0
        self._renewed = time.monotonic()

    def resume(self, search: Search) -> Sequence[Told]:
        """Bring a new search to where the store says that this run's was.

        Returns:
            Settings that were in flight when the run ended without goodbye.

        Raises:
            StoreError: the store could not be read or written.
            ZftuneError: the rows are not those of such a search.
        """
        rows = self._store.trials(self._run.run_id)
        measurements = {row.trial_id: self._store.measurements(row.trial_id) for row in rows}
        crashes = rebuild(search, rows, measurements)
        self._ids = [row.trial_id for row in rows]
        self._outcomes = sum(map(len, measurements.values()))
        for crash in crashes:
            trial = search.book.trials[crash.trial]
            request = Request(trial.setting, "b" if crash.role == "b" else "explore", trial.number, 0, 0)
            self._measured(request, crash.outcome, None)
        self._notes = len(search.notes)
        self._store.add_decision(
            self._run, Decision(kind="resume", reason=f"Resumed after {self._outcomes} measurements.")
        )
        return crashes

    def before(self, search: Search, request: Request) -> str | None:
        """Write down new trials, and that a challenger is in flight; why it must not be applied, or None."""
        if self.notices:
            return None if request.role in OF_INCUMBENT else "The store takes no more: no setting can be tried safely."
        try:
            self._trials(search)
            if request.role not in OF_INCUMBENT:
                self._store.mark_in_flight(self._run, self._ids[request.trial])
        except StoreError as error:
            self.notices.append(f"{error}.")
            return None if request.role in OF_INCUMBENT else f"No setting can be tried safely: {error}."
        return None

    def after(self, search: Search, request: Request, outcome: Outcome) -> None:
        """Write down what came of a request, and what was decided."""
        if self.notices:
            return
        try:
            state = search.book.trials[request.trial].state
            self._measured(
                request, outcome, None if outcome.status == "void" and state is not TrialState.VOID else state
            )
            self._trials(search)
            self._decisions(search)
            if time.monotonic() - self._renewed > _LEASE_EVERY_S:
                self._store.renew_lease(self._run)
                self._renewed = time.monotonic()
        except StoreError as error:
            self.notices.append(f"{error}.")

    def finish(self, search: Search) -> None:
        """Say goodbye."""
        if self.notices:
            return
        try:
            self._trials(search)
            self._decisions(search)
            self._store.finish_run(self._run)
        except StoreError as error:
            self.notices.append(f"{error}.")

    def _trials(self, search: Search) -> None:
        for trial in search.book.trials[len(self._ids) :]:
            rejected = trial.reason if trial.state is TrialState.REJECTED else None
            row = self._store.add_trial(
                self._run,
                trial.setting.knobs(),
                source=trial.source,
                predicted_step_ms=None if trial.forecast is None else trial.forecast.step_ms,
                constraint=trial.constraint,
                rejected=rejected,
            )
            if row.number != trial.number:
                raise ZftuneError(f"trial {trial.number} became row {row.number}: another process writes to this run")
            self._ids.append(row.trial_id)

    def _measured(self, request: Request, outcome: Outcome, state: TrialState | None) -> None:
        row = measurement_row(request, outcome, self._outcomes, began_unix_s=time.time() - outcome.seconds)
        self._store.add_measurement(self._run, self._ids[request.trial], row, state=state)
        self._outcomes += 1

    def _decisions(self, search: Search) -> None:
        for note in search.notes[self._notes :]:
            trial_id = None if note.trial is None else self._ids[note.trial]
            self._store.add_decision(
                self._run, Decision(kind=note.kind, reason=note.reason, trial_id=trial_id, details=note.details)
            )
            self._notes += 1
