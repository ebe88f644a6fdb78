"""The desk where a search is thought about: what came of a request is taken, and what to ask for next is decided.

While a desk is at work it owns the search and its recorder; in between they are the training thread's. `ThreadDesk`
works beside the training, with Optuna in a process of its own, so that no step waits for a thought or a write;
`InlineDesk` works at once, for tests and replays.
"""

from __future__ import annotations

import logging
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from zenflow import StepStats
from zenflow.clock import REAL_CLOCK, Clock, Thread
from zftune.tuner.background import taking_time
from zftune.tuner.propose import Judge, Proposal, Told, likely
from zftune.tuner.search import Search
from zftune.tuner.settings import Setting
from zftune.tuner.space import Space
from zftune.tuner.states import Between, Outcome, Request, Sampler
from zftune.tuner.thinker import Thinker, ThinkerError

_JOIN_S = 5.0
_logger = logging.getLogger("zftune")


class Recorder(Protocol):
    """Where a search is written down while it goes on."""

    def before(self, search: Search, request: Request) -> str | None:
        """Write down what is about to be applied; why it must not be, or None."""

    def after(self, search: Search, request: Request, outcome: Outcome) -> None:
        """Write down what came of it."""


@dataclass(frozen=True, slots=True)
class Answer:
    """What to do next."""

    request: Request | None
    """Written down as in flight where it may crash; None: the search is over."""
    incumbent: Setting
    start: Setting | None = None
    """What the search began from; None: as was said before."""


@dataclass(frozen=True, slots=True)
class Recall:
    """What is measured does not count any more."""

    reason: str
    incumbent: Setting | None = None
    """To run from now on; None: as before."""


class Desk(ABC):
    """Where whoever carries out a search asks what to do. No call waits."""

    @abstractmethod
    def hand(self, outcome: Outcome | None) -> None:
        """Take what came of the last request (None: there was none), and think of the next; returns at once."""

    @abstractmethod
    def poll(self) -> Answer | None:
        """The answer, once it is there; each once."""

    def recall(self) -> Recall | None:
        """Why what is measured now is to be given up; each once. None: it goes on."""
        return None

    @abstractmethod
    def guard(self, reason: str) -> None:
        """End the search because training goes wrong; whatever is thought of now is not answered."""

    @abstractmethod
    def idle(self, between: Between) -> None:
        """Count steps that belong to no measurement, once the search is over."""

    @abstractmethod
    def stop(self, reason: str) -> None:
        """End the search early; after `close`."""

    def applied(self, step: int, setting: Setting) -> None:  # noqa: B027 - a desk may have no use for it
        """Hear of the step after which knobs hold."""

    def observe(self, stats: StepStats) -> None:  # noqa: B027
        """Hear of a step."""

    def close(self) -> None:  # noqa: B027 - only a desk with a thread has something to end
        """End the work, as soon as that can be; the search is the caller's again."""


class LocalDesk(Desk):
    """Thinks about a search of this process.

    Args:
        search: that is thought about.
        recorder: where it is written down.
    """

    def __init__(self, search: Search, recorder: Recorder | None = None) -> None:
        self._search = search
        self._recorder = recorder
        self._asked: Request | None = None
        self._answer: Answer | None = None

    def idle(self, between: Between) -> None:
        self._search.idle(between)

    def stop(self, reason: str) -> None:
        self._search.stop(reason)

    def _take(self, outcome: Outcome) -> None:
        self._search.tell(outcome)
        if self._recorder is not None and self._asked is not None:
            self._recorder.after(self._search, self._asked, outcome)

    def _put_away(self, outcome: Outcome) -> None:
        self._take(outcome)

    def _go_on(self) -> None:
        """Raises where nobody waits for an answer any more: nothing is written down as in flight then."""

    def _think(self, outcome: Outcome | None) -> Answer:
        search, recorder = self._search, self._recorder
        if outcome is not None:
            self._take(outcome)
        while True:
            request = search.next()
            self._go_on()
            refused = None if recorder is None or request is None else recorder.before(search, request)
            if refused is None:
                self._asked = request
                return Answer(request, search.book.incumbent.setting)
            search.stop(refused)


DeskMaker = Callable[[Search, Recorder | None], Desk]
"""A desk's class, or what stands for one."""


