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
from typing import Protocol

from zftune.tuner.propose import Judge, Proposal, Told, likely
from zftune.tuner.search import Search
from zftune.tuner.settings import Setting
from zftune.tuner.space import Space
from zftune.tuner.states import Outcome, Request, Sampler
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


class Desk(ABC):
    """Thinks about one search.

    Args:
        search: that is thought about.
        recorder: where it is written down.
    """

    def __init__(self, search: Search, recorder: Recorder | None = None) -> None:
        self._search = search
        self._recorder = recorder
        self._asked: Request | None = None
        self._answer: Answer | None = None

    @abstractmethod
    def hand(self, outcome: Outcome | None) -> None:
        """Take what came of the last request (None: there was none), and think of the next; returns at once."""

    @abstractmethod
    def poll(self) -> Answer | None:
        """The answer, once it is there; each once."""

    @abstractmethod
    def guard(self, reason: str) -> None:
        """End the search because training goes wrong; whatever is thought of now is not answered."""

    def close(self) -> None:  # noqa: B027 - only a desk with a thread has something to end
        """End the work, as soon as that can be; the search is the caller's again."""

    def _think(self, outcome: Outcome | None) -> Answer:
        search, recorder = self._search, self._recorder
        if outcome is not None:
            search.tell(outcome)
            if recorder is not None and self._asked is not None:
                recorder.after(search, self._asked, outcome)
        while True:
            request = search.next()
            refused = None if recorder is None or request is None else recorder.before(search, request)
            if refused is None:
                self._asked = request
                return Answer(request, search.book.incumbent.setting)
            search.stop(refused)


DeskMaker = Callable[[Search, Recorder | None], Desk]
"""A desk's class, or what stands for one."""


class InlineDesk(Desk):
    """Thinks at once, in the thread that asks."""

    def hand(self, outcome: Outcome | None) -> None:
        self._answer = self._think(outcome)

    def poll(self) -> Answer | None:
        answer, self._answer = self._answer, None
        return answer

    def guard(self, reason: str) -> None:
        self._answer = None
        self._search.guard(reason)


class ThreadDesk(Desk):
    """Thinks in a thread, and lets a process of low priority ask Optuna and the planner.

    Where that process fails, the planner alone goes on, in the thread; where the search fails, it ends with a sentence
    in its notes, and the training goes on.

    Args:
        search: that is thought about.
        recorder: where it is written down.
        thinker: the process, where it was started beforehand; the desk closes it.
    """

    def __init__(self, search: Search, recorder: Recorder | None = None, thinker: Thinker | None = None) -> None:
        super().__init__(search, recorder)
        self._thinker = thinker or Thinker()
        self._closing = False
        self._wrong: str | None = None
        self._busy = False
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._ready = search.options.sampler in ("none", "random")  # they need no process
        if not self._ready:
            search.agenda.propose = self._propose

    def hand(self, outcome: Outcome | None) -> None:
        self._busy = True
        self._thread = threading.Thread(target=self._work, args=(outcome,), name="zftune-desk", daemon=True)
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

    def _work(self, outcome: Outcome | None) -> None:
        answer = None
        try:
            self._get_ready()
            answer = self._think(outcome)
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
