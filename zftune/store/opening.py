"""Opening a database: its file, lock, backups, connections and tables.

Whatever is wrong, a store comes out, at worst in memory.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import glob
import hashlib
import json
import os
import re
import socket
import sqlite3
import stat
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypeVar

from sqlalchemy import (
    URL,
    Connection,
    Engine,
    NullPool,
    StaticPool,
    create_engine,
    event,
    insert,
    inspect,
    make_url,
    select,
    text,
)
from sqlalchemy.exc import IntegrityError, OperationalError, SQLAlchemyError
from sqlalchemy.orm import Session

from zftune.errors import BadInputError, MissingPackageError, StoreError
from zftune.store.location import Location, check_server, locate, network_file_system, node_local
from zftune.store.tables import Base, SchemaRow

KEPT_BACKUPS = 3
LOCK_TIMEOUT_S = 60.0
"""A process that is stopped while it holds the lock must not stop every other one."""
_LOCK_POLL_S = 0.01

_MAGIC = b"SQLite format 3\0"
_BACKUP = re.compile(r"\.backup-\d{8}T\d{6}\.\d{6}Z$")


@dataclass(frozen=True, slots=True)
class FileState:
    """What lies at a path."""

    kind: Literal["empty", "ours", "foreign", "corrupt"]
    schema: int | None = None
    detail: str = ""


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold the exclusive lock of a database, which has a file of its own beside it. Raises OSError: the lock's file
    cannot be written, or another process holds it for longer than anything takes.
    """
    flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
    descriptor = os.open(path.with_name(path.name + ".lock"), flags, 0o600)
    try:
        _lock(descriptor)
        try:
            yield
        finally:
            fcntl.flock(descriptor, fcntl.LOCK_UN)  # closing would leave it to a child that was forked meanwhile
    finally:
        os.close(descriptor)


def _lock(descriptor: int) -> None:
    until = time.monotonic() + LOCK_TIMEOUT_S
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            if time.monotonic() > until:
                raise OSError(errno.EAGAIN, "another process does not give its lock back") from error
            time.sleep(_LOCK_POLL_S)
        else:
            return


def file_state(path: Path) -> FileState:
    """Look at a database; only a write that a killed process left unfinished is undone. Raises OSError: it cannot be
    read.
    """
    if not path.exists() or path.stat().st_size == 0:
        return FileState("empty")
    with path.open("rb") as file:
        if file.read(len(_MAGIC)) != _MAGIC:
            return FileState("corrupt", detail="it is not a SQLite database")
    try:
        try:
            return _examine(path, "ro")
        except sqlite3.OperationalError as error:
            if error.sqlite_errorcode & 0xFF != sqlite3.SQLITE_READONLY:
                raise
            return _examine(path, "rw")  # a killed process left its journal, which only a writer may roll back
    except sqlite3.OperationalError as error:
        raise OSError(0, _one_line(str(error))) from error
    except (sqlite3.DatabaseError, TypeError) as error:
        return FileState("corrupt", detail=_one_line(str(error)))