class InlineDesk(LocalDesk):
    """Thinks at once, in the thread that asks."""

    def hand(self, outcome: Outcome | None) -> None:
        self._answer = self._think(outcome)

    def poll(self) -> Answer | None:
        answer, self._answer = self._answer, None
        return answer

    def guard(self, reason: str) -> None:
        self._answer = None
        self._search.guard(reason)


class ThreadDesk(LocalDesk):
    """Thinks in a thread, and lets a process of low priority ask Optuna and the planner.

    Where that process fails, the planner alone goes on, in the thread; where the search fails, it ends with a sentence
    in its notes, and the training goes on.

    Args:
        search: that is thought about.
        recorder: where it is written down.
        thinker: the process, where it was started beforehand; the desk closes it.
        clock: of the training; see `SearchOptions.thinking_s`.
    """

    def __init__(
        self,
        search: Search,
        recorder: Recorder | None = None,
        thinker: Thinker | None = None,
        clock: Clock = REAL_CLOCK,
    ) -> None:
        super().__init__(search, recorder)
        self._clock = clock
        self._thinker = thinker or Thinker(gives_way=not clock.simulated)
        self._closing = False
        self._wrong: str | None = None
        self._busy = False
        self._lock = threading.Lock()
        self._thread: Thread | None = None
        self._ready = search.options.sampler in ("none", "random")  # they need no process
        if not self._ready:
            search.agenda.propose = self._propose

    @property
    def busy(self) -> bool:
        """Whether it thinks: the search is the desk's."""
        return self._busy

    def hand(self, outcome: Outcome | None) -> None:
        self._begin(outcome, ask=True)

    def put_away(self, outcome: Outcome) -> None:
        """Take what came of the last request, and think of nothing; returns at once."""
        self._begin(outcome, ask=False)

    def _begin(self, outcome: Outcome | None, *, ask: bool) -> None:
        self._busy = True
        self._thread = self._clock.thread(partial(self._work, outcome, ask), "zftune-desk")
        self._thread.start()

    def poll(self) -> Answer | None:
        if self._busy or self._answer is None:
            return None
        answer, self._answer = self._answer, None
        if answer.request is None:
            self._thinker.close()
        return answer

    def guard(self, reason: str) -> None:
        with self._lock:
            self._closing = True
            if self._busy:
                self._wrong = reason
            else:
                self._search.guard(reason)
        self._thinker.close()

    def close(self) -> None:
        self._closing = True
        self._thinker.close()
        if self._thread is None:
            return
        self._thread.join(_JOIN_S)
        if self._thread.is_alive():
            _logger.warning("The search's thread has not ended within %g s; it is left behind.", _JOIN_S)

    # --- in the thread -----------------------------------------------------------------------------------------------

    def _work(self, outcome: Outcome | None, ask: bool) -> None:
        answer = None
        try:
            with taking_time(self._clock, self._search.options.thinking_s):
                if ask:
                    self._get_ready()
                    answer = self._think(outcome)
                elif outcome is not None:
                    self._put_away(outcome)
        except _InterruptedError:
            _logger.debug("The search was interrupted while it was thought about.")
        except Exception as error:
            _logger.exception("The search failed; the training goes on under the best knobs so far.")
            self._search.stop(f"The search failed: {type(error).__name__}: {error}.")
            answer = Answer(None, self._search.book.incumbent.setting)
        with self._lock:
            if self._wrong is not None:
                self._search.guard(self._wrong)
                answer = None
            self._answer, self._busy = answer, False

    def _go_on(self) -> None:
        if self._closing:
            raise _InterruptedError

    def _get_ready(self) -> None:
        """Wait for the process to have loaded all that it needs: nothing is measured beside that."""
        if self._ready:
            return
        self._ready = True
        try:
            self._thinker.ready()
        except ThinkerError as error:
            self._fail(error)

    def _propose(self, space: Space, told: Sequence[Told], judge: Judge, *, sampler: Sampler, seed: int) -> Proposal:
        if not self._thinker.closed:
            try:
                return self._thinker.propose(space, told, judge, sampler=sampler, seed=seed)
            except ThinkerError as error:
                self._fail(error)
        return Proposal(likely(space, judge, seed), ())

    def _fail(self, error: ThinkerError) -> None:
        if self._closing:
            raise _InterruptedError from error
        self._thinker.close()
        self._search.remark(f"The planner alone proposes from here on: {error}.")
        _logger.warning("The planner alone proposes settings from here on: %s.", error)


class _InterruptedError(Exception):
    """Nobody waits for the answer any more."""
