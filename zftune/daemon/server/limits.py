"""Limits around the application: bytes and time of a request, and the protocols that may ask."""

from __future__ import annotations

import asyncio
import logging
import os
from dataclasses import dataclass
from typing import Any, ClassVar

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from zftune.daemon.client.location import loopback_uid, peer_uid
from zftune.daemon.server.answers import App, Message, Receive, Scope, Send, raw_refusal, refuse, version_header

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
            self._end(403, f"{stranger}; only the daemon's own user may")
        elif len(self.connections) > self.max_connections:
            self._end(429, f"there are more than {self.max_connections} connections")
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
            return f"the user cannot be determined ({error.strerror})"
        return None if uid == os.getuid() else f"user {uid} may not connect"


class LoopbackProtocol(_Protocol):
    """On a loopback port: for this user, and for root, who forwards ports of containers; the cookie comes after it."""

    max_connections = 64

    def _stranger(self, transport: asyncio.Transport) -> str | None:
        connection = transport.get_extra_info("socket")
        try:
            ends = connection.getsockname(), connection.getpeername()
        except OSError:  # it has gone
            return "the user cannot be determined"
        try:
            uid = loopback_uid(*ends)
        except OSError:  # a kernel that does not tell: the cookie decides
            return None
        if uid is None:
            return "the user cannot be determined"
        return None if uid in (0, os.getuid()) else f"user {uid} may not connect"


@dataclass(frozen=True, slots=True)
class Limits:
    """Of one request."""

    body_bytes: int = 1 << 20
    body_s: float = 10.0
    """Until the whole body is there."""
    answer_s: float = 30.0
    """From then until the answer begins."""


class Limited:
    """An application whose requests have limits and complete bodies; every answer carries the protocol's version."""

    def __init__(self, app: App, limits: Limits) -> None:
        self._app = app
        self._limits = limits

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        answer = _Answer(send)
        try:
            body = await self._body(scope, receive)
        except _RefusedError as refusal:
            await refuse(answer.send, refusal.status, str(refusal))
            return
        if body is None:
            return
        try:
            async with asyncio.timeout(self._limits.answer_s) as deadline:
                answer.deadline = deadline
                await self._app(scope, _replayed(body, receive), answer.send)
        except TimeoutError:
            if answer.has_begun or not deadline.expired():
                raise
            await refuse(answer.send, 503, f"no answer within {self._limits.answer_s:g} s, try again later")

    async def _body(self, scope: Scope, receive: Receive) -> bytes | None:
        """All of the body; None if the client went away."""
        most = self._limits.body_bytes
        too_much = f"the body is longer than {most} bytes"
        declared = dict(scope["headers"]).get(b"content-length", b"0")
        if int(declared) > most:  # the server has seen to it that it is a number
            raise _RefusedError(413, too_much)
        parts = bytearray()
        try:
            async with asyncio.timeout(self._limits.body_s):
                while True:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        return None
                    parts += message.get("body", b"")
                    if len(parts) > most:
                        raise _RefusedError(413, too_much)
                    if not message.get("more_body", False):
                        return bytes(parts)
        except TimeoutError:
            raise _RefusedError(408, f"the body has not come within {self._limits.body_s:g} s") from None


class _RefusedError(Exception):
    def __init__(self, status: int, sentence: str) -> None:
        super().__init__(sentence)
        self.status = status


class _Answer:
    """An answer on its way: once it has begun, it may take its time."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self.deadline: asyncio.Timeout | None = None
        self.has_begun = False

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.has_begun = True
            if self.deadline is not None and not self.deadline.expired():
                self.deadline.reschedule(None)
            message = {**message, "headers": version_header(message.get("headers", ()))}
        await self._send(message)


def _replayed(body: bytes, receive: Receive) -> Receive:
    """What the application receives: the body at once, then what comes after it."""
    pending: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def replay() -> Message:
        return pending.pop() if pending else await receive()

    return replay
