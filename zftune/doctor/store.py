"""Where the presets and trials are kept. Nothing is created here."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

from zftune.doctor.check import Check

_NETWORK = ("nfs", "cifs", "smb", "lustre", "gpfs", "beegfs", "ceph", "glusterfs", "afs", "fuse.sshfs", "9p")
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
    value = environment.get("ZFTUNE_DB", "")
    url = re.match(r"(\w+)(?:\+\w+)?://", value)
    if url is not None and url[1] != "sqlite":
        # The rest of a URL may hold a password.
        return Check(name=name, status="note", finding=f"$ZFTUNE_DB names a {url[1]} server, which was not tried.")
    path, shown = _location(value, environment, home)
    if path is None:
        return Check(name=name, status="note", finding="$ZFTUNE_DB asks for a database in memory: nothing is kept.")
    existing = next((folder for folder in (path, *path.parents) if _exists(folder)), None)
    fix = "Set $ZFTUNE_DB to a file in a folder that you may write."
    if existing is None or not _writable(existing, path):
        return Check(name=name, status="broken", finding=f"{shown} cannot be written. {_IN_MEMORY}", fix=fix)
    kind = _file_system(existing, root)
    if kind is not None and kind.startswith(_NETWORK):
        return Check(
            name=name,
            status="note",
            finding=f"{shown} is on a network file system ({kind}), where SQLite's locks cannot be trusted.",
            fix="Set $ZFTUNE_DB to a local file, or to the URL of a database server.",
        )
    state = "is there and can be written" if existing == path else "can be created"
    return Check(name=name, status="ok", finding=f"{shown} {state}.")


def _location(value: str, environment: Mapping[str, str], home: Path) -> tuple[Path | None, str]:
    """The file (None: in memory), and how to call it without the user's name in it."""
    if value:
        file = re.sub(r"^sqlite(?:\+\w+)?:///", "", value).partition("?")[0] if "://" in value else value
        in_memory = ("://" in value and file in ("", ":memory:")) or re.fullmatch(r"sqlite(?:\+\w+)?://", value)
        return (None if in_memory else Path(file).expanduser().absolute()), "$ZFTUNE_DB"
    folder = environment.get("XDG_DATA_HOME", "")
    if folder and Path(folder).is_absolute():  # others are ignored, as the specification of XDG asks
        return Path(folder) / "zftune" / "zftune.db", "$XDG_DATA_HOME/zftune/zftune.db"
    return home / ".local/share/zftune/zftune.db", "~/.local/share/zftune/zftune.db"


def _exists(path: Path) -> bool:
    try:
        return path.exists()
    except (OSError, ValueError):  # a name that is too long, or a folder that may not be entered
        return False


def _writable(existing: Path, path: Path) -> bool:
    if existing == path:
        return path.is_file() and os.access(path, os.W_OK) and os.access(path.parent, os.W_OK | os.X_OK)
    return existing.is_dir() and os.access(existing, os.W_OK | os.X_OK)


def _file_system(path: Path, root: Path) -> str | None:
    """The type of the mount that holds a path, from lines such as "36 35 98:0 / /mnt rw - ext4 /dev/sda rw"."""
    best, kind = -1, None
    try:
        lines = (root / "proc/self/mountinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return None
    for line in lines:
        mount, _, source = line.partition(" - ")
        fields = mount.split(" ")
        if len(fields) > 4 and path.resolve().is_relative_to(fields[4]) and len(fields[4]) >= best:
            best, kind = len(fields[4]), source.split(" ")[0]
    return kind
