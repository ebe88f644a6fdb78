"""`Store`: an open database, and what it keeps of machines and models."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING

from zftune.store.locks import RunLocks
from zftune.store.opening import Database
from zftune.store.presets import Presets
from zftune.store.runs import Runs
from zftune.store.tables import HardwareRow, ModelRow, hardware_of, model_of
from zftune.store.types import Hardware, Key, Model, RunRecord, RunState

if TYPE_CHECKING:
    from sqlalchemy.orm import Session


def facts_of(store: Store, key: Key) -> tuple[Model, Hardware]:
    """The model and the machine of a key; only their ids where nothing else is known."""

    def work(session: Session) -> tuple[Model, Hardware]:
        model, hardware = session.get(ModelRow, key.model_id), session.get(HardwareRow, key.hw_id)
        return (
            Model(model_id=key.model_id) if model is None else model_of(model),
            Hardware(hw_id=key.hw_id) if hardware is None else hardware_of(hardware),
        )

    return store._database.read(work)


def goes_on(store: Store, run: RunRecord, now: float) -> bool:
    """Whether the process of a run lives, the one that trains it at least; nothing is closed where it does not."""
    if run.state is RunState.FINISHED:
        return False
    return store.is_trained(run.run_id) or is_written_to(store, run, now)


def is_written_to(store: Store, run: RunRecord, now: float) -> bool:
    """Whether the writer of a run lives: the daemon, or the process that trains."""
    if run.state is not RunState.RUNNING:
        return False
    lives = store._living.lives(run.run_id)
    return run.lease_until_unix_s >= now if lives is None else lives


class Store(Presets, Runs):
    """An open store, from `zftune.store.open_store`. May be used from several threads.

    Every write is one short transaction that is on the disk when the call returns. Writing or reading raises
    `StoreError`, a sentence, where it cannot be done, or a run is another process's now; what was there is as it was.

    Args:
        clock: wall clock of this machine, seconds; on a server all go by the server's.
    """

    def __init__(self, database: Database, path: Path | None, notices: list[str], clock: Callable[[], float]) -> None:
        self._database = database
        self._clock = lambda: clock() + database.ahead_s
        self._living = RunLocks(path)
        self.path = path
        self.notices = notices
        self._file = None if path is None else _file(path)

    @property
    def is_kept(self) -> bool:
        """Whether what is written outlives this process."""
        return self.path is not None or self.is_server

    @property
    def is_there(self) -> bool:
        """Whether the file is still the one that was opened: what is written into one that was removed is lost."""
        return self._file is None or (self.path is not None and _file(self.path) == self._file)

    @property
    def is_server(self) -> bool:
        """Whether it is on a database server, which others share and which may be away."""
        return self._database.is_server

    def patient(self, seconds: float, hurry: threading.Event) -> AbstractContextManager[None]:
        """Wait inside for a database server that is away, at most `seconds`, and for a file while it is locked; `hurry`
        ends it. For a thread that no training waits for.
        """
        return self._database.patient(seconds, hurry)

    def close(self) -> None:
        """Close every connection. What was written stays; runs that are not over are lost, and may be resumed."""
        self._database.close()
        self._living.close()

    def __enter__(self) -> Store:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _file(path: Path) -> tuple[int, int] | None:
    """What tells a file from others; None where there is none."""
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_dev, found.st_ino
