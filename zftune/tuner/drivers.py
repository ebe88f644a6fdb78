"""Drivers prepare a training's search and run its worker: in this process, in the daemon (`remote`), or not at all."""

from __future__ import annotations

import atexit
import logging
import os
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from zenflow import ZenFlowError
from zenflow.optimizer import ZenFlowOptimizer
from zftune.background import Background
from zftune.store.account import Count, Counter
from zftune.store.location import meant_by
from zftune.tuner.evidence import Gain
from zftune.tuner.executor import Executor, TuningContext, live_search
from zftune.tuner.messages import conclusion
from zftune.tuner.search import Search
from zftune.tuner.setup import SINGLE_RANK, Prepared, Reader, TuneRequest, WarmupStats, WorldInfo, prepare
from zftune.tuner.space import Setting
from zftune.tuner.states import Remark

if TYPE_CHECKING:
    from zftune.store.store import Store

_JOIN_S = 5.0
_OPEN_S = 120.0  # longer than a lock is waited for, or a server
_logger = logging.getLogger("zftune")
Said = tuple[int, str]
"""A sentence, and the level that it is logged with."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """What a tuner has seen at its end, since it was attached; its search begins after so many steps, at least."""

    steps: int
    begins: int
    over: bool
    given_up: bool
    remarks: tuple[Remark, ...]
    count: Count
    incumbent: Setting | None
    gain: Gain | None


class SearchDriver:
    """The interface of drivers, and the one that never begins a search. No method waits but the last two."""

    asks_daemon = False
    registered = False
    """Whether the daemon has answered for the training."""
    begun = False
    """Whether the search is being made, or is there."""
    search: Search | None = None
    """None: it is not in this process, or there is none."""
    run_id: str | None = None
    """In the store; None: it is not this process that writes it down, or nothing is."""

    def prepare(self, seen: WarmupStats, counter: Counter) -> None:
        """Make the search of a training that warmed up, in a thread; `counter` is that of the run."""

    def live(self, scene: TuningContext) -> Executor | None:
        """The search in a training, once it is there; None: not yet. Raises what making it raised."""
        return None

    def said(self) -> list[Said]:
        return []

    def end(self, ended: Ended) -> Iterator[Said]:
        """Write the result down and report it; once no worker is at work any more."""
        return iter(())

    def close(self) -> None:
        """Let go of everything."""


class _OwnStore:
    """The user's own store, open or being opened: a training waits for no server, nor does its end."""

    def __init__(self) -> None:
        from zftune.store import open_store

        self._opening = Background(open_store, "zftune-store")
        if meant_by(os.environ).url is None:
            self._opening.join(_OPEN_S)

    def __call__(self) -> Store:
        self._opening.join(_OPEN_S)
        return self._opening.result

    def close(self) -> None:
        if self._opening.done and not self._opening.failed:
            self._opening.result.close()


_preparations: list[tuple[weakref.ref[LocalDriver], Background[Prepared], _OwnStore | None, int]] = []
"""Of drivers that have not ended, with the process that each is of."""


@atexit.register  # before a tuner asks for the same: these are called in reverse
def close_thrown_away() -> None:
    """Close what thrown-away trainings have left open; before the next search, or where the process ends."""
    for entry in [one for one in _preparations if one[0]() is None]:
        _preparations.remove(entry)
        _, preparing, store, pid = entry
        if os.getpid() != pid:
            continue  # in a fork's child it is the parent's
        try:
            preparing.join(_JOIN_S)
            if preparing.done and not preparing.failed and preparing.result.recorder is not None:
                preparing.result.recorder.interrupt()
            if store is not None:
                store.close()
        except Exception:
            _logger.exception("What an earlier training has left could not be closed.")


class LocalDriver(SearchDriver):
    """Searches in this process; `store` remembers runs and presets: None: the user's own; False: nothing does."""

    def __init__(
        self,
        optimizer: ZenFlowOptimizer,
        wishes: TuneRequest,
        store: Store | Literal[False] | None,
        company: WorldInfo = SINGLE_RANK,
        name: str | None = None,
    ) -> None:
        self._own_store = _OwnStore() if store is None else None
        self._open = self._own_store or (None if not store else lambda: store)
        self._clock = optimizer.device.clock
        # Mostly that loads modules: in simulated time it would be many a step that no training loses.
        self._preparing_s = wishes.search.thinking_s or 0.0
        self._reader = Reader(optimizer, wishes, remembered=self._open is not None, company=company, name=name)
        self._preparing: Background[Prepared] | None = None
        self._prepared: Prepared | None = None
        self._told: set[Said] = set()

    def prepare(self, seen: WarmupStats, counter: Counter) -> None:
        self.begun = True
        reader, opened = self._reader, self._open  # not this, or the thread would keep it

        def work() -> Prepared:
            close_thrown_away()  # its run may be the one to be resumed
            store = None if opened is None else opened()
            prepared = prepare(reader.facts(seen), store)
            if prepared.recorder is not None:
                prepared.recorder.follow(lambda: counter.count)  # from now on a kill loses nothing of it
            return prepared

        self._preparing = Background(work, "zftune-prepare", self._clock, self._preparing_s)
        _preparations.append((weakref.ref(self), self._preparing, self._own_store, os.getpid()))

    def live(self, scene: TuningContext) -> Executor | None:
        if self._preparing is None or not self._preparing.done:
            return None
        try:
            prepared = self._preparing.result
        except ZenFlowError as error:  # of the search: as it is it would end the training
            raise RuntimeError(f"the search cannot be made: {error}") from error
        self._take(prepared)
        return live_search(scene, prepared.search, recorder=prepared.recorder)

    def said(self) -> list[Said]:
        prepared, found = self._prepared, [(logging.INFO, one) for one in self._reader.notices]
        for part in () if prepared is None else (prepared.recording, prepared.recorder):
            found += [(logging.WARNING, one) for one in part.notices] if part is not None else []
        new = [one for one in dict.fromkeys(found) if one not in self._told]
        self._told.update(new)
        return new

    def end(self, ended: Ended) -> Iterator[Said]:
        _preparations[:] = [one for one in _preparations if one[1] is not self._preparing]
        if self._prepared is None and self._preparing is not None:  # it was prepared, and never began
            self._preparing.join(_JOIN_S)
            if self._preparing.done and not self._preparing.failed:
                self._take(self._preparing.result)
                self._preparing.result.search.stop("The tuning ended before its search began.")
        prepared, search, count = self._prepared, self.search, ended.count
        if prepared is not None and prepared.recorder is not None and prepared.recorder.account.process:
            count = prepared.recorder.account.total
        if search is not None or not (ended.given_up or ended.steps == 0):  # else its reason was logged
            over = ended.over or ended.given_up
            yield conclusion(search, count, steps=ended.steps, begins=ended.begins, over=over)
        for remark in ended.remarks:
            if search is not None:
                search.remember(remark)
        if prepared is not None and prepared.recording is not None:
            unfinished = not ended.over and not prepared.search.is_settled
            if not prepared.recording.finish_soon(prepared.search, unfinished=unfinished):
                yield logging.WARNING, "The database server does not answer: the end of the run is not kept."
            yield from (one for one in self.said() if one[0] == logging.WARNING)

    def close(self) -> None:
        if self._own_store is not None:
            self._own_store.close()

    def _take(self, prepared: Prepared) -> None:
        self._prepared, self.search = prepared, prepared.search
        self.run_id = None if prepared.recorder is None else prepared.recorder.run_id
