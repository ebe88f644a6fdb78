"""`zftune uninstall`: what zftune has left on this machine, and its removal."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated

import typer

from zftune.errors import ZftuneError

_PACKAGE = "The package itself goes with: pip uninstall zftune"


def uninstall(
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Remove it.")] = False,
) -> None:
    """Tell what zftune keeps on this machine, and where; with --yes, remove it.

    Presets and past runs go with it. Without --yes nothing is changed.
    """
    found = list(_kept(os.environ))
    for path, what in found:
        typer.echo(f"{_size(path):>9}  {path}  ({what})")
    if not found:
        typer.echo("zftune keeps nothing on this machine.")
    elif not yes:
        first = " once the daemon that serves here has ended (zftune daemon stop)" if _daemon_serves() else ""
        typer.echo(f"Nothing was removed; zftune uninstall --yes removes all of it{first}.")
    else:
        if _daemon_serves():  # runs may still be written down
            raise ZftuneError("a daemon serves here and writes to these files, end it first: zftune daemon stop")
        for path, _ in found:
            _remove(path)
        typer.echo("Removed.")
    for folder in _own_folders(os.environ) if yes else ():
        with contextlib.suppress(OSError):  # it is not there, or somebody else's files are in it
            folder.rmdir()
    typer.echo(_PACKAGE)


def _kept(environment: Mapping[str, str]) -> Iterator[tuple[Path, str]]:
    """Files and folders that are there, with what they hold."""
    from zftune.daemon.client import location as daemon
    from zftune.store import location as store

    database = store.meant_by(environment).path
    if database is not None:
        names = {"": "presets and past runs", ".lock": "its lock", "-wal": "its journal", "-shm": "its journal"}
        for ending, what in {**names, ".runs": "locks of runs"}.items():
            yield from _there(database.with_name(database.name + ending), what)
        for backup in sorted(database.parent.glob(f"{database.name}.backup-*")):
            yield backup, "a backup of them"
        for replaced in sorted(database.parent.glob(f"{database.name}.replaced-*")):
            yield replaced, "a database that was replaced"
    place = daemon.locate(environment)
    for ending, what in {"": "the daemon's socket", ".lock": "its lock", ".log": "its log"}.items():
        yield from _there(place.socket.with_name(place.socket.name + ending), what)
    yield from _there(place.metrics_token, "the token of its metrics")


def _own_folders(environment: Mapping[str, str]) -> Iterator[Path]:
    """Those that zftune makes for what it keeps, whether they hold anything or not."""
    from zftune.daemon.client import location as daemon
    from zftune.store import location as store

    database, place = store.meant_by(environment).path, daemon.locate(environment)
    if place.own_folder is not None:
        yield place.own_folder
    yield from (one.parent for one in (database, place.socket) if one is not None and one.parent.name == "zftune")


def _there(path: Path, what: str) -> Iterator[tuple[Path, str]]:
    with contextlib.suppress(OSError):  # a folder that may not be entered
        path.lstat()
        yield path, what


def _size(path: Path) -> str:
    from zftune.text import size

    files = [one for one in path.rglob("*") if one.is_file()] if path.is_dir() else [path]
    return str(size(sum(one.lstat().st_size for one in files)))


def _daemon_serves() -> bool:
    from zftune.daemon.client.http import DaemonClient
    from zftune.errors import DaemonError

    with DaemonClient() as client:
        try:
            client.get("/v1/health")
        except DaemonError:
            return False
    return True


def _remove(path: Path) -> None:
    try:
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)
    except OSError as error:
        raise ZftuneError(f"'{path}' cannot be removed ({error.strerror})") from error
