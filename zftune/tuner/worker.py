"""Workers take the outcome of a request and choose the next one.

While a worker is at work it owns the search and its recorder; in between they are the training thread's. `ThreadWorker`
works beside the training, so that no step waits for a write.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from zenflow import StepStats
from zenflow.clock import REAL_CLOCK, Clock
from zftune.background import Background
from zftune.tuner import messages
from zftune.tuner.evidence import Gain
from zftune.tuner.record import StoreRecorder
from zftune.tuner.search import Search
from zftune.tuner.space import Setting
from zftune.tuner.states import Outcome, Request

_JOIN_S = 5.0
_logger = logging.getLogger("zftune")


@dataclass(frozen=True, slots=True)
class Answer:
    """What to do next."""

    request: Request | None
    """Written down as in flight where it may crash; None: the search is over."""
    incumbent: Setting
    start: Setting | None = None
    """What the search began from; None: as before."""
    gain: Gain | None = None
    """Of the incumbent over it."""


@dataclass(frozen=True, slots=True)
class Withdraw:
    """What is measured does not count any more; `incumbent` runs from now on, if it is another one."""

    reason: str
    incumbent: Setting | None = None
    gain: Gain | None = None


class SearchWorker(Protocol):
    """Where an executor asks what to do. No call waits."""

    def hand(self, outcome: Outcome | None) -> None:
        """Take the outcome of the last request (None: there was none), and choose the next; returns at once."""

    def poll(self) -> Answer | None:
        """The answer, once it is there; each once."""

    def recall(self) -> Withdraw | None:
        """Why the present measurement is to be given up; each once. None: it goes on."""
        return None

    def guard(self, reason: str) -> None:
        """End the search because training goes wrong; an answer under way is dropped."""

    def stop(self, reason: str) -> None:
        """End the search early; after `close`. `reason` "": the training has ended."""

    def applied(self, step: int, setting: Setting) -> None:
        """Knobs hold after a step."""

    def observe(self, stats: StepStats) -> None:
        """A step is over."""

    def hear_loss(self, step: int, loss: float) -> None:
        """A step's loss is known; one that is not finite is the guard's business."""

    def close(self) -> None:
        """End the work, as soon as that can be; the search is the caller's again."""


DeskMaker = Callable[[Search, StoreRecorder | None], SearchWorker]


class ThreadWorker(SearchWorker):
    """Searches in a thread. Where the search fails, it ends with a reason, and the training goes on.

    `keep` is called when a setting was adopted: the process may be killed before the run ends.
    """

    def __init__(
        self,
        search: Search,
        recorder: StoreRecorder | None = None,
        clock: Clock = REAL_CLOCK,
        keep: Callable[[Search], None] | None = None,
    ) -> None:
        self._search, self._recorder, self._clock, self._keep = search, recorder, clock, keep
        self._asked: Request | None = None
        self._thinking: Background[Answer | None] | None = None
        self._closing = False
        self._wrong = ""

    @property
    def busy(self) -> bool:
        """Whether it thinks: the search is the worker's."""
        return self._thinking is not None and not self._thinking.done

    def hand(self, outcome: Outcome | None, *, ask: bool = True) -> None:
        """`ask`: whether to choose the next request, too."""
        work = partial(self._think, outcome, ask=ask)
        self._thinking = Background(work, "zftune-desk", self._clock, self._search.options.thinking_s)

    def poll(self) -> Answer | None:
        if self._thinking is None or self.busy:
            return None
        thinking, self._thinking = self._thinking, None
        return thinking.result

    def applied(self, step: int, setting: Setting) -> None:
        if self._recorder is not None:
            self._recorder.curve.change(step, setting.knobs())

    def observe(self, stats: StepStats) -> None:
        if self._recorder is not None:
            self._recorder.curve.step(stats.step, stats.step_ms, stats.coverage)

    def hear_loss(self, step: int, loss: float) -> None:
        if self._recorder is not None and math.isfinite(loss):
            self._recorder.curve.loss(step, loss)

    def stop(self, reason: str) -> None:
        if not self._search.is_settled:
            self._search.stop(reason or messages.ENDED_EARLY, early=True)

    def guard(self, reason: str) -> None:
        self._closing, self._wrong = True, reason
        self._end_guarded()

    def _end_guarded(self) -> None:
        if self._wrong and not self.busy:
            self._search.guard(self._wrong)
            self._wrong, self._thinking = "", None

    def close(self) -> None:
        self._closing = True
        if self._recorder is not None:
            self._recorder.hurry()
        if self._thinking is not None:
            self._thinking.join(_JOIN_S)
        if self.busy:
            _logger.warning("The search's thread has not ended within %g s; it is left behind.", _JOIN_S)
        self._end_guarded()

    # --- in the thread -----------------------------------------------------------------------------------------------

    def _think(self, outcome: Outcome | None, *, ask: bool = True) -> Answer | None:
        search, recorder = self._search, self._recorder
        try:
            if outcome is not None:
                adopted = len(search.book.adoptions)
                search.tell(outcome)
                if recorder is not None and self._asked is not None:
                    recorder.after(search, self._asked, outcome)
                if self._keep is not None and len(search.book.adoptions) > adopted:
                    self._keep(search)
            while ask:
                request = search.next()
                if self._closing:  # nobody waits for an answer: nothing is written down as in flight
                    return None
                refused = None if recorder is None or request is None else recorder.before(search, request)
                if refused is None:
                    self._asked = request
                    return Answer(request, search.book.incumbent.setting, gain=search.book.gain)
                search.stop(refused)
            return None
        except Exception as error:
            _logger.exception("The search failed; the training goes on under the best settings so far.")
            search.stop(f"The search failed: {type(error).__name__}: {error}.")
            return Answer(None, search.book.incumbent.setting, gain=search.book.gain)
