"""What one request may cost: bytes of its body, and time. Around the application, so that no route can forget it."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from zftune.daemon.answers import App, Message, Receive, Scope, Send, refuse, version_header


@dataclass(frozen=True, slots=True)
class Limits:
    """Of one request."""

    body_bytes: int = 1 << 20
    body_s: float = 10.0
    """Until the whole body is there."""
    answer_s: float = 30.0
    """From then until the answer begins."""


class Limited:
    """An application whose requests have limits; every answer carries the protocol's version.

    Args:
        app: gets a body that is complete.
        limits: of each request.
    """

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
        too_much = f"the body is too long, allowed are {most} bytes"
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
