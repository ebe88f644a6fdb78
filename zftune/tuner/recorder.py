"""Writes a search into the store while it goes on. Training never fails because of it."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from zftune.errors import ZftuneError
from zftune.store import Decision, Run, TrialState
from zftune.store.runs import LEASE_S
from zftune.tuner.rebuild import Told, lives, measurement_row, rebuild
from zftune.tuner.search import Search
from zftune.tuner.states import OF_INCUMBENT, Outcome, Request

if TYPE_CHECKING:
    from zftune.store.store import Store

_LEASE_SPARE = 3.0  # a measurement takes no longer than so many times what is expected


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
        self._life = 0
        self._lease_until = time.monotonic() + LEASE_S
        self._runs = False
        """Whether a challenger was written down as in flight, and nothing was heard of it."""

    @property
    def run_id(self) -> str:
        """Of its run."""
        return self._run.run_id

    def resume(self, search: Search) -> Sequence[Told]:
        """Bring a new search to where the store says that this run's was; its first request is the incumbent.

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
        self._life = lives(measurements) - 1
        for crash in crashes:
            trial = search.book.trials[crash.trial]
            request = Request(trial.setting, "b" if crash.role == "b" else "explore", trial.number, 0, 0)
            self._measured(request, crash.outcome, None)
        self._commands(search)
        self._notes = len(search.notes)
        self._life += 1
        search.begin_again()
        self._trials(search)
        self._decisions(search)
        return crashes

    def before(self, search: Search, request: Request) -> str | None:
        """Write down new trials, and that a challenger is in flight; why it must not be applied, or None."""
        if self.notices:
            return None if request.role in OF_INCUMBENT else "The store takes no more: no setting can be tried safely."
        try:
            self._trials(search)
            self._hold(search, request)
            if request.role not in OF_INCUMBENT:
                self._store.mark_in_flight(self._run, self._ids[request.trial])
                self._runs = True
        except ZftuneError as error:
            self.notices.append(f"{error}.")
            return None if request.role in OF_INCUMBENT else f"No setting can be tried safely: {error}."
        return None

    def after(self, search: Search, request: Request, outcome: Outcome) -> None:
        """Write down what came of a request, and what was decided."""
        self._runs = False
        if self.notices:
            return
        try:
            state = search.book.trials[request.trial].state
            self._measured(
                request, outcome, None if outcome.status == "void" and state is not TrialState.VOID else state
            )
            self._trials(search)
            self._decisions(search)
        except ZftuneError as error:
            self.notices.append(f"{error}.")

    def write(self, search: Search) -> None:
        """Write down what was decided since, and nothing else.

        Raises:
            ZftuneError: it could not be written.
        """
        if self.notices:
            raise ZftuneError(self.notices[-1].rstrip("."))
        self._trials(search)
        self._decisions(search)

    def command(self, kind: str, reason: str) -> None:
        """Write down what somebody asked for that the search has no part in. May be called from any thread.

        Raises:
            ZftuneError: it could not be written.
        """
        if self.notices:
            raise ZftuneError(self.notices[-1].rstrip("."))
        self._store.add_decision(self._run, Decision(kind=kind, reason=reason))

    def put_away(self, trial: int) -> None:
        """Write down that a trial which was in flight does not run any more.

        Args:
            trial: its number.
        """
        if self.notices or trial >= len(self._ids):
            return
        try:
            self._store.mark_planned(self._run, self._ids[trial])
        except ZftuneError as error:
            self.notices.append(f"{error}.")

    def renew(self, lease_s: float) -> None:
        """Say that the run lives.

        Args:
            lease_s: for so long.

        Raises:
            ZftuneError: it could not be written.
        """
        self._store.renew_lease(self._run, lease_s)

    def lose(self) -> None:
        """The training was not heard of any more: what was in flight is marked crashed, unless it was survived."""
        self._end(self._store.lose_run if self._runs else self._store.interrupt_run)

    def interrupt(self) -> None:
        """End the run before its search was over, with what has been written down."""
        self._end(self._store.interrupt_run)

    def finish(self, search: Search, *, unfinished: bool = False) -> None:
        """Say goodbye.

        Args:
            search: as it ended.
            unfinished: it was not over: the run is there to be resumed.
        """
        if not self.notices:
            try:
                self._trials(search)
                self._decisions(search)
            except ZftuneError as error:
                self.notices.append(f"{error}.")
                return  # nor would it be closed now
        self._end(self._store.interrupt_run if unfinished or self.notices else self._store.finish_run)

    def _end(self, end: Callable[[Run], None]) -> None:
        """Also where the store took no more: it may again, and what is in flight would be taken for a crash."""
        try:
            end(self._run)
        except ZftuneError as error:
            if not self.notices:
                self.notices.append(f"{error}.")

    def _commands(self, search: Search) -> None:
        """What somebody asked for in an earlier life holds on."""
        for one in self._store.decisions(self._run.run_id):
            if one.kind == "rollback" and search.book.adoptions:
                search.roll_back(one.reason)
            elif one.kind == "stop" and one.details.get("final"):
                search.stop(one.reason, final=True)
            elif one.kind == "guard":
                search.guard(one.reason)

    def _hold(self, search: Search, request: Request) -> None:
        """Keep the lease until well after what is asked for will be measured."""
        step_ms = max(search.book.incumbent_step_ms, search.book.forecast(request.setting).step_ms)
        until = time.monotonic() + _LEASE_SPARE * (request.discard + request.steps) * step_ms / 1e3
        if self._lease_until - until < LEASE_S / 2:
            lease_s = until - time.monotonic() + LEASE_S
            self._store.renew_lease(self._run, lease_s)
            self._lease_until = time.monotonic() + lease_s

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
        began_unix_s = time.time() - outcome.seconds
        row = measurement_row(request, outcome, self._outcomes, began_unix_s=began_unix_s, life=self._life)
        self._store.add_measurement(self._run, self._ids[request.trial], row, state=state)
        self._outcomes += 1

    def _decisions(self, search: Search) -> None:
        for note in search.notes[self._notes :]:
            trial_id = None if note.trial is None else self._ids[note.trial]
            self._store.add_decision(
                self._run, Decision(kind=note.kind, reason=note.reason, trial_id=trial_id, details=note.details)
            )
            self._notes += 1
