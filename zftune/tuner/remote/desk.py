"""The desk of a training whose search is in the daemon: two boxes, one for what happened and one for what to do.

The training thread and the courier's share them under a lock that nobody holds for longer than some assignments.
"""

from __future__ import annotations

import math
import threading
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from zenflow import StepStats
from zenflow.clock import REAL_CLOCK, Clock, Event
from zftune.daemon.wire import MOST_STEPS, Applied, Directive, Done, Report, StepFigures, WireError, decode, encode
from zftune.errors import ZftuneError
from zftune.tuner.settings import Setting
from zftune.tuner.states import Between, Outcome, Request
from zftune.tuner.thinking import Answer, Desk, Recall

_MOST_ASKED_STEPS = 100_000
_MOST_SENTENCE = 2000
_FROZEN = "frozen"
"""The state of a run whose search has stopped: the incumbent is measured now and then, if anything is."""


@dataclass(frozen=True, slots=True)
class Orders:
    """A directive, as the training understands it."""

    directive: Directive
    request: Request | None
    incumbent: Setting | None
    start: Setting | None

    @classmethod
    def of(cls, directive: Directive) -> Orders:
        """Read it.

        Raises:
            WireError: it asks for what no training can do.
        """
        request = None
        if directive.request is not None:
            request = decode(Request, directive.request, "directive.request")
            if not (0 <= request.discard <= _MOST_ASKED_STEPS and 1 <= request.steps <= _MOST_ASKED_STEPS):
                raise WireError(
                    f"directive.request asks for {request.discard} and {request.steps} steps, allowed are at most "
                    f"{_MOST_ASKED_STEPS} of each"
                )
        return cls(directive, request, _setting(directive.incumbent), _setting(directive.start))


