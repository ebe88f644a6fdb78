"""Where the database belongs, and whether its locks can be trusted there. Nothing is created here."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import unquote

from zftune.errors import BadInputError

DATABASE = "ZFTUNE_DB"
"""Environment variable that names the store."""
NETWORK = ("nfs", "cifs", "smb", "lustre", "gpfs", "beegfs", "ceph", "glusterfs", "afs", "fuse.sshfs", "9p")
"""Types of file systems, or what they begin with, on which SQLite's locks cannot be trusted."""

SERVER_URL = "postgresql+psycopg://USER:PASSWORD@HOST:PORT/DATABASE"

_SERVER = re.compile(r"(\w+)(?:\+\w+)?://")
_POSTGRESQL = re.compile(r"postgresql(?:\+psycopg)?://")
_USER = re.compile(r"(?<=://).*(?=@)", re.DOTALL)
_PORT = re.compile(r"(?<=://)(\[[^\]/?#]*\]|[^:\[/?#]*):([^/?#]*[^/?#\d][^/?#]*)")
"""Of a URL without a user, a port that is none: perhaps a password whose host was forgotten."""
_SECRETS = re.compile(r"((?:password|sslpassword)=)[^&#]*", re.IGNORECASE)
_SQLITE = re.compile(r"^sqlite(?:\+\w+)?:///")
_URI = re.compile(r"^file:(?://(?:localhost)?(?=/))?")


@dataclass(frozen=True, slots=True)
class Location:
    """A database: a file, a server, or memory where both are None."""

    path: Path | None
    url: str | None = field(repr=False)
    shown: str
    """How to call it, without a user's name or a password."""

    @property
    def value(self) -> str:
        """What `zftune.store.open_store` opens it by, in whatever folder; it may have a password."""
        return os.path.realpath(self.path) if self.path is not None else self.url or "sqlite://"


def masked(url: str) -> str:
    """A server's URL without a password, for sentences: before an "@" only the user's name is left."""
    hidden = _USER.sub(_without_password, url) if _USER.search(url) else _PORT.sub(r"\1:***", url)
    return _SECRETS.sub(r"\1***", hidden)


def _without_password(user: re.Match[str]) -> str:
    name, colon, _ = user[0].partition(":")
    return f"{name}:***" if colon else name


def check_server(url: str) -> None:
    """Refuse what is no URL of a server that can be a store; without trying it. Raises BadInputError: says what is
    wrong; without a password.
    """
    user = _USER.search(url)
    if user is not None and (user[0].count(":") > 1 or re.search(r"[@/?#\s]", user[0])):
        fault = "a special character of its password must be percent-encoded (%40 for @, %3A for :, %2F for /)"
    elif _POSTGRESQL.match(url) is None:
        fault = f"it must be a path, sqlite:///PATH or {SERVER_URL}"
    elif not url.partition("://")[2].partition("?")[0].rpartition("@")[2].partition("/")[2]:
        fault = f"it names no database; it must be {SERVER_URL}"
    elif _PORT.search(_USER.sub("", url).replace("://@", "://")) is not None:
        fault = f"its port is no number; it must be {SERVER_URL}"
    else:
        return
    raise BadInputError(f"${DATABASE} is '{masked(url)[:200]}'; {fault}")


def home_of(environment: Mapping[str, str]) -> Path | None:
    """The user's home folder, by $HOME; None where none is known."""
    try:
        return Path(environment["HOME"]) if environment.get("HOME") else Path.home()
    except RuntimeError:
        return None


def meant_by(environment: Mapping[str, str]) -> Location:
    """The database that $ZFTUNE_DB, $XDG_DATA_HOME and $HOME name."""
    return locate(environment.get(DATABASE, ""), environment, home_of(environment))


def settled(environment: Mapping[str, str]) -> dict[str, str]:
    """An environment in which a relative path in $ZFTUNE_DB is absolute: processes change folders."""
    path = meant_by(environment).path if environment.get(DATABASE) else None
    return {**environment} if path is None else {**environment, DATABASE: str(path)}


def locate(value: str, environment: Mapping[str, str], home: Path | None) -> Location:
    """Where the database is to be.

    `value` is a path, a URL of SQLAlchemy or a "file:" URI of SQLite, of $ZFTUNE_DB; "" means the default.
    """
    if value.startswith("file:"):
        return _of_uri(value)
    server = _SERVER.match(value)
    if server is not None and server[1] != "sqlite":
        return Location(None, value, f"the {server[1]} database of $ZFTUNE_DB")
    if value:
        file = _SQLITE.sub("", value).partition("?")[0] if "://" in value else value
        if "://" in value and (file in ("", ":memory:") or (server is not None and file == value)):
            return Location(None, None, "$ZFTUNE_DB")
        return Location(_absolute(_expanded(file, home)), None, "$ZFTUNE_DB")
    folder = environment.get("XDG_DATA_HOME", "")
    if folder and Path(folder).is_absolute():  # others are ignored, as the specification of XDG asks
        return Location(Path(folder) / "zftune" / "zftune.db", None, "$XDG_DATA_HOME/zftune/zftune.db")
    shown = "~/.local/share/zftune/zftune.db"
    return Location(None if home is None else home / ".local/share/zftune/zftune.db", None, shown)


def _of_uri(value: str) -> Location:
    """Of a URI such as file:results/zftune.db or file:///srv/zftune.db, whose query counts for memory alone."""
    file, _, query = value.partition("#")[0].partition("?")
    file = unquote(_URI.sub("", file))
    in_memory = file in ("", ":memory:") or "mode=memory" in query.split("&")
    return Location(None if in_memory else _absolute(Path(file)), None, f"${DATABASE}")


def network_file_system(path: Path, root: Path = Path("/")) -> str | None:
    """The type of the network file system that would hold `path`, which need not exist; None where it is on a local
    one.

    `root` replaces "/" where the mounts are read.
    """
    kind = file_system(next((one for one in (path, *path.parents) if exists(one)), Path("/")), root)
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


def _absolute(path: Path) -> Path:
    try:
        return path.absolute()
    except OSError:  # the working directory was removed: nothing can be made there, and whoever tries says so
        return path


def exists(path: Path) -> bool:
    """Whether there is something; False where nobody can tell."""
    try:
        return path.exists()
    except (OSError, ValueError):  # a name that is too long, or a folder that may not be entered
        return False
