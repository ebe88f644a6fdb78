"""Connections to a file, to memory and to a database server; and what their errors mean."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import threading
import weakref
from functools import partial
from pathlib import Path
from typing import Any

from sqlalchemy import URL, Connection, Engine, NullPool, StaticPool, create_engine, event, make_url, text
from sqlalchemy.exc import IntegrityError, OperationalError, SQLAlchemyError

from zftune.errors import MissingPackageError

BUSY_TIMEOUT_S = 60.0
CONNECT_S = 5
"""Whole seconds, as libpq takes them: a server is given up that does not let anybody in by then."""
ANSWER_S = 10.0
"""Most seconds of a transaction on a server; its connection is given up that takes longer."""
WRITES = "zftune_writes"
"""Option of a connection that will write."""
_CLASHES = ("40001", "40P01")
"""PostgreSQL's serialization failure and deadlock: the transaction is to be run again."""


def _json(value: Any) -> str:
    try:
        return json.dumps(value, allow_nan=False)
    except (ValueError, TypeError) as error:  # which psycopg, that calls this itself, passes on as they are
        raise SQLAlchemyError(str(error)) from error


def file_engine(path: Path) -> Engine:
    """Connections to a SQLite file that `zftune.store.opening` has prepared (WAL is a property of the file)."""
    url = URL.create("sqlite", database=str(path))
    engine = create_engine(url, connect_args={"timeout": BUSY_TIMEOUT_S}, json_serializer=_json)
    return _sqlite(engine)


def memory_engine() -> Engine:
    """A database that ends with this process."""
    options: Any = {"poolclass": StaticPool, "connect_args": {"check_same_thread": False}}
    return _sqlite(create_engine("sqlite://", json_serializer=_json, **options))


def server_engine(url: str, answer_s: float | None = None) -> Engine:
    """Connections to a database server: one for each transaction, so that a fleet holds none that it does not use.

    `url` has passed `check_server`; a transaction may take `answer_s`, by default `ANSWER_S`.

    Raises:
        SQLAlchemyError: the URL is none.
        ImportError: its driver is not installed.
    """
    wanted = make_url(url).set(drivername="postgresql+psycopg")
    answer_s = ANSWER_S if answer_s is None else answer_s
    limits = {"connect_timeout": CONNECT_S, "application_name": "zftune"}
    given = {name: value for name, value in limits.items() if name not in wanted.query}
    try:
        options: dict[str, Any] = {"json_serializer": _json, "use_native_hstore": False}  # one question less
        engine = create_engine(wanted, poolclass=NullPool, connect_args=given, **options)
    except ModuleNotFoundError as error:
        raise MissingPackageError("psycopg", "PostgreSQL") from error

    def watch(connection: Any, record: Any) -> None:
        record.info["zftune_limit"] = limit = threading.Timer(answer_s, _hang_up, (connection,))
        limit.daemon = True
        limit.start()

    def over(_: Any, record: Any) -> None:
        record.info.pop("zftune_limit").cancel()

    event.listen(engine, "connect", watch, insert=True)  # before SQLAlchemy asks the server what it is
    event.listen(engine, "close", over)
    event.listen(engine, "begin", partial(_on_server_begin, answer_s=answer_s))
    return engine


def cause_of(error: BaseException) -> str:
    """The first line of what the driver said: without the statement, the values and any URL."""
    original = getattr(error, "orig", None) or error
    lines = str(original).strip().splitlines() or [type(original).__name__]
    return lines[0][:200].rstrip(".")


def state_of(error: SQLAlchemyError) -> str | None:
    """A server's five letters for what went wrong; None: it said nothing."""
    state: str | None = getattr(getattr(error, "orig", None), "sqlstate", None)
    return state


def is_clash(error: SQLAlchemyError) -> bool:
    """Whether a transaction may succeed if it is run again: another one was before it."""
    return isinstance(error, IntegrityError) or state_of(error) in _CLASHES


def is_lost(error: SQLAlchemyError) -> bool:
    """Whether there is no connection to the server (any more)."""
    state = state_of(error)
    away = state is None or state.startswith(("08", "57P"))  # 57P: it shuts down, it crashed, it starts up
    return isinstance(error, OperationalError) and away


def _on_server_begin(connection: Connection, answer_s: float) -> None:
    # Neither a statement nor a client that was switched off holds anything for longer than its client waits.
    connection.execute(_LIMITS, {"limit": str(round(answer_s * 1e3))})


def _hang_up(connection: Any) -> None:
    """End a connection whose server says nothing: whoever waits for it hears that it is lost."""
    from psycopg import Error

    with contextlib.suppress(Error, OSError), socket.socket(fileno=os.dup(connection.fileno())) as found:
        found.shutdown(socket.SHUT_RDWR)  # unless it was closed meanwhile


_LIMITS = text(
    "SELECT set_config('statement_timeout', :limit, true),"
    " set_config('idle_in_transaction_session_timeout', :limit, true)"
)


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
    writes = connection.get_execution_options().get(WRITES, False)
    connection.exec_driver_sql("BEGIN IMMEDIATE" if writes else "BEGIN")
