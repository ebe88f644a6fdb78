"""uvicorn on sockets that we made, as a part of a process that has signals and an end of its own."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from collections.abc import Iterator

import uvicorn

from zftune.daemon.answers import App
from zftune.daemon.protocols import LoopbackProtocol, SocketProtocol

DRAIN_S = 10
"""How long requests that are under way may take when the daemon ends."""

_IDLE_S = {SocketProtocol: 75, LoopbackProtocol: 20}  # how long a connection may wait for its next request

_log = logging.getLogger(__name__)


class Listener:
    """Serves one application on one listening socket.

    Args:
        app: what is served.
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
    """A socket that is bound to 127.0.0.1.

    Args:
        port: 0 takes a free one.

    Raises:
        OSError: the port is taken.
    """
    listening = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    try:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind(("127.0.0.1", port))
        listening.setblocking(False)
    except BaseException:
        listening.close()
        raise
    return listening
