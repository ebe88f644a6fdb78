"""Where the database belongs, and whether its locks can be trusted there. Nothing is created here."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

NETWORK = ("nfs", "cifs", "smb", "lustre", "gpfs", "beegfs", "ceph", "glusterfs", "afs", "fuse.sshfs", "9p")
"""Types of file systems, or what they begin with, on which SQLite's locks cannot be trusted."""

_SERVER = re.compile(r"(\w+)(?:\+\w+)?://")
_SQLITE = re.compile(r"^sqlite(?:\+\w+)?:///")


@dataclass(frozen=True, slots=True)
class Location:
    """A database: a file, a server, or memory where both are None."""

    path: Path | None
    url: str | None
    shown: str
    """How to call it, without a user's name or a password."""


def locate(value: str, environment: Mapping[str, str], home: Path | None) -> Location:
    """Where the database is to be.

    Args:
        value: a path or a URL of SQLAlchemy, of $ZFTUNE_DB; "" means the default.
        environment: $XDG_DATA_HOME counts.
        home: of the user, if there is one.
    """
    server = _SERVER.match(value)
    if server is not None and server[1] != "sqlite":
        return Location(None, value, f"the {server[1]} database of $ZFTUNE_DB")
    if value:
        file = _SQLITE.sub("", value).partition("?")[0] if "://" in value else value
        if "://" in value and (file in ("", ":memory:") or (server is not None and file == value)):
            return Location(None, None, "$ZFTUNE_DB")
        return Location(_expanded(file, home).absolute(), None, "$ZFTUNE_DB")
    folder = environment.get("XDG_DATA_HOME", "")
    if folder and Path(folder).is_absolute():  # others are ignored, as the specification of XDG asks
        return Location(Path(folder) / "zftune" / "zftune.db", None, "$XDG_DATA_HOME/zftune/zftune.db")
    shown = "~/.local/share/zftune/zftune.db"
    return Location(None if home is None else home / ".local/share/zftune/zftune.db", None, shown)


def network_file_system(path: Path, root: Path = Path("/")) -> str | None:
    """The type of the network file system that would hold `path`; None where it is on a local one.

    Args:
        path: need not exist.
        root: stands for "/" where the mounts are read.
    """
    kind = file_system(next((one for one in (path, *path.parents) if _exists(one)), Path("/")), root)
    return kind if kind is not None and kind.startswith(NETWORK) else None


def file_system(path: Path, root: Path = Path("/")) -> str | None:
    """The type of the mount that holds a path, from lines such as "36 35 98:0 / /mnt rw - ext4 /dev/sda rw"."""
    best, kind = -1, None
    try:
        lines = (root / "proc/self/mountinfo").read_text(encoding="utf-8", errors="replace").splitlines()
        real = path.resolve()
    except (OSError, RuntimeError):  # no such file system, a loop of links
        return None
    for line in lines:
        mount, _, source = line.partition(" - ")
        fields = mount.split(" ")
        if len(fields) <= 4:
            continue
        point = re.sub(r"\\([0-7]{3})", lambda code: chr(int(code[1], 8)), fields[4])
        if real.is_relative_to(point) and len(point) >= best:
            best, kind = len(point), source.split(" ")[0]
    return kind


def node_local(uid: int, root: Path = Path("/")) -> Iterator[Path]:
    """Files of a user's own on disks of this node, the most lasting first. Their folders may belong to others."""
    for folder in (Path("/var/tmp"), Path("/tmp")):
        if network_file_system(folder, root) is None:
            yield folder / f"zftune-{uid}" / "zftune.db"


def _expanded(file: str, home: Path | None) -> Path:
    if home is not None and (file == "~" or file.startswith("~/")):
        return home / file[2:]
    return Path(file)


def _exists(path: Path) -> bool:
    try:
        return path.exists()
    except (OSError, ValueError):  # a name that is too long, or a folder that may not be entered
        return False
