"""uvicorn on sockets that we made, as a part of a process that has signals and an end of its own."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import logging
import os
import socket
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import uvicorn

from zftune.daemon.client.location import Location, make_folder
from zftune.daemon.server.answers import App
from zftune.daemon.server.limits import LoopbackProtocol, SocketProtocol
from zftune.errors import BadInputError, DaemonError, SocketHeldError

_PROBE_S = 1.0
_LOCK_FLAGS = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


@dataclass(slots=True)
class Claim:
    """A socket that is bound, and the lock that goes with it."""

    location: Location
    listener: socket.socket
    _lock: int
    _identity: tuple[int, int]

    @property
    def is_there(self) -> bool:
        """Whether the socket lies where it was bound; a clean-up of temporary files may have removed it."""
        try:
            return _identity(self.location.socket.lstat()) == self._identity
        except OSError:
            return False

    def rebind(self) -> None:
        """Bind a socket in place of one that was removed; whoever is connected by the old one stays so. Raises
        BadInputError: something that is not ours lies there; DaemonError: another daemon is there.
        """
        self._keep_lock()
        _remove_stale(self.location.socket)
        self.listener = _bound(self.location.socket)
        self._identity = _identity(self.location.socket.lstat())

    def release(self) -> None:
        """Close the socket and remove what is ours; more than once is fine."""
        if self._lock < 0:
            return
        self.listener.close()
        if self.is_there:  # else somebody put another one there
            self.location.socket.unlink(missing_ok=True)
        if self._has_lock():
            self.location.lock.unlink(missing_ok=True)
        os.close(self._lock)
        self._lock = -1

    def _keep_lock(self) -> None:
        """Take the lock again where its file was removed, too."""
        if not self._has_lock():
            lock = _locked(self.location)
            os.close(self._lock)
            self._lock = lock

    def _has_lock(self) -> bool:
        try:
            return os.path.samestat(self.location.lock.lstat(), os.fstat(self._lock))
        except OSError:
            return False


@contextmanager
def claim(location: Location) -> Iterator[Claim]:
    """Take a location, for this user alone. Nobody can connect before the server listens. Raises BadInputError: the
    folder, the lock or the socket belongs to somebody else, or is something else; SocketHeldError: another daemon is
    there; DaemonError: something else listens there.
    """
    make_folder(location)
    lock = _locked(location)
    try:
        _remove_stale(location.socket)
        listener = _bound(location.socket)
        claimed = Claim(location, listener, lock, _identity(location.socket.lstat()))
    except BaseException:
        location.lock.unlink(missing_ok=True)
        os.close(lock)
        raise
    try:
        yield claimed
    finally:
        claimed.release()


def _locked(location: Location) -> int:
    """A descriptor that holds the lock."""
    path = location.lock
    while True:
        try:
            lock = os.open(path, _LOCK_FLAGS, 0o600)
        except OSError as error:
            raise BadInputError(f"the lock '{path}' cannot be opened ({error.strerror}); set $ZFTUNE_SOCKET") from error
        try:
            if _took(lock, path, location.socket):
                return lock
        except BaseException:
            os.close(lock)
            raise
        os.close(lock)  # the daemon that had it removed the file as it ended


def _took(lock: int, path: Path, shown: Path) -> bool:
    """Whether the lock is held now, on the file that still lies there."""
    found = os.fstat(lock)
    if not stat.S_ISREG(found.st_mode) or found.st_uid != os.getuid():
        raise BadInputError(
            f"the lock '{path}' is not a file of yours; set $ZFTUNE_SOCKET to a path in a folder of yours"
        )
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        pid = os.pread(lock, 32, 0).decode("ascii", "replace").strip()
        raise SocketHeldError(f"another daemon{pid and f' (pid {pid})'} serves '{shown}' already", pid) from None
    try:
        there = path.lstat()
    except FileNotFoundError:
        return False
    if (there.st_dev, there.st_ino) != (found.st_dev, found.st_ino):
        return False
    os.ftruncate(lock, 0)
    os.pwrite(lock, f"{os.getpid()}\n".encode(), 0)
    return True


def _remove_stale(path: Path) -> None:
    """Remove a socket of ours on which nobody answers; refuse whatever else lies there."""
    try:
        found = path.lstat()
    except FileNotFoundError:
        return
    except OSError as error:
        raise BadInputError(f"the socket '{path}' cannot be looked at ({error.strerror})") from error
    wrong = None
    if not stat.S_ISSOCK(found.st_mode):
        wrong = "is not a socket"
    elif found.st_uid != os.getuid():
        wrong = f"belongs to user {found.st_uid}"
    if wrong is not None:
        raise BadInputError(f"'{path}' {wrong}; remove it or set $ZFTUNE_SOCKET to a free path")
    if _answers(path):
        raise DaemonError(f"something else listens at '{path}' already; set $ZFTUNE_SOCKET to a free path")
    path.unlink(missing_ok=True)


def _identity(found: os.stat_result) -> tuple[int, int]:
    """Of a file; the kernel gives its number to no other one while the socket is open."""
    return found.st_dev, found.st_ino


def _answers(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(_PROBE_S)
        try:
            probe.connect(os.fspath(path))
        except (ConnectionRefusedError, FileNotFoundError):
            return False
        except OSError:  # a full queue, a time-out: somebody holds it
            return True
        return True


def _bound(path: Path) -> socket.socket:
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        mask = os.umask(0o177)  # so that it is 0600 from its first moment on; nobody can connect before listen()
        try:
            listener.bind(os.fspath(path))
        finally:
            os.umask(mask)
        path.chmod(0o600)
        listener.setblocking(False)
    except OSError as error:
        listener.close()
        raise BadInputError(f"the socket '{path}' cannot be made ({error.strerror}); set $ZFTUNE_SOCKET") from error
    return listener


DRAIN_S = 10
"""How long requests that are under way may take when the daemon ends."""

_IDLE_S = {SocketProtocol: 75, LoopbackProtocol: 20}  # how long a connection may wait for its next request

_log = logging.getLogger(__name__)


class Listener:
    """Serves one application on one listening socket.

    Args:
        protocol: who may connect.
        listening: bound; owned by the server from `start` on, which listens.
    """

    def __init__(
        self, app: App, protocol: type[SocketProtocol] | type[LoopbackProtocol], listening: socket.socket
    ) -> None:
        config = uvicorn.Config(
            app,
            http=protocol,
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            proxy_headers=False,  # whoever connects is who asks
            server_header=False,
            backlog=protocol.max_connections,
            timeout_keep_alive=_IDLE_S[protocol],
            timeout_graceful_shutdown=DRAIN_S,
        )
        self._server = _Server(config)
        self._listening = listening
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Accept connections."""
        self._task = asyncio.create_task(self._server.serve([self._listening]))
        ready = asyncio.create_task(self._server.ready.wait())
        try:
            await asyncio.wait({self._task, ready}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            ready.cancel()
        if self._task.done():
            await self._task  # it failed, and this says how

    async def stop(self) -> None:
        """Accept no more, wait for requests under way."""
        self._server.should_exit = True
        if self._task is not None:
            await self._task


class _Server(uvicorn.Server):
    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.ready = asyncio.Event()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.ready.set()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield  # signals are the process's, which ends with 0 where uvicorn would raise them again


def loopback_socket(port: int) -> socket.socket:
    """A socket that is bound to 127.0.0.1; port 0 takes a free one. Raises OSError: the port is taken."""
    listening = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    try:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind(("127.0.0.1", port))
        listening.setblocking(False)
    except BaseException:
        listening.close()
        raise
    return listening