class RemoteDesk(Desk):
    """What the training thread has of the daemon.

    Args:
        tokens: of a step.
        clock: of the training.
    """

    def __init__(self, tokens: int, clock: Clock = REAL_CLOCK) -> None:
        self.wake: Event = clock.event("something to tell the daemon")
        """Set when there is something to be sent at once."""
        self.closing: Event = clock.event("the end of the tuning")
        """Set when nothing more is asked."""
        self.reason = ""
        """Why the tuning was ended; "": the training was."""
        self.between: Between | None = None
        """Steps that belong to no measurement, at the end."""
        self.steps = 0
        """That were observed, since the search began."""
        self.own: Setting | None = None
        """The user's knobs: what stays where the daemon knows no better."""
        self._tokens = tokens
        self._lock = threading.Lock()
        self._steps: deque[StepFigures] = deque(maxlen=MOST_STEPS)
        self._losses: deque[tuple[int, float]] = deque(maxlen=MOST_STEPS)
        self._dropped = 0
        self._sequence = 0
        self._current: int | None = None
        """The decision that is carried out."""
        self._offered = 0
        """The newest decision that was asked for."""
        self._trial: int | None = None
        """Of it."""
        self._applied: Applied | None = None
        self._done: tuple[int, Outcome] | None = None
        self._guard: str | None = None
        self._idle = False
        """Whether the last directive said that nobody thinks of anything to be measured soon."""
        self._knobs: Mapping[str, Any] | None = None
        self._answer: Answer | None = None
        self._recall: Recall | None = None
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
                self._done = (self._current, replace(outcome, reason=outcome.reason[:_MOST_SENTENCE]))
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

    def recall(self) -> Recall | None:
        with self._lock:
            recall, self._recall = self._recall, None
            return recall

    def guard(self, reason: str) -> None:
        with self._lock:
            self._guard, self._answer, self._over = reason, None, True
        self.wake.set()

    def idle(self, between: Between) -> None:
        self.between = between

    def stop(self, reason: str) -> None:
        self.reason = reason

    def applied(self, step: int, setting: Setting) -> None:
        with self._lock:
            self._knobs = setting.knobs()
            decided = self._current is not None
            if self._current is not None:
                self._applied = Applied(self._current, step)
        if decided:
            self.wake.set()  # the daemon watches over the machine from now on, not only once it is measured

    def observe(self, stats: StepStats) -> None:
        stall_ms = None if stats.stall_ms is None else {str(cause): ms for cause, ms in stats.stall_ms.items()}
        with self._lock:
            self.steps += 1
            self._dropped += len(self._steps) == MOST_STEPS
            self._steps.append(StepFigures(stats.step, stats.step_ms, stall_ms))

    def hear_loss(self, step: int, loss: float) -> None:
        """Take a loss; one that is not finite is the guard's business."""
        if math.isfinite(loss):
            with self._lock:
                self._dropped += len(self._losses) == MOST_STEPS
                self._losses.append((step, loss))

    def close(self) -> None:
        self.closing.set()
        self.wake.set()

    # --- the courier's thread ----------------------------------------------------------------------------------------

    @property
    def given(self) -> bool:
        """Whether the daemon has a search.

        Raises:
            ZftuneError: there will be none.
            RuntimeError: the daemon is not asked any more.
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

    def report(self, protocol: int, session: str) -> Report:
        """What happened since the last report."""
        with self._lock:
            self._sequence += 1
            steps, losses = tuple(self._steps), tuple(self._losses)
            self._steps.clear()
            self._losses.clear()
            done = self._done
            found = {"applied": self._applied, "guard": self._guard, "dropped": self._dropped, "knobs": self._knobs}
        return Report(
            protocol=protocol,
            session=session,
            sequence=self._sequence,
            steps=steps,
            losses=losses,
            done=None if done is None else Done(done[0], encode(done[1])),
            **found,  # type: ignore[arg-type]
        )

    def begin_session(self, reason: str) -> None:
        """Another daemon, or one that has forgotten: what was asked for before is void.

        Args:
            reason: a sentence.
        """
        with self._lock:
            self._recall = Recall(reason) if self._current is not None or self._answer is not None else None
            self._current = self._answer = self._done = self._applied = None
            self._offered = 0

    def obey(self, orders: Orders) -> None:
        """Take what the daemon says."""
        directive = orders.directive
        with self._lock:
            self._given |= directive.kind != "pause" and orders.incumbent is not None
            self._idle = directive.kind == "pause" or directive.state == _FROZEN
            if self._over:
                return
            if self._done is not None and max(directive.taken, directive.decision - 1) >= self._done[0]:
                self._done = None
            before, self._incumbent = self._incumbent, orders.incumbent or self._incumbent
            if orders.request is not None and orders.incumbent is not None:
                self._ask(directive, orders.request, orders.incumbent, orders.start)
                return
            self._withdraw(directive.reason, changed=before != self._incumbent)
            last = self._incumbent or self.own
            if directive.kind == "stop" and last is None:
                self._none = directive.reason or "the daemon has ended the search"
            elif directive.kind == "stop" and last is not None:
                self._over = True
                self._answer = Answer(None, last, orders.start)

    def fail(self, error: Exception) -> None:
        """There is nothing to be had any more; the training thread hears of it."""
        with self._lock:
            self._broken = error

    def _check(self) -> None:
        if self._broken is not None:
            # Not as it is: an error of the host engine's kind would end the training.
            why = f"{type(self._broken).__name__}: {self._broken}"
            raise RuntimeError(f"the daemon is not asked any more ({why})") from self._broken

    def _ask(self, directive: Directive, request: Request, incumbent: Setting, start: Setting | None) -> None:
        if directive.decision == self._offered:
            return  # it was asked for before
        if self._current is not None:
            self._recall = Recall("the daemon asks for something else", incumbent)
            self._current = None
        self._offered, self._trial, self._done = directive.decision, request.trial, None
        self._answer = Answer(request, incumbent, start)

    def _withdraw(self, reason: str, *, changed: bool) -> None:
        if self._answer is not None:
            reason = reason or "withdrawn before it began"
            self._answer = None
            self._done = (self._offered, Outcome("void", tokens=self._tokens, reason=reason, called_off=True))
        if self._current is not None or changed:
            self._recall = Recall(reason, self._incumbent)


def _setting(knobs: Mapping[str, Any] | None) -> Setting | None:
    return None if knobs is None else decode(Setting, knobs, "directive.incumbent")
