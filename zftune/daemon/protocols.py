"""uvicorn's HTTP protocol, with what every connection has to show and may cost before there is a request.

Args, Raises and threads as asyncio.Protocol has them: one object a connection, in the event loop's thread.
"""

from __future__ import annotations

import asyncio
import logging
import os
from typing import Any, ClassVar

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from zftune.daemon.answers import raw_refusal
from zftune.daemon.peer import loopback_uid, peer_uid

HEAD_S = 10.0
"""Until the head of a request is there, from the connection or the head's first byte."""

_log = logging.getLogger(__name__)


class _Protocol(H11Protocol):
    max_connections: ClassVar[int]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._head_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as in uvicorn
        super().connection_made(transport)
        stranger = self._stranger(transport)
        if stranger is not None:
            _log.warning("refused a connection: %s", stranger)
            self._end(403, f"{stranger}, allowed is the daemon's own user")
        elif len(self.connections) > self.max_connections:
            self._end(429, f"there are too many connections, allowed are {self.max_connections}")
        else:
            self._wait_for_head()

    def data_received(self, data: bytes) -> None:
        if self.transport.is_closing():
            return
        if self._has_no_request() and self._head_timer is None:
            self._wait_for_head()
        super().data_received(data)
        if not self._has_no_request():
            self._stop_waiting()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_waiting()
        super().connection_lost(exc)

    def send_400_response(self, msg: str) -> None:
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            self._end(400, "this is not a request of HTTP/1.1")
        else:  # an answer is on its way already
            self.transport.close()

    def _stranger(self, transport: asyncio.Transport) -> str | None:
        """Who is at the other end, if it is nobody who may be."""
        raise NotImplementedError

    def _has_no_request(self) -> bool:
        return self.cycle is None or self.cycle.response_complete  # type: ignore[redundant-expr]  # None before the first

    def _wait_for_head(self) -> None:
        self._head_timer = self.loop.call_later(HEAD_S, self._end, 408, f"no request has come within {HEAD_S:g} s")

    def _stop_waiting(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _end(self, status: int, sentence: str) -> None:
        if not self.transport.is_closing():
            self.transport.write(raw_refusal(status, sentence))
            self.transport.close()


class SocketProtocol(_Protocol):
    """On the Unix socket: for this user."""

    max_connections = 512

    def _stranger(self, transport: asyncio.Transport) -> str | None:
        try:
            uid = peer_uid(transport.get_extra_info("socket"))
        except OSError as error:
            return f"the user cannot be told ({error.strerror})"
        return None if uid == os.getuid() else f"user {uid} asks"


class LoopbackProtocol(_Protocol):
    """On a loopback port: for this user, and for root, who forwards ports of containers; the cookie comes after it."""

    max_connections = 64

    def _stranger(self, transport: asyncio.Transport) -> str | None:
        connection = transport.get_extra_info("socket")
        try:
            ends = connection.getsockname(), connection.getpeername()
        except OSError:  # it has gone
            return "the user cannot be told"
        try:
            uid = loopback_uid(*ends)
        except OSError:  # a kernel that does not tell: the cookie decides
            return None
        if uid is None:
            return "the user cannot be told"
        return None if uid in (0, os.getuid()) else f"user {uid} asks"
