"""Opening a database. Whatever is wrong with it, a store comes out: at worst in memory, with a sentence about it."""

from __future__ import annotations

import contextlib
import os
import sqlite3
import stat
from collections.abc import Iterator, Mapping
from pathlib import Path

from sqlalchemy import Connection, Engine, inspect, text
from sqlalchemy.exc import SQLAlchemyError

from zftune.store import files
from zftune.store.engine import Database, cause_of, file_engine, memory_engine, server_engine
from zftune.store.location import Location, locate, network_file_system, node_local
from zftune.store.schema import HEAD, REVISIONS, upgrade
from zftune.store.tables import Base

_IN_MEMORY = "what zftune learns is kept in memory until it ends"
_MEMORY = "the store in memory"
_ADVISORY_LOCK = 0x7A6674756E65  # "zftune"


class Unusable(Exception):  # noqa: N818 - a finding that becomes a notice
    """A database that is not to be used; the message says why, and goes on after its name."""


class Unwritable(Unusable):
    """A database that cannot be written, and perhaps can be read."""


def open_database(
    value: str, environment: Mapping[str, str], home: Path | None, root: Path
) -> tuple[Database, Path | None, list[str]]:
    """Open the database that is asked for, or the best that can be had in its place.

    Args:
        value: a path, a URL, or "" for the default.
        environment: for the default.
        home: of the user, if there is one.
        root: stands for "/" where the mounts are read.

    Returns:
        The database, its file if it is one, and a sentence for each thing to know.
    """
    notices: list[str] = []
    location = locate(value, environment, home)
    try:
        if location.url is not None:
            return Database(_server(location.url), location.shown), None, notices
        if location.path is None:
            notices.append(_asked_for_memory(location, home))
        else:
            path, shown = trusted(location.path, location.shown, root, notices)
            with _reasons():
                prepare(path)
                return Database(file_engine(path), shown), path, notices
    except Unusable as reason:
        shown = location.shown if not notices else "the store"
        copied = _copy_in_memory(location.path) if isinstance(reason, Unwritable) else None
        also = "" if copied is None else "what it holds is read, and "
        notices.append(f"{shown} {reason}: {also}{_IN_MEMORY}")
        if copied is not None:
            return Database(copied, _MEMORY, serial=True), None, notices
    engine = memory_engine()
    Base.metadata.create_all(engine)
    return Database(engine, _MEMORY, serial=True), None, notices


def prepare(path: Path) -> None:
    """Make a SQLite file ready for use: there, sound, of the newest schema, with a write-ahead log.

    Raises:
        Unusable: it is not to be touched.
        OSError, sqlite3.Error, SQLAlchemyError: it could not be made ready; it is as it was.
    """
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    with files.locked(path):
        state = files.state_of(path)
        check(state)
        if not os.access(path.parent, os.W_OK) or (path.exists() and not os.access(path, os.W_OK)):
            raise Unwritable("cannot be written")
        if state.revision == HEAD:
            return
        if state.kind == "empty":
            os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
        else:
            files.back_up(path)
        with contextlib.closing(sqlite3.connect(path, timeout=60)) as connection:
            connection.execute("PRAGMA journal_mode=WAL")
        engine = file_engine(path)
        try:
            _upgrade(engine)
        finally:
            engine.dispose()


def check(state: files.FileState) -> None:
    """Refuse what is no database of this or an older zftune.

    Raises:
        Unusable: says what is wrong.
    """
    if state.kind == "corrupt":
        raise Unusable(f"is corrupt ({state.detail}) and was left as it is (zftune presets restore)")
    if state.kind == "foreign":
        raise Unusable("is another program's database and was left as it is")
    if state.revision is not None and state.revision not in REVISIONS:
        raise Unusable(
            f"has the schema {_short(state.revision)} of a newer zftune (this one knows {HEAD}) and was not opened"
        )


@contextlib.contextmanager
def _reasons() -> Iterator[None]:
    """Whatever goes wrong becomes a reason."""
    try:
        yield
    except OSError as error:
        raise Unwritable(f"cannot be used ({error.strerror or error})") from error
    except Unusable:
        raise
    except Exception as error:
        raise Unusable(f"cannot be used ({cause_of(error)})") from error


def _asked_for_memory(location: Location, home: Path | None) -> str:
    if home is None and location.shown != "$ZFTUNE_DB":
        return f"there is no home folder: {_IN_MEMORY}"
    return f"$ZFTUNE_DB asks for a database in memory: {_IN_MEMORY}"


def trusted(path: Path, shown: str, root: Path, notices: list[str]) -> tuple[Path, str]:
    """The path itself, or one on a disk of this node where it is on a network file system, and how to call it.

    Raises:
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


def _copy_in_memory(path: Path | None) -> Engine | None:
    """A copy of a database that cannot be written; None if there is none, or not one that can be used as it is."""
    try:
        if path is None or not path.is_file():
            return None
        engine = memory_engine()
        with engine.connect() as connection:
            files.read_frozen(path, connection.connection.driver_connection)
        with engine.connect() as connection:
            return engine if connection.execute(_VERSION).scalar() == HEAD else None
    except (OSError, ValueError, sqlite3.Error, SQLAlchemyError):  # it was said already that it cannot be used
        return None


def _server(url: str) -> Engine:
    with _reasons():
        engine = server_engine(url)
        with engine.connect() as connection:
            tables = set(inspect(connection).get_table_names())
            found = [] if "alembic_version" not in tables else connection.execute(_VERSION).scalars().all()
        check(files.FileState("ours" if found else "empty", revision=str(found[0]) if found else None))
        if not found or found[0] != HEAD:
            _upgrade(engine)
        return engine


_VERSION = text("SELECT version_num FROM alembic_version")


def _upgrade(engine: Engine) -> None:
    with engine.execution_options(zftune_writes=True).begin() as connection:
        _wait_for_turn(connection)
        upgrade(connection)


def _wait_for_turn(connection: Connection) -> None:
    """On a server, the lock that a file has beside it; it ends with the transaction."""
    if connection.dialect.name == "postgresql":
        connection.execute(text("SELECT pg_advisory_xact_lock(:key)"), {"key": _ADVISORY_LOCK})


def _short(revision: str) -> str:
    return repr(revision[:32])
