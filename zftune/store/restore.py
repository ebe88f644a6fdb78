"""Bringing a backup of the database back."""

from __future__ import annotations

import sqlite3
from pathlib import Path

from zftune.errors import BadInputError
from zftune.store import files
from zftune.store.errors import StoreError
from zftune.store.location import locate
from zftune.store.opening import Unusable, check, prepare, trusted


def database_file(value: str, home: Path, environment: dict[str, str], root: Path = Path("/")) -> Path:
    """The SQLite file that backups lie beside.

    Raises:
        BadInputError: the store is none.
    """
    location = locate(value, environment, home)
    if location.path is None:
        raise BadInputError(f"{location.shown}: has no backups, allowed is a SQLite file")
    try:
        return trusted(location.path, location.shown, root, [])[0]
    except Unusable as reason:
        raise BadInputError(f"{location.shown}: {reason}, allowed is a local file") from reason


def chosen(path: Path, which: str) -> Path:
    """A backup by its number (1 is the newest) or its file's name.

    Raises:
        BadInputError: there is no such backup.
    """
    found = files.backups(path)
    for number, backup in enumerate(found, 1):
        if which in (str(number), backup.name):
            return backup
    allowed = ", ".join(str(number) for number in range(1, len(found) + 1)) or "nothing, there are no backups"
    raise BadInputError(f"backup '{which[:80]}': allowed is {allowed}")


def restore(path: Path, backup: Path) -> Path | None:
    """Put a backup in the database's place, and bring it to the newest schema.

    Args:
        path: the database; a usable one is backed up first, and programs that have it open go on with what was
            brought back; one that cannot be used is renamed.
        backup: of it.

    Returns:
        Where the database is now that was there before; None if there was none.

    Raises:
        StoreError: it could not be done; the database is as it was.
    """
    try:
        with files.locked(path):
            state = files.state_of(backup)
            check(state)
            if state.kind != "ours":
                raise Unusable("is empty")
            before = _make_room(path, backup)
            files.copy(backup, path)
        prepare(path)
    except Unusable as reason:
        raise StoreError(f"{backup.name} {reason}") from reason
    except OSError as error:
        raise StoreError(f"{backup.name} could not be brought back ({error.strerror or error})") from error
    except sqlite3.Error as error:
        raise StoreError(f"{backup.name} could not be brought back ({error})") from error
    return before


def _make_room(path: Path, backup: Path) -> Path | None:
    state = files.state_of(path)
    try:
        check(state)
    except Unusable:
        return files.set_aside(path)
    if state.kind == "empty":
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        return None
    return files.back_up(path, spare=backup)
