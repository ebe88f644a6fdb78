"""The SQLite file on disk: its lock, its state, its backups."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import sqlite3
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

KEPT_BACKUPS = 3
LOCK_TIMEOUT_S = 60.0
"""A process that is stopped while it holds the lock must not stop every other one."""
_LOCK_POLL_S = 0.01

_MAGIC = b"SQLite format 3\0"
_VERSION_TABLE = "alembic_version"
_BACKUP = re.compile(r"\.backup-\d{8}T\d{6}\.\d{6}Z$")


@dataclass(frozen=True, slots=True)
class FileState:
    """What lies at a path."""

    kind: Literal["empty", "ours", "foreign", "corrupt"]
    revision: str | None = None
    detail: str = ""


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold the exclusive lock of a database, which has a file of its own beside it.

    Raises:
        OSError: the lock's file cannot be written, or another process holds it for longer than anything takes.
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


def state_of(path: Path) -> FileState:
    """Look at a database without changing it, but for a write that a killed process has left half done: it is undone.

    Raises:
        OSError: it cannot be read.
    """
    if not path.exists() or path.stat().st_size == 0:
        return FileState("empty")
    with path.open("rb") as file:
        if file.read(len(_MAGIC)) != _MAGIC:
            return FileState("corrupt", detail="it is not a SQLite database")
    try:
        try:
            return _looked_into(path, "ro")
        except sqlite3.OperationalError as error:
            if error.sqlite_errorcode & 0xFF != sqlite3.SQLITE_READONLY:
                raise
            # Who was killed in the midst of a write has left its journal, which only a writer may play back.
            return _looked_into(path, "rw")
    except sqlite3.OperationalError as error:
        raise OSError(0, _one_line(str(error))) from error
    except (sqlite3.DatabaseError, TypeError) as error:
        return FileState("corrupt", detail=_one_line(str(error)))


def _looked_into(path: Path, mode: str) -> FileState:
    with contextlib.closing(sqlite3.connect(f"{path.absolute().as_uri()}?mode={mode}", uri=True)) as connection:
        (verdict,) = connection.execute("PRAGMA quick_check(1)").fetchone()
        if verdict != "ok":
            return FileState("corrupt", detail=_one_line(verdict))
        tables = {name for (name,) in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
        if _VERSION_TABLE not in tables or (tables > {_VERSION_TABLE} and "preset" not in tables):
            return FileState("foreign" if tables else "empty")
        row = connection.execute(f"SELECT version_num FROM {_VERSION_TABLE}").fetchone()
        return FileState("ours", revision=None if row is None else str(row[0]))


def backups(path: Path) -> list[Path]:
    """The backups of a database, the newest first."""
    found = [one for one in path.parent.glob(f"{_escaped(path.name)}.backup-*") if _BACKUP.search(one.name)]
    return sorted(found, reverse=True)


def back_up(path: Path, *, spare: Path | None = None) -> Path:
    """Copy a database as it is after its last transaction, and keep the three newest copies.

    Args:
        path: the database.
        spare: a backup that stays, however old.

    Raises:
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
    """Write a database over another one, in one transaction of it.

    Raises:
        sqlite3.Error: it cannot be copied.
    """
    os.close(os.open(target, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
    with (
        contextlib.closing(sqlite3.connect(f"{source.absolute().as_uri()}?mode=ro", uri=True, timeout=60)) as read,
        contextlib.closing(sqlite3.connect(target, timeout=60)) as write,
    ):
        read.backup(write)


def set_aside(path: Path) -> Path:
    """Rename a database that cannot be used, with its log; returns its new name.

    Raises:
        OSError: it cannot be renamed.
    """
    moment = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime())
    aside = path.with_name(f"{path.name}.replaced-{moment}")
    for suffix in ("-wal", "-shm"):
        log = path.with_name(path.name + suffix)
        if log.exists():
            log.rename(aside.with_name(aside.name + suffix))
    path.rename(aside)
    return aside


def _escaped(name: str) -> str:
    return re.sub(r"([\[*?])", r"[\1]", name)


def _one_line(text: str) -> str:
    return " ".join(text.split())[:200]
