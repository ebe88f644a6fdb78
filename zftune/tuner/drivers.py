"""Who prepares a training's search and thinks about it: this process, the daemon (`remote`), or nobody."""

from __future__ import annotations

import atexit
import functools
import logging
import os
import queue
import weakref
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from zenflow import ZenFlowError
from zenflow.optimizer import ZenFlowOptimizer
from zftune.store.account import Account, Count, Counter
from zftune.store.location import meant_by
from zftune.tuner.evidence import Gain
from zftune.tuner.executor import Executor, TuningContext, live_search
from zftune.tuner.messages import conclusion
from zftune.tuner.recorder import StoreRecorder
from zftune.tuner.search import Search
from zftune.tuner.setup import Preparation, Prepared
from zftune.tuner.space import Setting
from zftune.tuner.states import Remark
from zftune.tuner.training_info import SINGLE_RANK, TuneRequest, WarmupStats, WorldInfo
from zftune.tuner.worker import Background, SearchWorker, ThreadWorker

if TYPE_CHECKING:
    from zftune.store.store import Store


_JOIN_S = 5.0
_OPEN_S = 120.0  # longer than a lock is waited for, or a server
_INFO, _WARNING = 20, 30
_logger = logging.getLogger("zftune")


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """What a tuner has seen at its end."""

    steps: int
    """That were taken since it was attached."""
    begins: int
    """Steps before its search begins, at least."""
    over: bool
    """Whether the search came to its end."""
    given_up: bool
    """Whether it was given up, with a reason that was said."""
    remarks: tuple[Remark, ...]
    """What was found out beside the search."""
    count: Count
    """What this process has counted since it was attached."""
    incumbent: Setting | None
    """The best setting so far; None: the search has not begun here."""
    gain: Gain | None
    """Of it, as this process last heard."""


Said = tuple[int, str]
"""A sentence, and the level that it is logged with."""


class SearchDriver(ABC):
    """Prepares a search, thinks about it, and says what came of it. No method waits but the last two."""

    asks_daemon = False
    """Whether a daemon thinks."""
    search: Search | None = None
    """What was found; None: it is not in this process, or there is none."""

    def count_by(self, counter: Counter) -> None:  # noqa: B027 - whose search is here hears of it in a scene
        """Hear who counts what the run takes, before anything else."""

    run_id: str | None = None
    """In the store; None: it is not this process that writes it down, or nothing is."""

    @abstractmethod
    def prepare(self, seen: WarmupStats) -> None:
        """Make the search of a training that warmed up, in a thread."""

    @property
    @abstractmethod
    def begun(self) -> bool:
        """Whether it is being made, or is there."""

    @property
    @abstractmethod
    def ready(self) -> bool:
        """Whether the search is there. Raises what making it raised."""

    @property
    def registered(self) -> bool:
        """Whether the daemon that thinks has answered for the training."""
        return False

    @abstractmethod
    def live(self, scene: TuningContext) -> Executor | None:
        """The search in a training, once it is there; None: not yet. Raises what making it raised."""

    @property
    def is_kept(self) -> bool:
        """Whether what the run finds can be read after it, as far as is known."""
        return True

    @abstractmethod
    def said(self) -> list[Said]:
        """What is to be told since this was asked last."""

    @abstractmethod
    def end(self, ended: Ended) -> Iterator[Said]:
        """Say what came of it, and write it down; once nobody thinks any more."""

    @abstractmethod
    def close(self) -> None:
        """Let go of everything."""


class NullDriver(SearchDriver):
    """Never begins a search."""

    def prepare(self, seen: WarmupStats) -> None:
        pass

    @property
    def begun(self) -> bool:
        return False

    @property
    def ready(self) -> bool:
        return False

    def live(self, scene: TuningContext) -> None:
        return None

    def said(self) -> list[Said]:
        return []

    def end(self, ended: Ended) -> Iterator[Said]:
        return iter(())

    def close(self) -> None:
        pass


@dataclass(frozen=True, slots=True)
class _Left:
    """What a training leaves open."""

    preparing: Background[Prepared]
    store: _OwnStore | None
    """To be closed, too."""
    pid: int

    def close(self) -> None:
        if os.getpid() != self.pid:
            return  # in a fork's child it is the parent's
        self.preparing.join(_JOIN_S)
        if self.preparing.done and not self.preparing.failed and self.preparing.result.recorder is not None:
            self.preparing.result.recorder.interrupt()
        if self.store is not None:
            self.store.close()


class _OwnStore:
    """The user's own store, open or being opened: a training waits for no server, nor does its end."""

    def __init__(self) -> None:
        self._opening = Background(_user_store, "zftune-store")
        if meant_by(os.environ).url is None:
            self._opening.join(_OPEN_S)

    def __call__(self) -> Store:
        """It, once it is open."""
        self._opening.join(_OPEN_S)
        return self._opening.result

    def close(self) -> None:
        """Close it, if it is open; until it is, it holds nothing."""
        if self._opening.done and not self._opening.failed:
            self._opening.result.close()


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


