"""A search that is thought about beside the training, in its own process."""

from __future__ import annotations

import atexit
import contextlib
import functools
import logging
import os
import queue
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from zenflow import ZenFlowError
from zenflow.clock import Clock
from zenflow.optimizer import ZenFlowOptimizer
from zftune.tuner.background import Background
from zftune.tuner.conclusion import Followed, conclusion
from zftune.tuner.counsel import Counsel, Ended, Said, Scene
from zftune.tuner.facts import ALONE, Company, Seen, Wishes
from zftune.tuner.live import LiveSearch
from zftune.tuner.preparing import Preparation, Prepared
from zftune.tuner.search import Search
from zftune.tuner.thinker import Thinker, ThinkerError, gentle_share
from zftune.tuner.thinking import Desk, Recorder, ThreadDesk

if TYPE_CHECKING:
    from zftune.store.store import Store

_JOIN_S = 5.0
_WARNING = 30
_logger = logging.getLogger("zftune")


@dataclass(frozen=True, slots=True)
class _Left:
    """What a training leaves open."""

    preparing: Background[Prepared]
    thinker: Thinker
    store: Store | None
    """To be closed, too."""
    pid: int

    def close(self) -> None:
        if os.getpid() != self.pid:
            return  # in a fork's child it is the parent's
        self.thinker.close()
        self.preparing.join(_JOIN_S)
        if self.preparing.done and not self.preparing.failed and self.preparing.result.recorder is not None:
            self.preparing.result.recorder.interrupt()
        if self.store is not None:
            self.store.close()


_thrown_away: queue.SimpleQueue[_Left] = queue.SimpleQueue()
"""Of trainings that were thrown away: a finalizer may do no more than put it here."""


def close_thrown_away() -> None:
    """Close what trainings have left open that were thrown away; before the next search, or where the process ends."""
    while True:
        try:
            left = _thrown_away.get_nowait()
        except queue.Empty:
            return
        try:
            left.close()
        except Exception:
            _logger.exception("What an earlier training has left could not be closed.")


@functools.cache
def _close_at_exit() -> None:
    """Once, before a tuner asks for the same: these are called in reverse."""
    atexit.register(close_thrown_away)


class OwnCounsel(Counsel):
    """Thinks in this process, with Optuna in one of its own.

    Args:
        optimizer: that trains.
        wishes: of the user.
        store: where runs and presets are remembered; None: the user's own; False: nowhere.
        company: ranks that it trains with.
    """

    def __init__(
        self,
        optimizer: ZenFlowOptimizer,
        wishes: Wishes,
        store: Store | Literal[False] | None,
        company: Company = ALONE,
    ) -> None:
        self._own_store = store is None
        self._store = _user_store() if store is None else store or None
        self._clock, self._thinking_s = optimizer.device.clock, wishes.search.thinking_s
        self._thinker = _thinker_beside(self._clock)
        with contextlib.suppress(ThinkerError):  # the planner thinks alone then, and the notes say so
            self._thinker.start()  # it loads while the warm-up lasts
        self._preparation = Preparation(optimizer, wishes, self._store, self._thinker, company)
        self._preparing: Background[Prepared] | None = None
        self._prepared: Prepared | None = None
        self._told = 0
        self._finalizer: weakref.finalize[Any, Any] | None = None
        _close_at_exit()

    def prepare(self, seen: Seen) -> None:
        preparation = self._preparation  # not this, or the thread would keep it

        def work() -> Prepared:
            close_thrown_away()  # its run may be the one to be gone on with
            return preparation.prepare(seen)

        self._preparing = Background(work, "zftune-prepare", self._clock, self._thinking_s)
        left = _Left(self._preparing, self._thinker, self._store if self._own_store else None, os.getpid())
        self._finalizer = weakref.finalize(self, _thrown_away.put, left)
        self._finalizer.atexit = False

    @property
    def begun(self) -> bool:
        return self._preparing is not None

    @property
    def ready(self) -> bool:
        return self._made() is not None

    def live(self, scene: Scene) -> LiveSearch | None:
        prepared = self._made()
        if prepared is None:
            return None
        self._take(prepared)
        return LiveSearch(
            scene.optimizer,
            prepared.search,
            tokens=scene.tokens,
            recorder=prepared.recorder,
            disturbance=scene.disturbance,
            guard=scene.guard,
            desk=self._desk,
            on_change=scene.on_change,
            changes=scene.changes,
        )

    def said(self) -> list[str]:
        found = list(self._preparation.notices)
        if self._prepared is not None and self._prepared.sentence:
            found.append(self._prepared.sentence)
        new, self._told = found[self._told :], len(found)
        return new

    def end(self, ended: Ended) -> Iterator[Said]:
        if self._finalizer is not None:
            self._finalizer.detach()
        self._thinker.close()  # who waits for its answer would keep this waiting
        if self._prepared is None:
            self._take_unused()
        prepared, search = self._prepared, self.search
        if search is not None or not (ended.given_up or ended.steps == 0):  # else its reason was said, or nothing was
            over = ended.over or ended.given_up
            remembered = prepared is not None and prepared.recorder is not None
            yield conclusion(search, Followed(ended.steps, ended.begins, over=over, remembered=remembered))
        for remark in ended.remarks:
            if search is not None:
                search.remark(remark)
        if prepared is not None and prepared.recording is not None:
            prepared.recording.finish(prepared.search, unfinished=not ended.over)
            yield from ((_WARNING, notice) for notice in prepared.recording.notices)

    def close(self) -> None:
        self._thinker.close()
        if self._own_store and self._store is not None:
            self._store.close()

    def _made(self) -> Prepared | None:
        if self._preparing is None or not self._preparing.done:
            return None
        try:
            return self._preparing.result
        except ZenFlowError as error:  # of the search: as it is it would end the training
            raise RuntimeError(f"the search cannot be made: {error}") from error

    def _take(self, prepared: Prepared) -> None:
        self._prepared, self.search = prepared, prepared.search

    def _take_unused(self) -> None:
        """A search that was prepared and never began has to say goodbye as well."""
        if self._preparing is None:
            return
        self._preparing.join(_JOIN_S)
        if self._preparing.done and not self._preparing.failed:
            self._take(self._preparing.result)
            self._preparing.result.search.stop("The tuning ended before its search began.")

    def _desk(self, search: Search, recorder: Recorder | None) -> Desk:
        return ThreadDesk(search, recorder, self._thinker, self._clock)


def _thinker_beside(clock: Clock) -> Thinker:
    """What thinks beside a training; where its time is simulated, it does not go on meanwhile."""
    return Thinker(gives_way=False) if clock.simulated else Thinker(share=gentle_share())


def _user_store() -> Store:
    from zftune.store import open_store

    return open_store()
