"""Connections and transactions. A write is one short transaction that is acknowledged after its commit."""

from __future__ import annotations

import json
import os
import threading
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from sqlalchemy import URL, Connection, Engine, StaticPool, create_engine, event
from sqlalchemy.exc import IntegrityError, SQLAlchemyError
from sqlalchemy.orm import Session

from zftune.store.errors import StoreError

BUSY_TIMEOUT_S = 60.0

_T = TypeVar("_T")
_WRITES = "zftune_writes"
_ATTEMPTS = 3
_json = partial(json.dumps, allow_nan=False)


class Database:
    """An engine, and how it is written to.

    Args:
        engine: of `file_engine`, `memory_engine` or `server_engine`.
        shown: how to call it in sentences.
        serial: whether threads take turns, since they share one connection.
    """

    def __init__(self, engine: Engine, shown: str, *, serial: bool = False) -> None:
        self.engine = engine
        self.shown = shown
        self._writing = engine.execution_options(**{_WRITES: True})
        self._turn: Any = threading.RLock() if serial else nullcontext()

    def write(self, work: Callable[[Session], _T]) -> _T:
        """Run `work` in a transaction of its own and commit it; again where another process wrote the same row first.

        Raises:
            StoreError: it could not be kept; nothing of it was.
        """
        for attempt in range(1, _ATTEMPTS + 1):
            try:
                with self._turn, Session(self._writing, expire_on_commit=False) as session, session.begin():
                    return work(session)
            except IntegrityError as error:
                if attempt == _ATTEMPTS:
                    raise self._failed("could not be written", error) from error
            except SQLAlchemyError as error:
                raise self._failed("could not be written", error) from error
        raise AssertionError("unreachable")

    def read(self, work: Callable[[Session], _T]) -> _T:
        """Run `work` on one snapshot.

        Raises:
            StoreError: it could not be read.
        """
        try:
            with self._turn, Session(self.engine) as session, session.begin():
                return work(session)
        except SQLAlchemyError as error:
            raise self._failed("could not be read", error) from error

    def close(self) -> None:
        """Close every connection."""
        self.engine.dispose()

    def _failed(self, what: str, error: SQLAlchemyError) -> StoreError:
        return StoreError(f"{self.shown} {what} ({cause_of(error)})")


def file_engine(path: Path) -> Engine:
    """Connections to a SQLite file that `zftune.store.opening` has prepared (WAL is a property of the file)."""
    url = URL.create("sqlite", database=str(path))
    engine = create_engine(url, connect_args={"timeout": BUSY_TIMEOUT_S}, json_serializer=_json)
    return _sqlite(engine)


def memory_engine() -> Engine:
    """A database that ends with this process."""
    options: Any = {"poolclass": StaticPool, "connect_args": {"check_same_thread": False}}
    return _sqlite(create_engine("sqlite://", json_serializer=_json, **options))


def server_engine(url: str) -> Engine:
    """Connections to a database server.

    Raises:
        SQLAlchemyError, ImportError: the URL is none, or its driver is missing.
    """
    return create_engine(url, json_serializer=_json, pool_pre_ping=True)


def cause_of(error: BaseException) -> str:
    """The first line of what the driver said: without the statement, the values and any URL."""
    original = getattr(error, "orig", None) or error
    lines = str(original).strip().splitlines() or [type(original).__name__]
    return lines[0][:200].rstrip(".")


def _sqlite(engine: Engine) -> Engine:
    event.listen(engine, "connect", _on_connect)
    event.listen(engine, "begin", _on_begin)
    # A forked child must not use, nor close, its parent's connections.
    alive = weakref.ref(engine)

    def forget() -> None:
        forked = alive()
        if forked is not None and not isinstance(forked.pool, StaticPool):
            forked.dispose(close=False)

    os.register_at_fork(after_in_child=forget)
    return engine


def _on_connect(connection: Any, _: Any) -> None:
    connection.isolation_level = None  # the driver would begin transactions of its own, and not at once
    cursor = connection.cursor()
    cursor.execute("PRAGMA foreign_keys=ON")
    cursor.execute("PRAGMA synchronous=FULL")
    cursor.execute("PRAGMA trusted_schema=OFF")
    cursor.close()


def _on_begin(connection: Connection) -> None:
    # IMMEDIATE waits for its turn before it reads: two that read first could not both go on to write.
    writes = connection.get_execution_options().get(_WRITES, False)
    connection.exec_driver_sql("BEGIN IMMEDIATE" if writes else "BEGIN")
