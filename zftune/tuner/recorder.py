"""Writes a search into the store while it goes on, and resumes one from there. Training never fails because of it."""

from __future__ import annotations

import functools
import math
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Literal

from zftune.errors import ZftuneError, noting
from zftune.store.account import Account, Count, Heart
from zftune.store.types import LEASE_S, Decision, DecisionKind, Measurement, NewTrial, Progress, Run, TrialState
from zftune.tuner import messages
from zftune.tuner.blocks import block_value
from zftune.tuner.curve import CurveBuilder
from zftune.tuner.search import Search
from zftune.tuner.states import AT_S, LEARNING_RATE, OF_INCUMBENT, TRAINED_ON, Outcome, Request, SearchState, Trial

if TYPE_CHECKING:
    from pathlib import Path

    from pydantic import TypeAdapter

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
        self._ids: list[int] = []
        self._states: dict[int, TrialState] = {}
        """Of trials, as they are written down."""
        self._outcomes = 0
        self._notes = 0
        self.earlier_notes = 0
        """How many of the search's decisions are of earlier lives of the run."""
        self._remarks: set[str] = set()
        """That were written down: one that comes back, as in each life of a run, says nothing new."""
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

    def resume(self, search: Search, rate: float | None = None, *, is_another: bool = False) -> None:
        """Bring a new search to the stored state of this run; its first request is the incumbent.

        `rate` is the highest learning rate of the training that continues. `is_another`: it begins with its first step,
        so its loss curve is its own.

        Raises:
            StoreError: the store could not be read or written.
            ZftuneError: the state is not that of such a search.
        """
        rows, found = self._store.trials(self._run.run_id), self._store.search_state(self._run.run_id)
        if found is not None:
            try:
                state = state_adapter().validate_python(found)
            except ValueError as error:
                raise ZftuneError(f"what its search knew cannot be read ({str(error).splitlines()[0]})") from error
            search.restore(state, self._store.decisions(self._run.run_id))
        if is_another:
            self._store.save_curve(self._run, self.curve.curve())  # before a resumption could take the other one's up
        else:
            self.curve.join(self._store.curve(self._run.run_id))
        self._ids = [row.trial_id for row in rows]
        self._states = {row.number: row.state for row in rows}
        self._outcomes = sum(len(self._store.measurements(row.trial_id)) for row in rows)
        self._notes = self.earlier_notes = len(search.notes)
        self._remarks.update(one.reason for one in search.notes if one.kind == "remark")
        for row in rows[: len(search.book.trials)]:
            trial = search.book.trials[row.number]
            if row.state is TrialState.CRASHED and trial.state is not TrialState.CRASHED:
                search.book.crash(trial, row.reason or "")
        total = self.account.total
        search.cost.catch_up(total.spent_s, total.seconds)
        search.begin_again()
        for row, trial in zip(rows, search.book.trials, strict=False):
            if row.state is TrialState.VOID and trial.state is TrialState.VOID:
                trial.reason = row.reason or trial.reason
        if rate is not None and total.highest_rate and not total.has_learned_at(rate):
            search.remark(messages.other_rate(rate, total.highest_rate, is_another=is_another), **{LEARNING_RATE: rate})
        self._record(search)

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
        challenges = request.role not in OF_INCUMBENT
        if self.notices:
            return "The store takes no more: no setting can be tried safely." if challenges else None
        with self._keeping():
            self._hold(search, request)
            if challenges:
                self._tries(request.trial)
                self._record(search, in_flight=request.trial)
                self._runs = True
            elif self._is_behind(search):
                self._record(search)
        if self.notices and challenges:
            self._tries(None)
            return f"No setting can be tried safely: {self.notices[-1]}"
        return None

    def after(self, search: Search, request: Request, outcome: Outcome) -> None:
        """Write down what came of a request, what was decided, and what the search knows now."""
        self._runs = False
        if not self.notices:
            with self._keeping():
                account = self._kept
                if account is not None and self._process:
                    search.cost.elapsed_s = max(search.cost.elapsed_s, account.total.seconds)
                self._record(search, measured=None if request.role == "hold" else (request, outcome))
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
        self._record(search)

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
                self._record(search)
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

    def _is_behind(self, search: Search) -> bool:
        return len(search.book.trials) > len(self._ids) or len(search.notes) > self._notes

    def _record(
        self, search: Search, measured: tuple[Request, Outcome] | None = None, in_flight: int | None = None
    ) -> None:
        """Write all that is new in one transaction."""
        account, trials = self._kept, search.book.trials
        states: dict[int, tuple[TrialState, str | None]] = {
            one.number: (one.state, one.reason or None)
            for one in trials
            if self._states.get(one.number, TrialState.PLANNED) is not one.state
            and one.state is not TrialState.REJECTED
        }
        if in_flight is not None:
            states[in_flight] = (TrialState.IN_FLIGHT, None)
        progress = Progress(
            trials=tuple(_new(one) for one in trials[len(self._ids) :]),
            states=states,
            measured=None if measured is None else (measured[0].trial, self._row(*measured)),
            decisions=tuple(self._decisions(search)),
            search=state_adapter().dump_python(search.snapshot(), mode="json"),
        )
        made = self._store.record(self._run, progress, account)
        first = len(self._ids)
        if [one.number for one in made] != list(range(first, first + len(made))):
            raise ZftuneError(f"trial {first} became another row: another process writes to this run")
        self._ids += [one.trial_id for one in made]
        self._states |= {one.number: one.state for one in made} | {
            number: state for number, (state, _) in states.items()
        }
        self._notes = len(search.notes)
        self._remarks.update(one.reason for one in progress.decisions if one.kind == "remark")
        self._outcomes += measured is not None

    def _row(self, request: Request, outcome: Outcome) -> Measurement:
        """An outcome as a row of the store."""
        account = self._kept
        known = {
            "device_bytes": outcome.device_bytes, "host_bytes": outcome.host_bytes,
            "ranks_ms": list(outcome.ranks_ms) or None, "movement_percent": outcome.movement_percent,
            "movement_rate": outcome.movement_rate, "at_s": None if account is None else account.total.seconds,
            "taken_ms": list(outcome.taken_ms) or None,
        }  # fmt: skip
        step_ms = math.exp(block_value(outcome.steps_ms, outcome.moves)) if outcome.steps_ms else 0.0
        return Measurement(
            role=request.role,
            steps=len(outcome.steps_ms),
            step_ms=step_ms,
            token_us=1e3 * step_ms / outcome.tokens,
            mad_us=None,
            began_unix_s=time.time() - outcome.seconds,
            void_reason=None if outcome.status == "measured" else outcome.reason or outcome.status,
            steps_ms=outcome.steps_ms,
            aggregates={
                "sequence": self._outcomes,
                "status": outcome.status,
                "discarded_ms": list(outcome.discarded_ms),
                "tokens": outcome.tokens,
                **{name: value for name, value in known.items() if value is not None},
            },
        )

    def _decisions(self, search: Search) -> Iterator[Decision]:
        seen = set(self._remarks)
        for note in search.notes[self._notes :]:
            if note.kind != "remark" or note.reason not in seen or not _MAY_COME_BACK.isdisjoint(note.details):
                yield self._dated(note)
            seen.update([note.reason] if note.kind == "remark" else [])

    def _decided(self, decision: Decision) -> None:
        self._store.add_decision(self._run, self._dated(decision), account=self._kept)

    def _dated(self, decision: Decision) -> Decision:
        """With the account's figures and the step that it was made at."""
        account = self._kept
        if account is not None:
            total, at_s = account.total, decision.details.get(AT_S)
            known = {"elapsed_s": total.seconds, "spent_s": total.spent_s}
            if at_s is not None:  # of this process, written down later
                known = {"elapsed_s": min(total.seconds, account.before.seconds + at_s)}
            rounded = {name: round(value, 3) for name, value in known.items()}
            decision = replace(decision, details={**decision.details, **rounded})
        step = self.curve.last_step if decision.step is None else decision.step
        return replace(decision, step=step)

    @property
    def _kept(self) -> Account | None:
        """The account, where somebody counts."""
        account = self.account
        return account if account.process else None


@functools.cache
def state_adapter() -> TypeAdapter[SearchState]:
    """Makes JSON of what a search knows, and the reverse."""
    from pydantic import TypeAdapter

    return TypeAdapter(SearchState)


def _new(trial: Trial) -> NewTrial:
    return NewTrial(
        knobs=trial.setting.knobs(),
        source=trial.source,
        predicted_step_ms=None if trial.forecast is None else trial.forecast.step_ms,
        constraint=trial.constraint,
        rejected=trial.reason if trial.state is TrialState.REJECTED else None,
    )
