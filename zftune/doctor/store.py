"""Where the presets and trials are kept. Nothing is created here."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path

from zftune.doctor.check import Check
from zftune.store.location import locate, network_file_system

_IN_MEMORY = "Without it zftune keeps what it learns in memory, until it ends."


def checks() -> Iterator[Check]:
    """The location by the environment."""
    yield store_check(os.environ, Path.home())


def store_check(environment: Mapping[str, str], home: Path, root: Path = Path("/")) -> Check:
    """Whether the database can be written where it belongs.

    Args:
        environment: $ZFTUNE_DB is a path or a URL of SQLAlchemy; else $XDG_DATA_HOME counts.
        home: of the user.
        root: stands for "/" where the mounts are read.
    """
    name = "store"
    location = locate(environment.get("ZFTUNE_DB", ""), environment, home)
    if location.url is not None:
        kind = location.url.partition("://")[0].partition("+")[0]  # the rest may hold a password
        return Check(name=name, status="note", finding=f"$ZFTUNE_DB names a {kind} server, which was not tried.")
    path, shown = location.path, location.shown
    if path is None:
        return Check(name=name, status="note", finding="$ZFTUNE_DB asks for a database in memory: nothing is kept.")
    existing = next((folder for folder in (path, *path.parents) if _exists(folder)), None)
    fix = "Set $ZFTUNE_DB to a file in a folder that you may write."
    if existing is None or not _writable(existing, path):
        return Check(name=name, status="broken", finding=f"{shown} cannot be written. {_IN_MEMORY}", fix=fix)
    network = network_file_system(existing, root)
    if network is not None:
        return Check(
            name=name,
            status="note",
            finding=f"{shown} is on a network file system ({network}), where SQLite's locks cannot be trusted.",
            fix="Set $ZFTUNE_DB to a local file, or to the URL of a database server.",
        )
    state = "is there and can be written" if existing == path else "can be created"
    return Check(name=name, status="ok", finding=f"{shown} {state}.")


def _exists(path: Path) -> bool:
    try:
        return path.exists()
    except (OSError, ValueError):  # a name that is too long, or a folder that may not be entered
        return False


def _writable(existing: Path, path: Path) -> bool:
    if existing == path:
        return path.is_file() and os.access(path, os.W_OK) and os.access(path.parent, os.W_OK | os.X_OK)
    return existing.is_dir() and os.access(existing, os.W_OK | os.X_OK)
