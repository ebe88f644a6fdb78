"""What a brain hears of its run, and what it answers. It never waits for a thought or a write.

`report` is called in the event loop and works in memory only: the search thinks and writes in a thread of its own.
"""

from __future__ import annotations

import json
import logging
import operator
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Generic, Literal, TypeVar

from zftune.daemon.brain import states
from zftune.daemon.brain.ending import went_wrong
from zftune.daemon.brain.states import NotAllowedError, State
from zftune.daemon.brain.thought import Begun, Thought
from zftune.daemon.wire import PROTOCOL, Directive, Hello, Report, StepFigures, decode, encode
from zftune.errors import ZftuneError
from zftune.tuner.background import Background
from zftune.tuner.preparing import Prepared
from zftune.tuner.settings import Setting
from zftune.tuner.states import Outcome
from zftune.tuner.thinker import Thinker

_MOST_NOTICES = 32
_KEPT_STEPS = 1024
_KEPT_CHANGES = 256
_MOST_SENTENCE = 2000
_logger = logging.getLogger("zftune.daemon")

Disturbance = Callable[[], str | None]
A = TypeVar("A")
B = TypeVar("B")


class _Lately(Generic[A, B]):
    """A function that is mostly asked what it was asked last: reports come many times a second, and little changes."""

    def __init__(self, function: Callable[[A], B], same: Callable[[Any, Any], bool] = operator.is_) -> None:
        self._function, self._same = function, same
        self._last: tuple[A, B] | None = None

    def __call__(self, value: A) -> B:
        last = self._last
        if last is None or not self._same(last[0], value):
            last = self._last = (value, self._function(value))
        return last[1]


def _text(directive: Directive) -> bytes:
    return json.dumps(encode(directive), allow_nan=False).encode()


class Listener:
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
        self._guarded: str | None = None
        """Why training goes wrong, if it does."""
        self._lock = threading.RLock()
        self._commands = threading.Lock()
        """Who has it may change the search, once nobody thinks, and write."""
        self._leaving = False
        """Whether it is about to end: nothing is begun any more."""
        self._ending: Background[None] | None = None
        self._request = _Lately(encode)
        self._incumbent, self._start = _Lately(Setting.knobs), _Lately(Setting.knobs)
        self._text = _Lately(_text, operator.eq)
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

    def answer(self, report: Report) -> bytes:
        """What `report` says, as JSON.

        Raises:
            WireError: what came of a request is none such; nothing of the report is taken.
        """
        return self._text(self.report(report))

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
            if report.done is None or report.done.decision != self._applied:
                self._disturbance()  # what was before does not count
        if report.knobs is not None and report.knobs != self.knobs:
            self.knobs = dict(report.knobs)
            self.changes.append((last, self.knobs))

    def _undisturbed(self, outcome: Outcome) -> Outcome:
        disturbed = self._disturbance() if outcome.status == "measured" else None
        return outcome if disturbed is None else replace(outcome, status="void", reason=disturbed)

    def _advance(self) -> None:
        if self.over or self._leaving:
            return
        if self._thought is None:
            if self._prepared is None:
                self._look_for_failure()
                return
            self._thought = Thought(self._prepared, self._thinker, self.hello.tokens)
            if self._guarded is not None:
                self._end_search(self._thought, self._guarded)
        went_on = self._thought.advance(paused=self._paused)
        if went_on is not None:
            self.state = states.advanced(self.state, went_on)

    def _look_for_failure(self) -> None:
        if self.failed:
            self.state = states.ended(self.state, "the search could not be made; the daemon's log tells why")

    def _guard(self, reason: str) -> None:
        """Training goes wrong: the agent has set the starting point's knobs, and says so until it ends."""
        if self._guarded is not None:
            return
        self._guarded = reason
        if self._thought is not None:
            self._end_search(self._thought, reason)

    def _end_search(self, thought: Thought, reason: str) -> None:
        asked = thought.withdraw()
        thought.over, thought.incumbent = True, thought.start
        self.state = states.Frozen(reason, pinned=True)

        def end() -> None:
            with self._commands:
                if self.over:
                    return
                try:
                    thought.end(asked, spare=True)
                except NotAllowedError as error:
                    _logger.warning("Run %s goes wrong, and %s.", self.hello.run, error)  # its end writes it down
                    return
                self._write_guard(thought.prepared)
                with self._lock:
                    self.state = states.advanced(self.state, thought.settle())  # a command may have come in between

        self._ending = Background(end, "zftune-brain")

    def _write_start(self, prepared: Prepared) -> None:
        """Write down what the search begins from: only then can a run be gone on with, so that a command holds on."""
        try:
            if prepared.recorder is not None:
                prepared.recorder.write(prepared.search)
        except ZftuneError as error:
            self._notices.append(f"{error}.")

    def _write_guard(self, prepared: Prepared) -> None:
        """Write down that training goes wrong, if it does; while nobody thinks."""
        if self._guarded is None:
            return
        try:
            went_wrong(prepared, self._guarded)
        except ZftuneError as error:
            self._notices.append(f"{error}.")

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
        kind = self._kind()
        if kind == "pause" and thought is not None:
            thought.call_off()
        return Directive(
            protocol=PROTOCOL,
            session=self.session,
            decision=0 if thought is None else thought.decision,
            kind=kind,
            state=self.state.name,
            reason=self.state.reason[:_MOST_SENTENCE],
            request=self._request(request) if kind == "apply" else None,
            incumbent=None if thought is None else self._incumbent(thought.incumbent),
            start=None if thought is None else self._start(thought.start),
            taken=0 if thought is None else thought.taken,
            record=self.record,
            thinks=self._thinks(),
            notices=self.notices,
        )

    # --- in the thread that makes the search -------------------------------------------------------------------------

    def _prepare(self, begin: Callable[[], Begun]) -> None:
        """Make the search; the run may have ended meanwhile."""
        try:
            begun = begin()
        except Exception:
            _logger.exception("The search of run %s cannot be made.", self.hello.run)
            raise
        with self._commands:  # who ends the run waits, or it has ended
            self._take_up(begun)

    def _take_up(self, begun: Begun) -> None:
        prepared = begun.prepared
        self._write_start(prepared)
        with self._lock:
            late = self.over
            if not late:
                self._prepared = prepared
                if prepared.sentence:
                    self._notices.append(prepared.sentence)
                if begun.paused:
                    self.state = states.paused(self.state)
        if late and prepared.recorder is not None:
            self._write_guard(prepared)
            prepared.recorder.finish(prepared.search, unfinished=self._guarded is None)
