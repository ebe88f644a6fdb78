"""One run's brain: it hears what the agent reports, and says what to do. It never waits for a thought or a write.

`report` is called in the event loop and works in memory only: the search thinks and writes in a thread of its own. The
commands, `goodbye` and what ends a run wait for that thread and write: they are called in threads.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from zftune.daemon.brain import states
from zftune.daemon.brain.ending import farewell
from zftune.daemon.brain.states import NotAllowedError, State
from zftune.daemon.brain.thought import Begun, Thought
from zftune.daemon.wire import PROTOCOL, Directive, Farewell, Goodbye, Hello, Report, StepFigures, decode, encode
from zftune.tuner.background import Background
from zftune.tuner.preparing import Prepared
from zftune.tuner.states import Between, Outcome, Stopped
from zftune.tuner.thinker import Thinker

_MOST_NOTICES = 32
_KEPT_STEPS = 1024
_KEPT_CHANGES = 256
_MOST_SENTENCE = 2000
_JOIN_S = 5.0
_logger = logging.getLogger("zftune.daemon")

Disturbance = Callable[[], str | None]


class Brain:
    """Follows one run.

    Args:
        hello: of its agent.
        session: random; of this brain.
        begin: makes the search; called in a thread.
        thinker: asks Optuna.
        notices: sentences; `begin` adds to them.
        clock: seconds that only grow.
        disturbance: says that a measurement does not count.
    """

    def __init__(
        self,
        hello: Hello,
        session: str,
        begin: Callable[[], Begun],
        *,
        thinker: Thinker,
        notices: list[str],
        clock: Callable[[], float],
        disturbance: Disturbance = lambda: None,
    ) -> None:
        self.hello, self.session = hello, session
        self.state: State = states.Warming()
        self.steps: deque[StepFigures] = deque(maxlen=_KEPT_STEPS)
        """The last ones."""
        self.losses: deque[tuple[int, float]] = deque(maxlen=_KEPT_STEPS)
        self.dropped = 0
        """Statistics that the agent had no room for."""
        self.knobs: dict[str, Any] | None = None
        """That hold, by the last report."""
        self.changes: deque[tuple[int, dict[str, Any]]] = deque(maxlen=_KEPT_CHANGES)
        """The last steps by which other knobs held, and those."""
        self.heard_at_s = clock()
        self._clock, self._thinker, self._disturbance, self._notices = clock, thinker, disturbance, notices
        self._prepared: Prepared | None = None
        self._thought: Thought | None = None
        self._applied = self._sequence = 0
        self._stopped = False
        self._farewell = Farewell(protocol=PROTOCOL)
        self._lock = threading.RLock()
        self._commands = threading.Lock()
        self._ending: Background[None] | None = None
        self._preparing = Background(lambda: self._prepare(begin), "zftune-brain")

    @property
    def over(self) -> bool:
        """Whether it has ended."""
        return isinstance(self.state, states.Ended)

    @property
    def failed(self) -> bool:
        """Whether its search could not be made."""
        return self._preparing.done and self._preparing.failed

    @property
    def thought(self) -> Thought | None:
        """The search at work; None: it has not begun."""
        return self._thought

    @property
    def record(self) -> str | None:
        """The run in the store; None: nothing is written down."""
        prepared = self._prepared
        return None if prepared is None or prepared.recorder is None else prepared.recorder.run_id

    @property
    def notices(self) -> tuple[str, ...]:
        """Sentences: what is not as it should be."""
        prepared = self._prepared
        found = list(self._notices)
        for one in () if prepared is None else (prepared.recording, prepared.recorder):
            found += [] if one is None else one.notices
        return tuple(one[:_MOST_SENTENCE] for one in dict.fromkeys(found))[:_MOST_NOTICES]

    # --- in the event loop -------------------------------------------------------------------------------------------

    def report(self, report: Report) -> Directive:
        """Hear a report, and say what to do.

        Raises:
            WireError: what came of a request is none such; nothing of the report is taken.
        """
        done = report.done
        outcome = None if done is None else decode(Outcome, done.outcome, "report.done.outcome")
        with self._lock:
            awaited = done is not None and self._thought is not None and self._thought.awaits(done.decision)
            if awaited and self._thought is not None and outcome is not None:
                self._thought.check(outcome)
            self._hear(report)
            if report.guard is not None:
                self._guard(report.guard)
            elif awaited and self._thought is not None and outcome is not None:
                self._thought.take(self._undisturbed(outcome), paused=self._paused)
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
        if report.sequence <= self._sequence:
            return  # it came twice
        self._sequence = report.sequence
        self.steps.extend(report.steps)
        self.losses.extend(report.losses)
        self.dropped = report.dropped
        last = self.steps[-1].step if self.steps else 0
        if report.applied is not None and report.applied.decision > self._applied:
            self._applied, last = report.applied.decision, report.applied.step
            self._disturbance()  # what was before does not count
        if report.knobs is not None and report.knobs != self.knobs:
            self.knobs = dict(report.knobs)
            self.changes.append((last, self.knobs))

    def _undisturbed(self, outcome: Outcome) -> Outcome:
        disturbed = self._disturbance() if outcome.status == "measured" else None
        return outcome if disturbed is None else replace(outcome, status="void", reason=disturbed)

    def _advance(self) -> None:
        if self.over:
            return
        if self._thought is None:
            if self._prepared is None:
                self._look_for_failure()
                return
            self._thought = Thought(self._prepared, self._thinker, self.hello.tokens)
        went_on = self._thought.advance(paused=self._paused)
        if went_on is not None:
            self.state = states.advanced(self.state, went_on)

    def _look_for_failure(self) -> None:
        if self.failed:
            self.state = states.ended(self.state, "the search could not be made; the daemon's log tells why")

    def _guard(self, reason: str) -> None:
        """Training goes wrong: the agent has set the starting point's knobs."""
        thought = self._thought
        if thought is None or thought.halted:
            return
        thought.withdraw()
        thought.incumbent = thought.start
        self.state = states.Frozen(reason, pinned=True)

        def end() -> None:
            with self._commands:
                thought.guard(reason)

        self._ending = Background(end, "zftune-brain")

    def _directive(self) -> Directive:
        thought = self._thought
        request = None if thought is None else thought.request
        stopped = self._stopped or self.over
        kind = "stop" if stopped else "pause" if self._paused else "hold" if request is None else "apply"
        return Directive(
            protocol=PROTOCOL,
            session=self.session,
            decision=0 if thought is None else thought.decision,
            kind=kind,  # type: ignore[arg-type]
            state=self.state.name,
            reason=self.state.reason[:_MOST_SENTENCE],
            request=encode(request) if kind == "apply" else None,
            incumbent=None if thought is None else thought.incumbent.knobs(),
            start=None if thought is None else thought.start.knobs(),
            taken=0 if thought is None else thought.taken,
            record=self.record,
            notices=self.notices,
        )

    # --- commands, in threads ----------------------------------------------------------------------------------------

    def pause(self, by: str) -> None:
        """Let the incumbent run undisturbed; it is written down when this returns.

        Args:
            by: who asks for it, in words.

        Raises:
            NotAllowedError: the state does not allow it.
            ZftuneError: it could not be written down: nothing has changed.
        """
        with self._commands:
            if states.paused(self.state) == self.state:
                return
            self._write_command("pause", f"Paused {by}: the incumbent's knobs stay.")
            with self._lock:
                self.state = states.paused(self.state)

    def resume(self, by: str) -> None:
        """Go on after a pause.

        Raises:
            NotAllowedError: it is not paused.
            ZftuneError: it could not be written down: nothing has changed.
        """
        with self._commands:
            states.resumed(self.state)
            self._write_command("unpause", f"Resumed {by}.")
            with self._lock:
                self.state = states.resumed(self.state)
                self._advance()

    def roll_back(self, by: str) -> None:
        """Pin the setting before the last adoption, and bar the one that was adopted.

        Raises:
            NotAllowedError: nothing was adopted, or the state does not allow it.
            ZftuneError: it could not be written down.
        """
        with self._commands:
            thought = self._begun("rolling back")
            if not thought.search.book.adoptions:
                raise NotAllowedError("nothing was adopted in this run, allowed is rolling back what was")
            self._halt(thought)
            barred = thought.search.book.incumbent.setting
            thought.search.roll_back(f"Rolled back {by}: {barred} is not tried again, the setting before it stays.")
            self._settle(thought)
            if thought.prepared.recording is not None:
                thought.prepared.recording.withdraw_preset(barred)

    def stop(self, by: str) -> None:
        """End the tuning; the incumbent's knobs stay.

        Raises:
            NotAllowedError: the state does not allow it.
            ZftuneError: it could not be written down.
        """
        with self._commands:
            thought = self._begun("stopping")
            self._halt(thought)
            state = thought.search.state
            if not (isinstance(state, Stopped) and state.final):
                thought.search.stop(f"Stopped {by}.", final=True)
            self._stopped = True
            self._settle(thought)

    def _begun(self, doing: str) -> Thought:
        if self._thought is None or self.over:
            raise NotAllowedError(f"the run is {self.state.name}, allowed is {doing} one whose search has begun")
        return self._thought

    def _halt(self, thought: Thought, *, spare: bool = True) -> None:
        with self._lock:
            asked = thought.withdraw()
        thought.end(asked, spare=spare)

    def _settle(self, thought: Thought) -> None:
        with self._lock:
            self.state = thought.settle()
        thought.write_down()

    def _write_command(self, kind: str, reason: str) -> None:
        recorder = None if self._prepared is None else self._prepared.recorder
        if recorder is not None:
            recorder.command(kind, reason)

    # --- the end, in threads -----------------------------------------------------------------------------------------

    def goodbye(self, message: Goodbye) -> Farewell:
        """The agent ends: what was found is written down.

        Raises:
            NotAllowedError: that takes its time; it may be said again.
            WireError: the message is none such.
        """
        between = None if message.idle is None else decode(Between, message.idle, "goodbye.idle")
        for one in (self._preparing, self._ending):
            if one is not None:
                one.join(_JOIN_S)
        with self._commands:
            if self.over:
                return self._farewell
            if self._thought is not None:
                self._halt(self._thought)
            with self._lock:
                self.state = states.ended(self.state, message.reason or "the training has ended")
                prepared = self._prepared
            self._farewell = farewell(prepared, message, between)
            self._farewell = replace(self._farewell, notices=self.notices)
        self._thinker.close()
        return self._farewell

    def lose(self, reason: str) -> None:
        """The agent was not heard of any more: what was in flight is marked crashed.

        Args:
            reason: a sentence.
        """
        prepared = self._end(reason, spare=False)
        if prepared is not None and prepared.recorder is not None:
            prepared.recorder.lose()

    def leave(self) -> None:
        """The daemon ends, and the training goes on: another daemon may take the run up."""
        prepared = self._end("the daemon has ended", spare=True)
        if prepared is not None and prepared.recorder is not None:
            prepared.recorder.finish(prepared.search, unfinished=True)

    def renew(self, lease_s: float) -> None:
        """Say in the store that the run lives.

        Args:
            lease_s: for so long.

        Raises:
            ZftuneError: it could not be written.
        """
        prepared = self._prepared
        if not self.over and prepared is not None and prepared.recorder is not None:
            prepared.recorder.renew(lease_s)

    def _end(self, reason: str, *, spare: bool) -> Prepared | None:
        """End the run; what was prepared, where it has to be closed."""
        with self._commands:
            if self.over:
                return None
            if self._thought is not None:
                self._halt(self._thought, spare=spare)
            with self._lock:
                self.state = states.ended(self.state, reason)
                prepared = self._prepared
        self._thinker.close()
        self._preparing.join(_JOIN_S)  # nobody writes any more when this returns
        return prepared

    def _prepare(self, begin: Callable[[], Begun]) -> None:
        """Make the search, in a thread: the run may have ended, or been paused, meanwhile."""
        try:
            begun = begin()
        except Exception:
            _logger.exception("The search of run %s cannot be made.", self.hello.run)
            raise
        recorder = begun.prepared.recorder
        with self._lock:
            late, paused = self.over, self._paused
            if not late:
                self._prepared = begun.prepared
                if begun.prepared.sentence:
                    self._notices.append(begun.prepared.sentence)
                if begun.paused:
                    self.state = states.paused(self.state)
        if late and recorder is not None:
            recorder.finish(begun.prepared.search, unfinished=True)
        elif paused and not begun.paused and recorder is not None:
            recorder.command("pause", "Paused before the search began.")
