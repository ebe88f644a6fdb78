"""`Store`: an open database."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import TracebackType

from zftune.store.engine import Database
from zftune.store.living import Living
from zftune.store.presets import Presets
from zftune.store.runs import Runs


class Store(Presets, Runs):
    """An open store, from `zftune.store.open_store`. May be used from several threads.

    Every write is one short transaction that is on the disk when the call returns. Writing or reading raises
    `StoreError`, a sentence, where it cannot be done; what was there before is as it was.

    Args:
        database: opened and of the newest schema.
        path: of its file, if it is one.
        notices: a sentence for each thing that is not as it should be.
        clock: wall clock, seconds.
    """

    def __init__(self, database: Database, path: Path | None, notices: list[str], clock: Callable[[], float]) -> None:
        self._database = database
        self._clock = clock
        self._living = Living(path)
        self.path = path
        self.notices = notices

    @property
    def is_kept(self) -> bool:
        """Whether what is written outlives this process."""
        return self.path is not None or self._database.engine.dialect.name != "sqlite"

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