class LocalDriver(SearchDriver):
    """Search in this process.

    Args:
        store: where runs and presets are remembered; None: the user's own; False: nowhere.
    """

    def __init__(
        self,
        optimizer: ZenFlowOptimizer,
        wishes: TuneRequest,
        store: Store | Literal[False] | None,
        company: WorldInfo = SINGLE_RANK,
        name: str | None = None,
    ) -> None:
        self._own_store = _OwnStore() if store is None else None
        self._clock = optimizer.device.clock
        # Mostly that loads modules: in simulated time it would be many a step that no training loses.
        self._preparing_s = wishes.search.thinking_s or 0.0
        opened = self._own_store or (None if not store else lambda: store)
        self._preparation = Preparation(optimizer, wishes, opened, company, name)
        self._preparing: Background[Prepared] | None = None
        self._prepared: Prepared | None = None
        self._counter: Counter | None = None
        self._told: set[Said] = set()
        self._finalizer: weakref.finalize[Any, Any] | None = None
        _close_at_exit()

    def count_by(self, counter: Counter) -> None:
        self._counter = counter

    def prepare(self, seen: WarmupStats) -> None:
        preparation, counter = self._preparation, self._counter  # not this, or the thread would keep it

        def work() -> Prepared:
            close_thrown_away()  # its run may be the one to be gone on with
            prepared = preparation.prepare(seen)
            if prepared.recorder is not None and counter is not None:
                prepared.recorder.follow(lambda: counter.count)  # from now on a kill loses nothing of it
            return prepared

        self._preparing = Background(work, "zftune-prepare", self._clock, self._preparing_s)
        left = _Left(self._preparing, self._own_store, os.getpid())
        self._finalizer = weakref.finalize(self, _thrown_away.put, left)
        self._finalizer.atexit = False

    @property
    def begun(self) -> bool:
        return self._preparing is not None

    @property
    def ready(self) -> bool:
        return self._made() is not None

    def live(self, scene: TuningContext) -> Executor | None:
        prepared = self._made()
        if prepared is None:
            return None
        self._take(prepared)
        return live_search(scene, prepared.search, recorder=prepared.recorder, worker=self._worker)

    @property
    def is_kept(self) -> bool:
        recorder = None if self._prepared is None else self._prepared.recorder
        return recorder is None or recorder.is_kept

    def said(self) -> list[Said]:
        found = [(_INFO, one) for one in self._preparation.notices]
        if self._prepared is not None and self._prepared.sentence:
            found.append((_INFO, self._prepared.sentence))
        return self._new([*found, *((_WARNING, one) for one in self._wrong)])

    @property
    def _wrong(self) -> list[str]:
        """What the store could not do."""
        recording = None if self._prepared is None else self._prepared.recording
        return [] if recording is None else recording.wrong

    def _new(self, found: list[Said]) -> list[Said]:
        new = [one for one in dict.fromkeys(found) if one not in self._told]
        self._told.update(new)
        return new

    def end(self, ended: Ended) -> Iterator[Said]:
        if self._finalizer is not None:
            self._finalizer.detach()
        if self._prepared is None:
            self._take_unused()
        prepared, search = self._prepared, self.search
        if search is not None or not (ended.given_up or ended.steps == 0):  # else its reason was said, or nothing was
            over = ended.over or ended.given_up
            recorder = None if prepared is None else prepared.recorder
            account = Account() if recorder is None else recorder.account
            count = ended.count if not account.process else account.total
            yield conclusion(search, count, steps=ended.steps, begins=ended.begins, over=over)
        for remark in ended.remarks:
            if search is not None:
                search.remember(remark)
        if prepared is not None and prepared.recording is not None:
            unfinished = not ended.over and not prepared.search.is_settled
            if not prepared.recording.finish_soon(prepared.search, unfinished=unfinished):
                yield _WARNING, "The database server does not answer: the end of the run is not kept."
            yield from self._new([(_WARNING, one) for one in self._wrong])

    def close(self) -> None:
        if self._own_store is not None:
            self._own_store.close()

    def _made(self) -> Prepared | None:
        if self._preparing is None or not self._preparing.done:
            return None
        try:
            return self._preparing.result
        except ZenFlowError as error:  # of the search: as it is it would end the training
            raise RuntimeError(f"the search cannot be made: {error}") from error

    def _take(self, prepared: Prepared) -> None:
        self._prepared, self.search = prepared, prepared.search
        self.run_id = None if prepared.recorder is None else prepared.recorder.run_id

    def _take_unused(self) -> None:
        """A search that was prepared and never began has to say goodbye as well."""
        if self._preparing is None:
            return
        self._preparing.join(_JOIN_S)
        if self._preparing.done and not self._preparing.failed:
            self._take(self._preparing.result)
            self._preparing.result.search.stop("The tuning ended before its search began.")

    def _worker(self, search: Search, recorder: StoreRecorder | None) -> SearchWorker:
        return ThreadWorker(search, recorder, self._clock)


def _user_store() -> Store:
    from zftune.store import open_store

    return open_store()
