"""Where the daemon's socket is. Both sides ask here; nothing is created but the folder, by the server.

Standard library only: the client runs inside training processes.
"""

from __future__ import annotations

import os
import socket
import stat
import struct
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from zftune.errors import BadInputError

_CREDENTIALS = struct.Struct("3i")  # pid, uid, gid
_OPEN = ("01", "04", "05")
"""Of the kernel's states: established, and established where the other end has sent all that it will."""


class _Socket(Protocol):
    def getsockopt(self, level: int, option: int, size: int, /) -> bytes: ...


def peer_uid(connection: _Socket) -> int:
    """The user at the other end of a Unix socket: who connected, or who listens. Raises OSError: the connection has
    gone.
    """
    found = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    uid: int = _CREDENTIALS.unpack(found)[1]
    return uid


def loopback_uid(local: tuple[str, int], remote: tuple[str, int], table: Path = Path("/proc/net/tcp")) -> int | None:
    """The user whose process holds the other end of a TCP connection within this machine.

    `local` and `remote` are address and port of the ends; `table` is the kernel's list of connections. Returns the uid;
    None where the kernel does not list the other end as open. Raises OSError: there is no such list.
    """
    wanted = f"{_hexadecimal(remote)} {_hexadecimal(local)}"  # the other end's local address is our remote one
    for line in table.read_text(encoding="ascii").splitlines()[1:]:
        fields = line.split()
        # One that was closed is nobody's any more, and is listed as user 0's.
        if f"{fields[1]} {fields[2]}" == wanted and fields[3] in _OPEN and fields[9] != "0":
            return int(fields[7])
    return None


def _hexadecimal(address: tuple[str, int]) -> str:
    (host,) = struct.unpack("=I", socket.inet_aton(address[0]))  # in the machine's byte order, as the kernel prints it
    return f"{host:08X}:{address[1]:04X}"


MAX_PATH_BYTES = 107
"""Of a Unix socket on Linux: the kernel's field has 108, the last is 0."""

TEMPORARY = "the folder for temporary files"
"""The source of last resort: a clean-up may remove a socket there, and jobs may have folders of their own."""

SHORTEST = Path("/tmp")
"""Where the folder for temporary files is too long for a socket, too."""

_SOCKET = "zftune.sock"


@dataclass(frozen=True, slots=True)
class Location:
    """The daemon's files."""

    socket: Path
    source: str
    """Where the path comes from, as a sentence can name it."""
    own_folder: Path | None
    """The folder that the daemon makes for itself; None where the user named the socket."""

    @property
    def lock(self) -> Path:
        """The file whose lock the daemon holds."""
        return self.socket.with_name(f"{self.socket.name}.lock")

    @property
    def metrics_token(self) -> Path:
        """The file with the token that reads /metrics."""
        return self.socket.with_name(f"{self.socket.name}.metrics-token")


def locate(environment: Mapping[str, str], *, temporary: Path | None = None) -> Location:
    """Where the socket is, or is to be.

    Args:
        environment: $ZFTUNE_SOCKET; else $XDG_RUNTIME_DIR, if it is an absolute path to a folder of this user that
            leaves room for a socket's name.
        temporary: the folder for temporary files; None: the system's.

    Raises:
        BadInputError: the path that was named is longer than a socket's may be, or holds a NUL.
    """
    named = environment.get("ZFTUNE_SOCKET", "")
    if named:
        location = Location(_absolute(named), "$ZFTUNE_SOCKET", None)
        if not _fits(location):
            raise BadInputError(
                f"the socket '{location.socket}' (from {location.source}) has {len(os.fsencode(location.socket))} "
                f"bytes, more than the {MAX_PATH_BYTES} that a socket may have; set $ZFTUNE_SOCKET to a shorter path"
            )
        return location
    runtime = Path(environment.get("XDG_RUNTIME_DIR", ""))
    if runtime.is_absolute() and _is_own_folder(runtime):
        location = Location(runtime / "zftune" / _SOCKET, "$XDG_RUNTIME_DIR/zftune", runtime / "zftune")
        if _fits(location):
            return location
    location = _in_folder(temporary or Path(tempfile.gettempdir()))
    return location if _fits(location) else _in_folder(SHORTEST)


def settled(environment: Mapping[str, str]) -> dict[str, str]:
    """An environment in which a relative path in $ZFTUNE_SOCKET is absolute: processes change folders. Raises
    BadInputError: as `locate`.
    """
    if not environment.get("ZFTUNE_SOCKET"):
        return {**environment}
    return {**environment, "ZFTUNE_SOCKET": str(locate(environment).socket)}


def make_folder(location: Location) -> None:
    """Make the daemon's own folder, or see that the one that is there can be trusted. Raises BadInputError: it is not a
    real folder of this user with mode 0700, or cannot be made; or the folder that $ZFTUNE_SOCKET names is not there.
    """
    folder = location.own_folder
    if folder is None:
        if not location.socket.parent.is_dir():
            raise BadInputError(f"$ZFTUNE_SOCKET '{location.socket}': its folder does not exist")
        return
    try:
        folder.mkdir(mode=0o700)
        folder.chmod(0o700)  # whatever the umask left of it
    except FileExistsError:
        pass  # whose it is, is looked at below, as it is for one that was made just now
    except OSError as error:
        raise BadInputError(f"the folder '{folder}' cannot be made ({error.strerror}); set $ZFTUNE_SOCKET") from error
    found = folder.lstat()
    wrong = None
    if not stat.S_ISDIR(found.st_mode):
        wrong = "is no folder" if not stat.S_ISLNK(found.st_mode) else "is a symbolic link"
    elif found.st_uid != os.getuid():
        wrong = f"belongs to user {found.st_uid}"
    elif stat.S_IMODE(found.st_mode) != 0o700:
        wrong = f"has mode {stat.S_IMODE(found.st_mode):04o}"
    if wrong is not None:
        raise BadInputError(f"the folder '{folder}' {wrong}; it must be a real folder of your own with mode 0700")


def _in_folder(temporary: Path) -> Location:
    folder = temporary / f"zftune-{os.getuid()}"
    return Location(folder / _SOCKET, TEMPORARY, folder)


def _fits(location: Location) -> bool:
    path = os.fsencode(location.socket)
    return len(path) <= MAX_PATH_BYTES and b"\0" not in path


def _absolute(path: str) -> Path:
    try:
        return Path(path).absolute()
    except OSError as error:
        raise BadInputError(f"$ZFTUNE_SOCKET '{path}': the working directory is gone; give an absolute path") from error


def _is_own_folder(folder: Path) -> bool:
    try:
        found = folder.stat()
    except (OSError, ValueError):
        return False
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid()
