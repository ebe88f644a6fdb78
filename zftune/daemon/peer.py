"""Which user is at the other end of a connection. Standard library only."""

from __future__ import annotations

import socket
import struct
from pathlib import Path
from typing import Protocol

_CREDENTIALS = struct.Struct("3i")  # pid, uid, gid
_OPEN = ("01", "04", "05")
"""Of the kernel's states: established, and established where the other end has sent all that it will."""


class _Socket(Protocol):
    def getsockopt(self, level: int, option: int, size: int, /) -> bytes: ...


def peer_uid(connection: _Socket) -> int:
    """The user at the other end of a Unix socket: who connected, or who listens.

    Raises:
        OSError: the connection has gone.
    """
    found = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    uid: int = _CREDENTIALS.unpack(found)[1]
    return uid


def loopback_uid(local: tuple[str, int], remote: tuple[str, int], table: Path = Path("/proc/net/tcp")) -> int | None:
    """The user whose process holds the other end of a TCP connection within this machine.

    Args:
        local: address and port of our end.
        remote: those of the other end.
        table: the kernel's list of connections.

    Returns:
        The uid; None where the kernel does not list the other end as open.

    Raises:
        OSError: there is no such list.
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
