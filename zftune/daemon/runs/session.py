"""What a brain hears of its run, and what it answers. It never waits for a thought or a write.

`report` is called in the event loop and works in memory only: the search thinks and writes in a thread of its own.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Literal

from zftune.background import Background
from zftune.daemon import PROTOCOL
from zftune.daemon.protocol.messages import Directive, Farewell, Goodbye, Hello, Report, StepFigures
from zftune.daemon.runs import states
from zftune.daemon.runs.search import SearchHandle
from zftune.daemon.runs.states import NotAllowedError, State, farewell, went_wrong
from zftune.errors import noting
from zftune.store.account import Account, Count
from zftune.store.types import Withdrawal
from zftune.tuner.curve import CurveBuilder
from zftune.tuner.record import StoreRecorder
from zftune.tuner.setup import Prepared
from zftune.tuner.space import Setting
from zftune.tuner.states import Outcome

if TYPE_CHECKING:
    from zftune.store.store import Store

_MOST_NOTICES, _KEPT_STEPS, _MOST_SENTENCE = 32, 1024, 2000
_JOIN_S = 5.0
_AGAIN_S = 0.05
_ANSWER_S = 2.0
"""After which a goodbye is answered all the same, so that its agent knows of a daemon at work."""
_PREPARING_S = 4.0
"""That a command waits for the search to be made; its client waits for little longer."""
_logger = logging.getLogger("zftune.daemon")

Disturbance = Callable[[], str | None]


class RunSession:
    """Follows one run from its agent's Hello to its end.

    Args:
        begin: makes the search, in a thread; None where the run has ended meanwhile.
        notices: sentences; `begin` adds to them.
        clock: seconds that only grow.
    """

    def __init__(
        self,
        hello: Hello,
        session: str,
        begin: Callable[[], Prepared | None],
        *,
        notices: list[str],
        clock: Callable[[], float],
        disturbance: Disturbance = lambda: None,
    ) -> None:
        self.hello, self.session = hello, session
        self.store: Store | None = None
        """That the run names, once it is open."""
        self.state: State = states.Warming()
        self.steps: deque[StepFigures] = deque(maxlen=_KEPT_STEPS)
        """The last ones."""
        self.losses: deque[tuple[int, float]] = deque(maxlen=_KEPT_STEPS)
        self.curve = CurveBuilder()
        """How the training goes, from its first step on."""
        self.step = 0
        """The last that is over; figures of it come later."""
        self.dropped = 0
        """Statistics that the agent had no room for."""
        self.knobs: Setting | None = None
        """That hold, by the last change that was reported."""
        self.count = Count()
        """What the process that trains has counted."""
        self.heard_at_s = clock()
        self._clock, self._disturbance = clock, disturbance
        self._notices = notices
        self._prepared: Prepared | None = None
        self._thought: SearchHandle | None = None
        self._applied = self._sequence = 0
        self._stopped = self._over = False
        self._barred: Setting | None = None
        """What was rolled back, until that is written down."""
        self._guarded: str | None = None
        """Why training goes wrong, if it does."""
        self._lock = threading.RLock()
        self._commands = threading.Lock()
        """Who has it may change the search, once nobody thinks, and write."""
        self._leaving = False
        """Whether it is about to end: nothing is begun any more."""
        self._ending: Background[None] | None = None
        self._parting: Background[Farewell] | None = None
        """Writes down what was found, since goodbye was said."""
        self._farewell = Farewell(protocol=PROTOCOL)
        self._lost: str | None = None
        """Why it is being ended without goodbye, if it is: there is no way back, its agent has to say Hello again."""
        self._preparing = Background(lambda: self._prepare(begin), "zftune-brain")

    @property
    def over(self) -> bool:
        """Whether it has ended, and that is written down; it is shown as ended before."""
        return self._over

    @property
    def reason(self) -> str:
        """Of its state."""
        writes = isinstance(self.state, states.Ended) and not self._over
        return self.state.reason + ("; what was found is being written down" if writes else "")

    @property
    def leaves(self) -> bool:
        """Whether it has ended, or is about to: nothing is begun for it any more."""
        return self.over or self._leaving

    @property
    def failed(self) -> bool:
        """Whether its search could not be made."""
        return self._preparing.done and self._preparing.failed

    @property
    def thought(self) -> SearchHandle | None:
        """The search at work; None: it has not begun."""
        return self._thought

    @property
    def _recorder(self) -> StoreRecorder | None:
        """What writes the search down, once there is one; None: nothing does."""
        return None if self._prepared is None else self._prepared.recorder

    @property
    def record(self) -> str | None:
        """The run in the store; None: nothing is written down."""
        return None if self._recorder is None else self._recorder.run_id

    @property
    def account(self) -> Account:
        """What the run took, spent and gained, by what its process has counted."""
        kept = Account() if self._recorder is None else self._recorder.account
        return kept.taken(self.hello.run, self.count)

    @property
    def notices(self) -> tuple[str, ...]:
        """Sentences: what is not as it should be."""
        parts = () if self._prepared is None else (self._prepared.recording, self._prepared.recorder)
        found = [*self._notices, *(sentence for one in parts if one is not None for sentence in one.notices)]
        return tuple(one[:_MOST_SENTENCE] for one in dict.fromkeys(found))[:_MOST_NOTICES]

    # --- in the event loop -------------------------------------------------------------------------------------------

    def report(self, report: Report) -> Directive:
        """Hear a report, and say what to do. Raises WireError: what came of a request is none such; nothing of the
        report is taken.
        """
        done = report.done
        with self._lock:
            awaited = done is not None and self._thought is not None and self._thought.awaits(done.decision)
            if awaited and self._thought is not None and done is not None:
                self._thought.check(done.outcome)
            self._hear(report)
            self._take_count(report.count)
            if report.guard is not None:
                self._guard(report.guard)
            elif awaited and self._thought is not None and done is not None:
                self._thought.take(self._undisturbed(done.outcome), paused=self._paused)
            self._advance()
            return self._directive()

    def touch(self) -> None:
        """The agent lives."""
        self.heard_at_s = self._clock()

    @property
    def _paused(self) -> bool:
        return isinstance(self.state, states.Paused)

    def _hear(self, report: Report) -> None:
        self.touch()
        if report.sequence < self._sequence:
            return  # a later one was faster
        if report.sequence > self._sequence:  # else its answer was lost
            self._sequence = report.sequence
            self.steps.extend(report.steps)
            self.losses.extend(report.losses)
            for one in report.steps:
                self.curve.step(one.step, one.step_ms, one.coverage)
            for step, loss in report.losses:
                self.curve.loss(step, loss)
            for change in report.changes:
                self.knobs = change.knobs
                self.curve.change(change.step, change.knobs.knobs())
        self.dropped = report.dropped
        # Figures of a step come two steps later: what holds now has nothing to do with those that are still to come.
        self.step = report.step or (self.steps[-1].step if self.steps else 0)
        if report.applied is not None and report.applied.decision > self._applied:
            self._applied = report.applied.decision
            if report.done is None or report.done.decision != self._applied:
                self._disturbance()  # what was before does not count

    def _take_count(self, count: Count | None) -> None:
        if count is not None and count.seconds >= self.count.seconds:
            self.count = count

    def _undisturbed(self, outcome: Outcome) -> Outcome:
        disturbed = self._disturbance() if outcome.status == "measured" else None
        return outcome if disturbed is None else replace(outcome, status="void", reason=disturbed)

    def _advance(self) -> None:
        if self._leaving or isinstance(self.state, states.Ended):
            return
        if self._thought is None:
            if self._prepared is None:
                self._look_at_preparation()
                return
            self._thought = SearchHandle(self._prepared, self.hello.tokens)
            if self._guarded is not None:
                self._end_search(self._thought, self._guarded)
        went_on = self._thought.advance(paused=self._paused)
        if went_on is not None:
            self.state = states.advanced(self.state, went_on)

    def _look_at_preparation(self) -> None:
        self.state = states.advanced(self.state, states.Warming())
        if self.failed:
            self.state = states.ended(self.state, "the search could not be made; see the daemon's log")
            self._over = True

    def _guard(self, reason: str) -> None:
        """Training goes wrong: the agent has set the starting point's knobs, and says so until it ends."""
        if self._guarded is not None:
            return
        self._guarded = reason
        if self._thought is not None:
            self._end_search(self._thought, reason)

    def _end_search(self, thought: SearchHandle, reason: str) -> None:
        thought.withdraw()
        thought.over, thought.incumbent, thought.gain = True, thought.start, None
        self.state = states.Frozen(reason, pinned=True)

        def end() -> None:
            with self._commands:
                if self.over:
                    return
                try:
                    thought.end(spare=True)
                except NotAllowedError as error:
                    _logger.warning("Run %s goes wrong, and %s.", self.hello.run, error)  # its end writes it down
                    return
                self._write_guard(thought.prepared)
                with self._lock:
                    self.state = states.advanced(self.state, thought.settle())  # a command may have come in between

        self._ending = Background(end, "zftune-brain")

    def _write_start(self, prepared: Prepared) -> None:
        """Write down what the search begins from: only then can a run be gone on with, so that a command holds on."""
        if prepared.recorder is not None:
            with noting(self._notices):
                prepared.recorder.write(prepared.search)

    def _write_guard(self, prepared: Prepared) -> None:
        """Write down that training goes wrong, if it does; while nobody thinks."""
        if self._guarded is not None:
            with noting(self._notices):
                went_wrong(prepared, self._guarded)

    def _kind(self) -> Literal["apply", "hold", "pause", "stop"]:
        thought = self._thought
        if self._stopped or self.over:
            return "stop"
        if self._paused:
            return "pause"
        if thought is None or thought.request is None:
            return "stop" if thought is not None and thought.over else "hold"
        return "apply"

    def _thinks(self) -> bool:
        """Whether a report that tells nothing may be answered otherwise soon."""
        if self.over or self._stopped or self._leaving:
            return False
        if self._ending is not None and not self._ending.done:
            return True
        return not self._paused if self._thought is None else self._thought.busy and not self._paused

    def _directive(self) -> Directive:
        thought = self._thought
        request = None if thought is None else thought.request
        database = None if self._recorder is None else self._recorder.database
        kind = self._kind()
        if kind == "pause" and thought is not None:
            thought.call_off()
        return Directive(
            protocol=PROTOCOL,
            session=self.session,
            decision=0 if thought is None else thought.decision,
            kind=kind,
            state=self.state.name,
            reason=self.reason[:_MOST_SENTENCE],
            request=request if kind == "apply" else None,
            incumbent=None if thought is None else thought.incumbent,
            start=None if thought is None else thought.start,
            gain=None if thought is None else thought.gain,
            taken=0 if thought is None else thought.taken,
            record=self.record,
            database=None if database is None else str(database),
            thinks=self._thinks(),
            notices=self.notices,
        )

    # --- in the thread that makes the search -------------------------------------------------------------------------

    def _prepare(self, begin: Callable[[], Prepared | None]) -> None:
        """Make the search; the run may have ended meanwhile."""
        try:
            prepared = begin()
        except Exception:
            _logger.exception("The search of run %s cannot be made.", self.hello.run)
            raise
        if prepared is not None:
            with self._commands:  # who ends the run waits, or it has ended
                self._take_up(prepared)

    def _take_up(self, prepared: Prepared) -> None:
        if prepared.recorder is not None:
            prepared.recorder.follow(lambda: self.count, self.hello.run)
        self._write_start(prepared)
        with self._lock:
            late = self.over
            if not late:
                self._prepared = prepared
                if prepared.recorder is not None:
                    self.curve.join(prepared.recorder.curve.curve())
                    prepared.recorder.curve = self.curve
                if prepared.paused and not isinstance(self.state, states.Ended):
                    self.state = states.paused(self.state)
        if late and prepared.recorder is not None:
            self._write_guard(prepared)
            prepared.recorder.finish(prepared.search, unfinished=self._guarded is None)

    # --- what somebody asks for, in threads --------------------------------------------------------------------------

    def pause(self, by: str) -> None:
        """Let the incumbent run undisturbed; it is written down when this returns. `by` names the requester. Raises
        NotAllowedError: the state does not allow it, or the search is still being made; ZftuneError: it could not be
        written down: nothing has changed.
        """
        self._wait_for_search()
        with self._commands:
            if states.paused(self.state) == self.state:
                return
            self._write_command("pause", by)
            with self._lock:
                self.state = states.paused(self.state)

    def resume(self, by: str) -> None:
        """Go on after a pause. Raises NotAllowedError: it is not paused; ZftuneError: it could not be written down:
        nothing has changed.
        """
        with self._commands:
            states.resumed(self.state)
            self._write_command("unpause", by)
            with self._lock:
                self.state = states.resumed(self.state)
                self._advance()

    def roll_back(self, by: str) -> None:
        """End the search with the setting before the last adoption, and bar the one that was adopted. Raises
        NotAllowedError: nothing was adopted, or the state does not allow it; ZftuneError: it could not be written down;
        asked for again, it is, and nothing else is rolled back.
        """
        with self._commands:
            thought = self._begun("roll back")
            if self._barred is None and not thought.search.book.adoptions:
                raise NotAllowedError(f"cannot roll back: {thought.nothing_to_roll_back()}")
            self._carry_out(thought, partial(self._roll_back, thought, by), "it is rolled back")

    def _roll_back(self, thought: SearchHandle, by: str) -> None:
        if self._barred is None:
            book = thought.search.book
            self._barred = book.trials[book.adoptions[-1].trial].setting
            thought.search.roll_back(by)
        self._settle(thought)
        if thought.prepared.recording is not None:
            thought.prepared.recording.withdraw_preset(self._barred, Withdrawal("rollback", by))
        self._barred = None

    def stop(self, by: str) -> None:
        """End the tuning; the incumbent's knobs stay. Raises NotAllowedError: the state does not allow it; ZftuneError:
        it could not be written down.
        """
        with self._commands:
            thought = self._begun("stop")
            self._carry_out(thought, partial(self._stop, thought, by), "it is stopped")

    def _stop(self, thought: SearchHandle, by: str) -> None:
        if not self._stopped:
            thought.search.stop(because="command", by=by, final=True)
        self._stopped = True
        self._settle(thought)

    def _carry_out(self, thought: SearchHandle, command: Callable[[], None], what: str) -> None:
        """Do what somebody asks for once nobody thinks; where that takes its time, later: there is no way back."""
        later = f"the search is still being written down; {what} as soon as that is over"
        if self._ending is not None and not self._ending.done:
            raise NotAllowedError(later)
        try:
            self._halt(thought)
        except NotAllowedError as error:
            self._ending = Background(partial(self._carry_out_later, thought, command), "zftune-brain")
            raise NotAllowedError(later) from error
        command()

    def _carry_out_later(self, thought: SearchHandle, command: Callable[[], None]) -> None:
        while True:
            time.sleep(_AGAIN_S)  # others may have the lock
            with self._commands:
                if self.over:
                    return  # its end writes down what there is
                try:
                    self._halt(thought)
                except NotAllowedError:
                    continue
                with noting(self._notices):
                    command()
                return

    def _wait_for_search(self) -> None:
        """Until there is something to write a command down in."""
        self._preparing.join(_PREPARING_S)
        if not self._preparing.done:
            raise NotAllowedError("the search is still being prepared; try again in some seconds")
        with self._lock:
            if self._prepared is None:
                self._look_at_preparation()

    def _begun(self, doing: str) -> SearchHandle:
        if self._thought is None or self.over:
            why = self.reason if self.over else "its search has not begun yet"
            raise NotAllowedError(f"cannot {doing}: {why}")
        return self._thought

    def _halt(self, thought: SearchHandle, *, spare: bool = True) -> None:
        with self._lock:
            thought.withdraw()
        thought.end(spare=spare)

    def _settle(self, thought: SearchHandle) -> None:
        with self._lock:
            self.state = thought.settle()
        if self._recorder is not None:
            self._recorder.write(thought.search)

    def _write_command(self, kind: Literal["pause", "unpause"], by: str) -> None:
        if self._recorder is not None:
            self._recorder.command(kind, by)

    # --- what ends it waits and writes, in threads -------------------------------------------------------------------

    def goodbye(self, message: Goodbye) -> Farewell:
        """The agent ends: that is shown at once, and what was found is written down. Raises NotAllowedError: that takes
        its time; it may be said again.
        """
        self.touch()
        with self._lock:
            if self.over:
                return self._farewell
            self.state = states.ended_by(self.state, message, stopped=self._stopped)
            if self._parting is None or (self._parting.done and self._parting.failed):
                self._parting = Background(partial(self._part, message), "zftune-brain")
        self._parting.join(_ANSWER_S)
        if not self._parting.done:
            raise NotAllowedError("what was found is still being written down; try again in some seconds")
        return self._parting.result

    def _part(self, message: Goodbye) -> Farewell:
        """Whether or not the agent still waits for it."""
        self._hurry()
        while True:
            with self._commands, contextlib.suppress(NotAllowedError):
                if self.over:
                    return self._farewell
                prepared = self._come_to_rest()
                self._take_count(message.count)
                found = farewell(prepared, message, self.account.total)
                with self._lock:
                    self._farewell = replace(found, notices=self.notices)
                    self._over = True
                return self._farewell
            time.sleep(_AGAIN_S)  # somebody still thinks; others may have the lock

    def lose(self, lease_s: float, *, died: bool = False) -> bool:
        """End the run of an agent that was silent for `lease_s`, or died: what was in flight is marked crashed. Returns
        whether it has ended now. Raises NotAllowedError: that takes its time, it is to be tried again.
        """
        with self._lock:
            silent_s = self._clock() - self.heard_at_s
            parts = self._parting is not None and not self._parting.done
            if self.over or parts or (self._lost is None and silent_s <= lease_s and not died):
                return False
            if self._lost is None:
                silent = f"nothing was heard of the training for {silent_s:.0f} s"
                self._lost = "the training was killed, or has crashed" if died else silent
        return self._end(self._lost, lambda recorder, _: recorder.lose(), spare=False)

    def leave(self) -> None:
        """The daemon ends, and the training goes on: another daemon may take the run up. Raises NotAllowedError: that
        takes its time, it is to be tried again.
        """

        def close(recorder: StoreRecorder, prepared: Prepared) -> None:
            recorder.finish(prepared.search, unfinished=True)

        self._end("the daemon has ended", close, spare=True)

    def renew(self, lease_s: float) -> None:
        """Extend the run's lease in the store by `lease_s`."""
        if not self.over and self._recorder is not None:
            self._recorder.renew(lease_s)

    def _end(self, reason: str, close: Callable[[StoreRecorder, Prepared], None], *, spare: bool) -> bool:
        """End the run; whether it had not ended before. It is shown as ended once the store can give it to others."""
        self._hurry()
        with self._commands:
            if self.over:
                return False
            prepared = self._come_to_rest(spare=spare)
            if prepared is not None and prepared.recorder is not None:
                close(prepared.recorder, prepared)
            with self._lock:
                self.state = states.ended(self.state, reason)
                self._over = True
        return True

    def _come_to_rest(self, *, spare: bool = True) -> Prepared | None:
        """Think and begin nothing any more; what was prepared. Under the commands' lock."""
        with self._lock:
            self._leaving = True
            thought, prepared = self._thought, self._prepared
        if thought is not None:
            self._halt(thought, spare=spare)
        if prepared is not None:
            self._write_guard(prepared)
        return prepared

    def _hurry(self) -> None:
        """Let what is under way come to its end."""
        for one in (self._preparing, self._ending):
            if one is not None:
                one.join(_JOIN_S)