def _examine(path: Path, mode: str) -> FileState:
    with contextlib.closing(sqlite3.connect(f"{path.absolute().as_uri()}?mode={mode}", uri=True)) as connection:
        (verdict,) = connection.execute("PRAGMA quick_check(1)").fetchone()
        if verdict != "ok":
            return FileState("corrupt", detail=_one_line(verdict))
        tables = {name for (name,) in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
        if SchemaRow.__tablename__ not in tables:
            return FileState("foreign" if tables else "empty")
        (number,) = connection.execute(str(_SCHEMA)).fetchone()
        return FileState("ours", schema=number)


def backups(path: Path) -> list[Path]:
    """The backups of a database, the newest first."""
    found = [one for one in path.parent.glob(f"{glob.escape(path.name)}.backup-*") if _BACKUP.search(one.name)]
    return sorted(found, reverse=True)


def back_up(path: Path, *, spare: Path | None = None) -> Path:
    """Copy a database as it is after its last transaction, and keep the three newest copies, and `spare`. Raises
    OSError, sqlite3.Error: it cannot be copied.
    """
    now = time.time()
    moment = time.strftime("%Y%m%dT%H%M%S", time.gmtime(now)) + f".{int(now % 1 * 1e6):06d}Z"
    target = path.with_name(f"{path.name}.backup-{moment}")
    partial = target.with_name(target.name + ".partial")
    try:
        copy(path, partial)
        partial.replace(target)
    finally:
        partial.unlink(missing_ok=True)
    for old in backups(path)[KEPT_BACKUPS:]:
        if old != spare:
            old.unlink(missing_ok=True)
    return target


def copy(source: Path, target: Path) -> None:
    """Write a database over another one, in one transaction of it. Raises sqlite3.Error: it cannot be copied."""
    os.close(os.open(target, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
    with (
        contextlib.closing(sqlite3.connect(f"{source.absolute().as_uri()}?mode=ro", uri=True, timeout=60)) as read,
        contextlib.closing(sqlite3.connect(target, timeout=60)) as write,
    ):
        read.backup(write)


def set_aside(path: Path) -> Path:
    """Rename a database that cannot be used, with its log; returns its new name. Raises OSError if it cannot be."""
    moment = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime())
    aside = path.with_name(f"{path.name}.replaced-{moment}")
    for suffix in ("-wal", "-shm"):
        log = path.with_name(path.name + suffix)
        if log.exists():
            log.rename(aside.with_name(aside.name + suffix))
    path.rename(aside)
    return aside


def _one_line(text: str) -> str:
    return " ".join(text.split())[:200]


# --- connections ------------------------------------------------------------------------------------------------------


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
    """Connections to a SQLite file that `prepare` has made ready (WAL is a property of the file)."""
    url = URL.create("sqlite", database=str(path))
    engine = create_engine(url, connect_args={"timeout": BUSY_TIMEOUT_S}, json_serializer=_json)
    return _sqlite(engine)


def memory_engine() -> Engine:
    """A database that ends with this process."""
    options: Any = {"poolclass": StaticPool, "connect_args": {"check_same_thread": False}}
    return _sqlite(create_engine("sqlite://", json_serializer=_json, **options))


def server_engine(url: str, answer_s: float | None = None) -> Engine:
    """Connections to a database server: one for each transaction, so that a fleet holds none that it does not use.

    `url` has passed `check_server`; a transaction may take `answer_s`, by default `ANSWER_S`. Raises SQLAlchemyError:
    the URL is none; ImportError: its driver is not installed.
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


def _sqlstate(error: SQLAlchemyError) -> str | None:
    """PostgreSQL's five-letter code of an error; None: the server sent none."""
    state: str | None = getattr(getattr(error, "orig", None), "sqlstate", None)
    return state


def is_clash(error: SQLAlchemyError) -> bool:
    """Whether a transaction may succeed if it is run again: another one was before it."""
    return isinstance(error, IntegrityError) or _sqlstate(error) in _CLASHES


def is_lost(error: SQLAlchemyError) -> bool:
    """Whether there is no connection to the server (any more)."""
    state = _sqlstate(error)
    away = state is None or state.startswith(("08", "57P"))  # 57P: it shuts down, it crashed, it starts up
    return isinstance(error, OperationalError) and away


def is_locked(error: SQLAlchemyError) -> bool:
    """Whether a SQLite file was locked by others for longer than a statement waits."""
    code = getattr(getattr(error, "orig", None), "sqlite_errorcode", 0)
    return bool(code & 0xFF == sqlite3.SQLITE_BUSY)


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


# --- databases --------------------------------------------------------------------------------------------------------


_MIGRATION_S = 60.0

_T = TypeVar("_T")
_ATTEMPTS = 10  # of as many processes that save a preset of one name at once, the last
_PAUSES_S = (0.1, 0.25, 0.5, 1.0)


class Database:
    """An engine, and how it is written to.

    Args:
        serial: whether threads take turns, since they share one connection.
    """

    def __init__(self, engine: Engine, shown: str, *, serial: bool = False) -> None:
        self.engine = engine
        self.shown = shown
        self.is_server = engine.dialect.name != "sqlite"
        self.ahead_s = 0.0
        """By how much a server's clock is before this machine's: several machines go by the server's."""
        snapshot = {"isolation_level": "REPEATABLE READ", "postgresql_readonly": True} if self.is_server else {}
        self._reading = engine.execution_options(**snapshot)
        self._writing = engine.execution_options(**{WRITES: True})
        self._turn: Any = threading.RLock() if serial else nullcontext()
        self._patience = threading.local()

    @contextlib.contextmanager
    def patient(self, seconds: float, hurry: threading.Event) -> Iterator[None]:
        """Wait inside, in this thread, for a server that is away, at most `seconds`, and for a file as long as others
        have it locked; `hurry` ends both.
        """
        self._patience.until_s, self._patience.hurry = time.monotonic() + seconds, hurry
        try:
            yield
        finally:
            self._patience.hurry = None

    def write(self, work: Callable[[Session], _T]) -> _T:
        """Run `work` in a transaction of its own and commit it; again where another process wrote the same row first.
        Raises StoreError: it could not be kept; nothing of it was, unless the sentence says that this is not known.
        """
        pauses, clashes = iter(_PAUSES_S), 0
        while True:
            commits = False
            try:
                with self._turn, Session(self._writing, expire_on_commit=False) as session, session.begin():
                    result = work(session)
                    session.flush()
                    commits = True
                return result
            except SQLAlchemyError as error:
                clashes += is_clash(error)
                if self.is_server and commits and is_lost(error):
                    raise self._failed("was lost during a write, and may have kept it", error) from error
                again = is_clash(error) or self._wait(error, pauses)
                if not again or clashes == _ATTEMPTS:
                    raise self._failed("could not be written", error) from error

    def read(self, work: Callable[[Session], _T]) -> _T:
        """Run `work` on one snapshot."""
        pauses = iter(_PAUSES_S)
        while True:
            try:
                with self._turn, Session(self._reading) as session, session.begin():
                    return work(session)
            except SQLAlchemyError as error:
                if not self._wait(error, pauses):
                    raise self._failed("could not be read", error) from error

    def close(self) -> None:
        """Close every connection."""
        self.engine.dispose()

    def _wait(self, error: SQLAlchemyError, pauses: Iterator[float]) -> bool:
        """Wait a moment where a later attempt may succeed and somebody is patient; False: it was long enough."""
        hurry: threading.Event | None = getattr(self._patience, "hurry", None)
        if hurry is None or not (is_lost(error) if self.is_server else is_locked(error)):
            return False
        pause_s = next(pauses, _PAUSES_S[-1])
        if self.is_server:  # a file's lock ends with its holder at the latest, a server may never come back
            pause_s = min(pause_s, self._patience.until_s - time.monotonic())
        return pause_s > 0 and not hurry.wait(pause_s)

    def _failed(self, what: str, error: SQLAlchemyError) -> StoreError:
        return StoreError(f"{self.shown} {what} ({cause_of(error)})")


SCHEMA = 1
"""Number of the tables as they are in `zftune.store.tables`; another one is not opened."""
_SCHEMA = select(SchemaRow.number)


def database_file(value: str, home: Path, environment: dict[str, str]) -> Path:
    """The SQLite file that backups lie beside. Raises BadInputError: the store is none."""
    location = locate(value, environment, home)
    if location.path is None:
        raise BadInputError(f"{location.shown} has no backups: only a SQLite file has")
    try:
        return trusted(location.path, location.shown, Path("/"), [])[0]
    except Unusable as reason:
        raise BadInputError(f"{location.shown}: {reason}; it must be a local file") from reason


def chosen(path: Path, which: str) -> Path:
    """A backup by its number (1 is the newest) or its file's name. Raises BadInputError: there is no such backup."""
    found = backups(path)
    for number, backup in enumerate(found, 1):
        if which in (str(number), backup.name):
            return backup
    others = "--list shows those that there are" if found else "none was made yet"
    raise BadInputError(f"there is no backup '{which[:80]}': {others}")


def restore(path: Path, backup: Path) -> Path | None:
    """Put a backup in the database's place.

    A usable database is backed up first, and programs that have it open continue with the backup; an unusable one is
    renamed. Returns where the database is now that was there before; None if there was none. Raises StoreError: it
    could not be done; the database is as it was.
    """
    try:
        with locked(path):
            state = file_state(backup)
            check(state)
            if state.kind != "ours":
                raise Unusable("is empty")
            before = _make_room(path, backup)
            copy(backup, path)
        prepare(path)
    except Unusable as reason:
        raise StoreError(f"{backup.name} {reason}") from reason
    except OSError as error:
        raise StoreError(f"{backup.name} could not be brought back ({error.strerror or error})") from error
    except sqlite3.Error as error:
        raise StoreError(f"{backup.name} could not be brought back ({error})") from error
    return before


def _make_room(path: Path, backup: Path) -> Path | None:
    state = file_state(path)
    try:
        check(state)
    except Unusable:
        return set_aside(path)
    if state.kind == "empty":
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        return None
    return back_up(path, spare=backup)


_IN_MEMORY = "what zftune learns is kept in memory until it ends"


class Unusable(Exception):  # noqa: N818 - a finding that becomes a notice
    """A database that is not to be used; the message says why, and goes on after its name."""


def open_database(
    value: str,
    environment: Mapping[str, str],
    home: Path | None,
    root: Path,
    clock: Callable[[], float] = time.time,
) -> tuple[Database, Path | None, list[str]]:
    """Open the database at `value`, a path, a URL, or "" for the default, or the best replacement.

    `root` replaces "/" where the mounts are read; `clock` is this machine's wall clock, s. Returns the database, its
    file if it is one, and a sentence for each thing to know.
    """
    notices: list[str] = []
    location = locate(value, environment, home)
    try:
        if location.url is not None:
            return _server(location, clock), None, notices
        if location.path is None:
            no_home = home is None and location.shown != "$ZFTUNE_DB"
            why = "there is no home folder" if no_home else "$ZFTUNE_DB asks for a database in memory"
            notices.append(f"{why}: {_IN_MEMORY}")
        else:
            path, shown = trusted(location.path, location.shown, root, notices)
            with _reasons():
                prepare(path)
                return Database(file_engine(path), shown), path, notices
    except BadInputError as error:
        notices.append(f"{error}: {_IN_MEMORY}")
    except Unusable as reason:
        shown = location.shown if not notices else "the store"
        notices.append(f"{shown} {reason}: {_IN_MEMORY}")
    engine = memory_engine()
    Base.metadata.create_all(engine)
    return Database(engine, "the store in memory", serial=True), None, notices


def prepare(path: Path) -> None:
    """Make a SQLite file ready for use: there, sound, with its tables and a write-ahead log. Raises Unusable: it is not
    to be touched; OSError, sqlite3.Error, SQLAlchemyError: it could not be made ready; it is as it was.
    """
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    with locked(path):
        state = file_state(path)
        check(state)
        if not os.access(path.parent, os.W_OK) or (path.exists() and not os.access(path, os.W_OK)):
            raise Unusable("cannot be written")
        if state.schema == SCHEMA:
            return
        os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
        with contextlib.closing(sqlite3.connect(path, timeout=60)) as connection:
            connection.execute("PRAGMA journal_mode=WAL")
        engine = file_engine(path)
        try:
            _make_tables(engine)
        finally:
            engine.dispose()


def check(state: FileState) -> None:
    """Refuse what is no database of this zftune. Raises Unusable: says what is wrong."""
    if state.kind == "corrupt":
        raise Unusable(f"is corrupt ({state.detail}) and was left as it is (zftune presets restore)")
    if state.kind == "foreign":
        raise Unusable("is another program's database and was left as it is")
    if state.schema not in (None, SCHEMA):
        raise Unusable(f"has schema {state.schema} of another zftune (this one's is {SCHEMA}) and was not opened")


@contextlib.contextmanager
def _reasons() -> Iterator[None]:
    """Whatever goes wrong becomes a reason."""
    try:
        yield
    except OSError as error:
        raise Unusable(f"cannot be used ({error.strerror or error})") from error
    except Unusable:
        raise
    except Exception as error:
        raise Unusable(f"cannot be used ({cause_of(error)})") from error


def trusted(path: Path, shown: str, root: Path, notices: list[str]) -> tuple[Path, str]:
    """The path itself, or one on a disk of this node where it is on a network file system, and how to call it. Raises
    Unusable: it is on a network file system, and this node has no disk for it.
    """
    kind = network_file_system(path, root)
    if kind is None:
        return path, shown
    fault = f"is on a network file system ({kind}), where SQLite's locks cannot be trusted"
    for local in node_local(os.getuid(), root):
        if _own_folder(local.parent):
            notices.append(f"{shown} {fault}: {local} of this node is used instead")
            return local, str(local)
    raise Unusable(fault)


def _own_folder(folder: Path) -> bool:
    """Whether it is a real folder that only this user may enter; made where it is missing."""
    try:
        with contextlib.suppress(FileExistsError):
            folder.mkdir(mode=0o700)
        found = folder.lstat()
    except OSError:
        return False
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid() and not found.st_mode & 0o077


def _server(location: Location, clock: Callable[[], float]) -> Database:
    assert location.url is not None
    check_server(location.url)
    with _reasons():
        database = Database(server_engine(location.url), location.shown)
        with database.engine.connect() as connection:
            has_tables = inspect(connection).has_table(SchemaRow.__tablename__)
            found = connection.execute(_SCHEMA).scalar_one() if has_tables else None
            database.ahead_s = connection.execute(_NOW).scalar_one() - clock()
        check(FileState("ours" if has_tables else "empty", schema=found))
        if not has_tables:
            _make_tables(server_engine(location.url, _MIGRATION_S))
        return database


_NOW = text("SELECT CAST(extract(epoch FROM clock_timestamp()) AS double precision)")


def _make_tables(engine: Engine) -> None:
    with engine.execution_options(**{WRITES: True}).begin() as connection:
        wait_for_turn(connection)
        Base.metadata.create_all(connection)
        if connection.execute(_SCHEMA).first() is None:  # else somebody else had the turn before
            connection.execute(insert(SchemaRow).values(number=SCHEMA))


def wait_for_turn(connection: Connection) -> None:
    """Take the lock of whoever makes a server's tables. A transaction that writes to a file is alone in any case."""
    if connection.dialect.name == "postgresql":
        key = int.from_bytes(hashlib.sha256(b"zftune").digest()[:8], signed=True)
        connection.execute(text("SELECT pg_advisory_xact_lock(:key)"), {"key": key})
