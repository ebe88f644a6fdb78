"""Writes a search into the store while it goes on, and resumes one from there. Training never fails because of it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Literal

from zftune.errors import ZftuneError, noting
from zftune.store.account import Account, Count, Heart
from zftune.store.types import LEASE_S, Decision, DecisionKind, Run, TrialState
from zftune.tuner import messages
from zftune.tuner.curve import CurveBuilder
from zftune.tuner.rows import Followed, lives, measurement_row, rebuild
from zftune.tuner.search import Search
from zftune.tuner.states import AT_S, LEARNING_RATE, OF_INCUMBENT, TRAINED_ON, Outcome, Request, Stopped

if TYPE_CHECKING:
    from pathlib import Path

    from zftune.store.store import Store


PATIENCE_S = 30.0
"""For so long a search waits for a database server that is away; its training does not."""
_MAY_COME_BACK = frozenset((TRAINED_ON, LEARNING_RATE))
"""In the details of remarks that say something new each time."""
_LEASE_SPARE = 3.0  # a measurement takes no longer than so many times what is expected


class StoreRecorder:
    """One run's trials, measurements and decisions."""

    def __init__(self, store: Store, run: Run) -> None:
        self.notices: list[str] = []
        """Sentences: why nothing more is written."""
        self.curve = CurveBuilder()
        """How the training goes; written with what is measured."""
        self._store, self._run = store, run
        self._hurried = threading.Event()
        self._curve_version = 0
        self._account = store.account(run.run_id) or Account()
        self._process = ""
        self._counted: Callable[[], Count] = Count
        self._heart: Heart | None = None
        """Says beside the rows what this process counts; None: it does not train, or does not yet."""
        self._cost = (0.0, 0.0)
        """What the search had spent, and in how long, before what it is told next."""
        self._stopped: str | None = None
        """Why the search had ended when it asked last; None: it had not."""
        self._ids: list[int] = []
        self._outcomes = 0
        self._notes = 0
        self._remarks: set[str] = set()
        """That were written down: one that comes back, as in each life of a run, says nothing new."""
        self.life = 0
        """How often the run was resumed before, as far as something was measured then."""
        self._lease_until = time.monotonic() + LEASE_S
        self._runs = False
        """Whether a challenger was written down as in flight, and nothing was heard of it."""

    @property
    def run_id(self) -> str:
        """Of its run."""
        return self._run.run_id

    @property
    def database(self) -> Path | None:
        """The file in which the run is; None: a server's, or none that lasts."""
        return self._store.path

    @property
    def is_kept(self) -> bool:
        """Whether what is written outlives this process."""
        return self._store.is_kept

    @property
    def account(self) -> Account:
        """What the run took, spent and gained, by now."""
        if self._process:
            self._account = self._account.taken(self._process, self._counted())
        return self._account

    def follow(self, counted: Callable[[], Count], process: str = "") -> None:
        """Keep the account with every row from now on. `process` names the counting process; "": this one, whose count
        is kept beside the rows as well.
        """
        self._process, self._counted = process or self._run.token, counted
        if not process and self._heart is None:
            self._heart = Heart(self._store.pulse(self._run), counted)

    def resume(self, search: Search, rate: float | None = None, *, is_another: bool = False) -> Followed:
        """Bring a new search to the stored state of this run; its first request is the incumbent.

        `rate` is the highest learning rate of the training that continues. `is_another`: it begins with its first step,
        so its loss curve is its own.

        Raises:
            StoreError: the store could not be read or written.
            ZftuneError: the rows are not those of such a search.
        """
        rows = self._store.trials(self._run.run_id)
        measurements = {row.trial_id: self._store.measurements(row.trial_id) for row in rows}
        decisions = self._store.decisions(self._run.run_id)
        followed = rebuild(search, rows, measurements, decisions)
        self._cost = search.cost.spent_s, search.cost.elapsed_s
        if is_another:
            self._store.save_curve(self._run, self.curve.curve())  # before a resumption could take the other one's up
        else:
            self.curve.join(self._store.curve(self._run.run_id))
        self._ids = [row.trial_id for row in rows]
        self._outcomes = sum(map(len, measurements.values()))
        self.life = lives(measurements) - 1
        for crash in followed.crashes:
            trial = search.book.trials[crash.trial]
            request = Request(trial.setting, "b" if crash.role == "b" else "explore", trial.number, 0, 0)
            self._measured(request, crash.outcome, None)
        self._remarks.update(one.reason for one in decisions if one.kind == "remark")
        self._notes = len(search.notes)
        self.life += 1
        total = self.account.total
        search.cost.catch_up(total.spent_s, total.seconds)
        self._charge(search)
        search.begin_again()
        if rate is not None and total.highest_rate and not total.has_learned_at(rate):
            search.remark(messages.other_rate(rate, total.highest_rate, is_another=is_another), **{LEARNING_RATE: rate})
        self._trials(search)
        self._decisions(search)
        return followed

    def hurry(self) -> None:
        """Wait for no database server any more."""
        self._hurried.set()

    @contextmanager
    def _keeping(self) -> Iterator[None]:
        """Wait for a server that is away; what the store cannot do all the same is a notice, and the end of writing."""
        with noting(self.notices), self._store.patient(PATIENCE_S, self._hurried):
            yield

    def before(self, search: Search, request: Request) -> str | None:
        """Write down new trials, and that a challenger is in flight; why it must not be applied, or None."""
        self._stopped = search.state.reason if isinstance(search.state, Stopped) else None
        if self.notices:
            return None if request.role in OF_INCUMBENT else "The store takes no more: no setting can be tried safely."
        with self._keeping():
            self._trials(search)
            self._hold(search, request)
            if request.role not in OF_INCUMBENT:
                self._tries(request.trial)
                self._store.mark_in_flight(self._run, self._ids[request.trial])
                self._runs = True
        if self.notices and request.role not in OF_INCUMBENT:
            self._tries(None)
            return f"No setting can be tried safely: {self.notices[-1]}"
        return None

    def after(self, search: Search, request: Request, outcome: Outcome) -> None:
        """Write down what came of a request, and what was decided."""
        self._runs = False
        if not self.notices:
            with self._keeping():
                state = search.book.trials[request.trial].state
                self._measured(
                    request, outcome, None if outcome.status == "void" and state is not TrialState.VOID else state
                )
                self._charge(search)
                self._trials(search)
                self._decisions(search)
                self._write_curve()
        self._tries(None)  # not before it is written what came of it

    def _tries(self, trial: int | None) -> None:
        if self._heart is not None:
            self._heart.tries(trial)

    def write(self, search: Search) -> None:
        """Write down what was decided since, and nothing else.

        Raises:
            ZftuneError: it could not be written.
        """
        if self.notices:
            raise ZftuneError(self.notices[-1].rstrip("."))
        self._trials(search)
        self._decisions(search)

    def command(self, kind: Literal["pause", "unpause"], by: str) -> None:
        """Record a command that does not concern the search. May be called from any thread.

        Raises:
            ZftuneError: it could not be written.
        """
        if self.notices:
            raise ZftuneError(self.notices[-1].rstrip("."))
        self._decided(Decision(kind, messages.commanded(kind, {"by": by}), details={"by": by}))

    def last(self, kind: DecisionKind) -> Decision | None:
        """The last decision of a kind, as it was written down; None: there is none.

        Raises:
            StoreError: the store could not be read.
        """
        decisions = reversed(self._store.decisions(self.run_id))
        return next((one for one in decisions if one.kind == kind), None)

    def put_away(self, trial: int) -> None:
        """Record that a trial which was in flight no longer runs."""
        if self.notices or trial >= len(self._ids):
            return
        with noting(self.notices):
            self._store.mark_planned(self._run, self._ids[trial])

    def renew(self, lease_s: float) -> None:
        """Extend the run's lease by `lease_s`.

        Raises:
            ZftuneError: it could not be written.
        """
        self._store.renew_lease(self._run, lease_s, self._kept)
        self._write_curve()

    def lose(self) -> None:
        """The training was not heard of any more: what was in flight is marked crashed, unless it was survived."""
        self._end(self._store.lose_run if self._runs else self._store.interrupt_run)

    def interrupt(self) -> None:
        """End the run before its search was over, with what has been written down."""
        self._end(self._store.interrupt_run)

    def finish(self, search: Search, *, unfinished: bool = False) -> None:
        """Close the run; `unfinished`: the search was not over, so it can be resumed."""
        if not self.notices:
            with noting(self.notices):
                self._trials(search)
                self._decisions(search)
                self._write_curve()
            if self.notices:
                self._tries(None)
                return  # nor would it be closed now
        self._end(self._store.interrupt_run if unfinished or self.notices else self._store.finish_run)

    def _end(self, end: Callable[[Run, Account | None], None]) -> None:
        """Also where the store took no more: it may again, and what is in flight would be taken for a crash."""
        self._tries(None)  # where the rows take no more, this is what is known
        is_written = False
        try:
            end(self._run, self._kept)
            is_written = True
        except ZftuneError as error:
            if not self.notices:
                self.notices.append(f"{error}.")
        if self._heart is not None:
            self._heart.end(remove=is_written)

    def _write_curve(self) -> None:
        version = self.curve.version
        if version != self._curve_version:
            self._store.save_curve(self._run, self.curve.curve())
            self._curve_version = version

    def _hold(self, search: Search, request: Request) -> None:
        """Keep the lease until well after what is asked for will be measured."""
        step_ms = max(search.book.incumbent_step_ms, search.book.forecast(request.setting).step_ms)
        until = time.monotonic() + _LEASE_SPARE * (request.discard + request.steps) * step_ms / 1e3
        if self._lease_until - until < LEASE_S / 2:
            lease_s = until - time.monotonic() + LEASE_S
            self._store.renew_lease(self._run, lease_s, self._kept)
            self._lease_until = time.monotonic() + lease_s

    def _charge(self, search: Search) -> None:
        """Let the search go by the account; what it was told of last may not be in there yet."""
        account = self._kept
        if account is not None and self._process:
            search.cost.elapsed_s = account.total.seconds
        self._cost = search.cost.spent_s, search.cost.elapsed_s

    def _trials(self, search: Search) -> None:
        for trial in search.book.trials[len(self._ids) :]:
            row = self._store.add_trial(
                self._run,
                trial.setting.knobs(),
                source=trial.source,
                predicted_step_ms=trial.forecast.step_ms if trial.forecast is not None else None,
                constraint=trial.constraint,
                rejected=trial.reason if trial.state is TrialState.REJECTED else None,
            )
            if row.number != trial.number:
                raise ZftuneError(f"trial {trial.number} became row {row.number}: another process writes to this run")
            self._ids.append(row.trial_id)

    def _measured(self, request: Request, outcome: Outcome, state: TrialState | None) -> None:
        began_unix_s = time.time() - outcome.seconds
        account = self._kept
        row = measurement_row(
            request, outcome, self._outcomes, began_unix_s=began_unix_s, life=self.life,
            cost=self._cost, at_s=None if account is None else account.total.seconds,
            stopped=self._stopped if request.role == "hold" else None, trials=len(self._ids),
        )  # fmt: skip
        self._store.add_measurement(self._run, self._ids[request.trial], row, state=state, account=account)
        self._outcomes += 1

    def _decisions(self, search: Search) -> None:
        for note in search.notes[self._notes :]:
            if note.kind != "remark" or note.reason not in self._remarks or not _MAY_COME_BACK.isdisjoint(note.details):
                self._decided(note)
            if note.kind == "remark":
                self._remarks.add(note.reason)
            self._notes += 1

    def _decided(self, decision: Decision) -> None:
        account = self._kept
        if account is not None:
            total, at_s = account.total, decision.details.get(AT_S)
            known = {"elapsed_s": total.seconds, "spent_s": total.spent_s}
            if at_s is not None:  # of this process, written down later
                known = {"elapsed_s": min(total.seconds, account.before.seconds + at_s)}
            rounded = {name: round(value, 3) for name, value in known.items()}
            decision = replace(decision, details={**decision.details, **rounded})
        step = self.curve.last_step if decision.step is None else decision.step
        self._store.add_decision(self._run, replace(decision, step=step), account=account)

    @property
    def _kept(self) -> Account | None:
        """The account, where somebody counts."""
        account = self.account
        return account if account.process else None
