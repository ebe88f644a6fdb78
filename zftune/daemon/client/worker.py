"""The worker of a training whose search is in the daemon: two boxes, one for what happened and one for what to do.

The training thread and the session's share them under a lock that nobody holds for longer than some assignments.
"""

from __future__ import annotations

import math
import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import replace

from zenflow import StepStats
from zenflow.clock import REAL_CLOCK, Clock, Event
from zftune.daemon.protocol.messages import (
    MOST_CHANGES,
    MOST_STEPS,
    Applied,
    Change,
    Directive,
    Done,
    Report,
    StepFigures,
)
from zftune.errors import ZftuneError
from zftune.store.account import Counter
from zftune.tuner.space import Setting
from zftune.tuner.states import OF_INCUMBENT, Outcome
from zftune.tuner.worker import Answer, SearchWorker, Withdraw

_MOST_SENTENCE = 2000
_FROZEN = "frozen"
"""The state of a run whose search has stopped: the incumbent is measured now and then, if anything is."""


class RemoteWorker(SearchWorker):
    """The training thread's side of the daemon."""

    def __init__(self, tokens: int, clock: Clock = REAL_CLOCK) -> None:
        self.wake: Event = clock.event("something to tell the daemon")
        """Set when there is something to be sent at once."""
        self.closing: Event = clock.event("the end of the tuning")
        """Set when nothing more is asked."""
        self.reason = ""
        """Why the tuning was ended; "": the training was."""
        self.steps = 0
        """That were observed, since the search began."""
        self.counter: Counter | None = None
        """Of what the run takes."""
        self.own: Setting | None = None
        """The user's knobs: what stays where the daemon knows no better."""
        self._tokens = tokens
        self._lock = threading.Lock()
        self._steps: deque[StepFigures] = deque(maxlen=MOST_STEPS)
        self._losses: deque[tuple[int, float]] = deque(maxlen=MOST_STEPS)
        self._changes: deque[Change] = deque(maxlen=MOST_CHANGES)
        """Of the knobs, the last ones."""
        self._untold: deque[Change] = deque(maxlen=MOST_CHANGES)
        """Those of them that are in no report to this daemon."""
        self._dropped = 0
        self._sequence = 0
        self._unheard: tuple[Sequence[StepFigures], Sequence[tuple[int, float]], Sequence[Change]] | None = None
        """Of the last report, until the daemon has answered it: the next one says the same, and nothing newer."""
        self._current: int | None = None
        """The decision that is carried out."""
        self._offered = 0
        """The newest decision that was asked for."""
        self._trial: int | None = None
        """Of it."""
        self._challenges = False
        """Whether it is another setting than the incumbent."""
        self._applied: Applied | None = None
        self._done: Done | None = None
        self._guard: str | None = None
        self._idle = False
        """Whether the last directive said that nobody thinks of anything to be measured soon."""
        self._answer: Answer | None = None
        self._recall: Withdraw | None = None
        self._incumbent: Setting | None = None
        self._over = False
        self._broken: Exception | None = None
        self._none: str | None = None
        """Why there is no search and will be none."""
        self._given = False
        """Whether the daemon has a search, and does not pause."""

    # --- the training thread -----------------------------------------------------------------------------------------

    def hand(self, outcome: Outcome | None) -> None:
        with self._lock:
            if outcome is not None and self._current is not None:
                self._done = Done(self._current, replace(outcome, reason=outcome.reason[:_MOST_SENTENCE]))
            self._current = None
        self.wake.set()

    def poll(self) -> Answer | None:
        with self._lock:
            self._check()
            answer, self._answer = self._answer, None
            if answer is not None:
                self._recall = None  # it was for what came before
                if answer.request is not None:
                    self._current = self._offered
            return answer

    def recall(self) -> Withdraw | None:
        with self._lock:
            recall, self._recall = self._recall, None
            return recall

    def guard(self, reason: str) -> None:
        with self._lock:
            self._guard, self._answer, self._over = reason, None, True
        self.wake.set()

    def stop(self, reason: str) -> None:
        self.reason = reason

    def applied(self, step: int, setting: Setting) -> None:
        with self._lock:
            self._change(Change(step, setting))
            decided = self._current is not None
            if self._current is not None:
                self._applied = Applied(self._current, step)
        if decided:
            self.wake.set()  # the daemon watches over the machine from now on, not only once it is measured

    def observe(self, stats: StepStats) -> None:
        stall_ms = None if stats.stall_ms is None else {str(cause): ms for cause, ms in stats.stall_ms.items()}
        coverage = None if stats.coverage is None else min(1.0, max(0.0, stats.coverage))  # sums of floats
        with self._lock:
            self.steps += 1
            self._dropped += len(self._steps) == MOST_STEPS
            self._steps.append(StepFigures(stats.step, stats.step_ms, stall_ms, coverage))

    def hear_loss(self, step: int, loss: float) -> None:
        """Take a loss; one that is not finite is the guard's business."""
        if math.isfinite(loss):
            with self._lock:
                self._dropped += len(self._losses) == MOST_STEPS
                self._losses.append((step, loss))

    def close(self) -> None:
        self.closing.set()
        self.wake.set()

    # --- the session's thread ----------------------------------------------------------------------------------------

    @property
    def given(self) -> bool:
        """Whether the daemon has a search. Raises ZftuneError: there will be none; RuntimeError: the daemon is not
        asked any more.
        """
        with self._lock:
            self._check()
            if self._none is not None:
                raise ZftuneError(self._none.rstrip("."))
            return self._given

    @property
    def waits(self) -> bool:
        """Whether the training waits for an answer that somebody thinks about."""
        with self._lock:
            return self._current is None and self._answer is None and not self._over and not self._idle

    @property
    def wrong(self) -> str | None:
        """Why training goes wrong, a sentence; None: it does not."""
        with self._lock:
            return self._guard

    @property
    def trial(self) -> int | None:
        """The last that was asked for."""
        return self._trial

    @property
    def tries(self) -> int | None:
        """The trial that runs instead of the incumbent, or is about to; None: none does."""
        with self._lock:
            under_way = self._current is not None or self._answer is not None
            return self._trial if under_way and self._challenges else None

    def report(self, protocol: int, session: str) -> Report:
        """What happened since the last report that was heard."""
        with self._lock:
            if self._unheard is None:
                self._sequence += 1
                self._unheard = tuple(self._steps), tuple(self._losses), tuple(self._untold)
                for told in (self._steps, self._losses, self._untold):
                    told.clear()
            steps, losses, changes = self._unheard
            return Report(
                protocol=protocol,
                session=session,
                sequence=self._sequence,
                step=0 if self.counter is None else self.counter.last_step,
                steps=tuple(steps),
                losses=tuple(losses),
                dropped=self._dropped,
                applied=self._applied,
                done=self._done,
                guard=self._guard,
                changes=tuple(changes),
                count=None if self.counter is None else self.counter.count,
            )

    def heard(self) -> None:
        """The last report was answered."""
        with self._lock:
            self._unheard = None

    def begin_session(self, reason: str) -> None:
        """Another daemon, or one that has forgotten: earlier requests are void."""
        with self._lock:
            self._recall = Withdraw(reason) if self._current is not None or self._answer is not None else None
            self._current = self._answer = self._done = self._applied = None
            self._offered = 0
            self._untold = deque(self._changes, maxlen=MOST_CHANGES)
            if self._unheard is not None:
                steps, losses, _ = self._unheard
                self._unheard = steps, losses, tuple(self._untold)
                self._untold.clear()

    def obey(self, directive: Directive) -> None:
        """Take what the daemon says."""
        with self._lock:
            self._given |= directive.kind != "pause" and directive.incumbent is not None
            self._idle = directive.kind == "pause" or directive.state == _FROZEN
            if self._over:
                return
            if self._done is not None and max(directive.taken, directive.decision - 1) >= self._done.decision:
                self._done = None
            before, self._incumbent = self._incumbent, directive.incumbent or self._incumbent
            if directive.request is not None and directive.incumbent is not None:
                self._ask(directive, Answer(directive.request, directive.incumbent, directive.start, directive.gain))
                return
            self._withdraw(directive, changed=before != self._incumbent)
            last = self._incumbent or self.own
            if directive.kind == "stop" and last is None:
                self._none = directive.reason or "the daemon has ended the search"
            elif directive.kind == "stop" and last is not None:
                self._over = True
                self._answer = Answer(None, last, directive.start, directive.gain)

    def fail(self, error: Exception) -> None:
        """There is nothing to be had any more; the training thread hears of it."""
        with self._lock:
            self._broken = error

    def _change(self, change: Change) -> None:
        last = self._changes[-1] if self._changes else None
        if last is not None and last.step < change.step and last.knobs == change.knobs:
            return  # they held already
        for changes in (self._changes, self._untold):
            while changes and changes[-1].step >= change.step:  # an earlier state was loaded
                changes.pop()
            changes.append(change)

    def _check(self) -> None:
        if self._broken is not None:
            # Not as it is: an error of the host engine's kind would end the training.
            why = f"{type(self._broken).__name__}: {self._broken}"
            raise RuntimeError(f"the daemon is no longer used ({why})") from self._broken

    def _ask(self, directive: Directive, answer: Answer) -> None:
        if directive.decision == self._offered or answer.request is None:
            return  # it was asked for before
        if self._current is not None:
            self._recall = Withdraw("the daemon asks for something else", answer.incumbent, answer.gain)
            self._current = None
        self._offered, self._trial, self._done = directive.decision, answer.request.trial, None
        self._challenges = answer.request.role not in OF_INCUMBENT
        self._answer = answer

    def _withdraw(self, directive: Directive, *, changed: bool) -> None:
        reason = directive.reason
        if self._answer is not None:
            reason = reason or "withdrawn before it began"
            self._answer = None
            self._done = Done(self._offered, Outcome("void", tokens=self._tokens, reason=reason, called_off=True))
        if self._current is not None or changed:
            self._recall = Withdraw(reason, self._incumbent, directive.gain)
