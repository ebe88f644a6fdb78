"""Where the daemon's socket is. Both sides ask here; nothing is created but the folder, by the server.

Standard library only: the client runs inside training processes.
"""

from __future__ import annotations

import os
import stat
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from zftune.errors import BadInputError

MAX_PATH_BYTES = 107
"""Of a Unix socket on Linux: the kernel's field has 108, the last is 0."""

TEMPORARY = "the folder for temporary files"
"""The source of last resort: a clean-up may remove a socket there, and jobs may have folders of their own."""

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
        environment: $ZFTUNE_SOCKET; else $XDG_RUNTIME_DIR, if it is an absolute path to a folder of this user.
        temporary: the folder for temporary files; None: the system's.

    Raises:
        BadInputError: the path is longer than a socket's may be, or holds a NUL.
    """
    named = environment.get("ZFTUNE_SOCKET", "")
    runtime = Path(environment.get("XDG_RUNTIME_DIR", ""))
    if named:
        location = Location(Path(named).absolute(), "$ZFTUNE_SOCKET", None)
    elif runtime.is_absolute() and _is_own_folder(runtime):
        location = Location(runtime / "zftune" / _SOCKET, "$XDG_RUNTIME_DIR/zftune", runtime / "zftune")
    else:
        folder = (temporary or Path(tempfile.gettempdir())) / f"zftune-{os.getuid()}"
        location = Location(folder / _SOCKET, TEMPORARY, folder)
    path = os.fsencode(location.socket)
    if len(path) > MAX_PATH_BYTES or b"\0" in path:
        raise BadInputError(
            f"the socket '{location.socket}' (from {location.source}) has {len(path)} bytes, allowed are "
            f"{MAX_PATH_BYTES}; set $ZFTUNE_SOCKET to a shorter path"
        )
    return location


def make_folder(location: Location) -> None:
    """Make the daemon's own folder, or see that the one that is there can be trusted.

    Raises:
        BadInputError: it is not a real folder of this user with mode 0700, or cannot be made; or the folder that
            $ZFTUNE_SOCKET names is not there.
    """
    folder = location.own_folder
    if folder is None:
        if not location.socket.parent.is_dir():
            raise BadInputError(f"$ZFTUNE_SOCKET '{location.socket}': allowed is a path in a folder that exists")
        return
    try:
        folder.mkdir(mode=0o700)
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
        raise BadInputError(f"the folder '{folder}' {wrong}, allowed is a real folder of your own with mode 0700")


def _is_own_folder(folder: Path) -> bool:
    try:
        found = folder.stat()
    except (OSError, ValueError):
        return False
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid()
