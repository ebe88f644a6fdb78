"""What the daemon answers when it refuses, one sentence of JSON, and the interface of what it hosts."""

from __future__ import annotations

import asyncio
import contextlib
import http
import json
import time
from collections.abc import Awaitable, Callable, Iterable, MutableMapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import psutil
from fastapi import APIRouter, FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import Response
from pydantic import BaseModel
from starlette.exceptions import HTTPException

from zftune.daemon import PROTOCOL, PROTOCOL_HEADER
from zftune.errors import BadInputError

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry


class Service:
    """A part of the daemon: its routes, its figures, its life. Everything has a default.

    All methods are called in the thread of the event loop; none may block it.
    """

    def routers(self) -> Sequence[APIRouter]:
        """Its routes; their paths begin with /v1."""
        return ()

    def live_runs(self) -> int:
        """Runs that hold a lease: a private daemon ends when nobody has one any more."""
        return 0

    def stores(self) -> Sequence[str]:
        """Where it keeps its runs."""
        return ()

    def notices(self) -> Sequence[str]:
        """A sentence for each thing that it cannot do as it should."""
        return ()

    def register(self, registry: CollectorRegistry) -> None:
        """Put its metrics into the registry, once, before `start`."""

    async def start(self) -> None:
        """Called before the first request."""

    async def stop(self) -> None:
        """Called after the last request. What it has acknowledged must not depend on it: a daemon may be killed."""


@dataclass(kw_only=True, slots=True)
class DaemonState:
    """What all parts of one daemon know of it."""

    services: Sequence[Service] = ()
    private: bool = False
    """Whether it ends with its runs."""
    stop: Callable[[str], None] = lambda _reason: None
    """Ask it to drain and end; the reason is logged."""
    open_page: Callable[[], Awaitable[str]] | None = None
    """Makes a URL that opens the page once; None where no page is served."""
    clock: Callable[[], float] = time.monotonic
    started_s: float = field(init=False)
    needed_s: float = field(init=False)
    """When it was last known to be needed, by its clock."""
    starting: list[psutil.Process] = field(default_factory=list)
    """Processes that have announced a run."""
    stopping: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when it drains: an answer that never ends by itself has to end then."""

    def __post_init__(self) -> None:
        self.started_s = self.needed_s = self.clock()

    def expect_run(self, pid: int | None = None) -> None:
        """Begin the time without a run anew: one is there, or about to come, in process `pid` as long as it lives."""
        self.needed_s = self.clock()
        with contextlib.suppress(psutil.NoSuchProcess):
            self.starting += [] if pid is None else [psutil.Process(pid)]

    def unneeded_s(self) -> float:
        """Seconds since there was a run, or one was announced, as far as this is asked for again and again."""
        self.starting = [one for one in self.starting if one.is_running() and one.status() != psutil.STATUS_ZOMBIE]
        self.needed_s = self.clock() if self.live_runs or self.starting else self.needed_s
        return self.clock() - self.needed_s

    @property
    def live_runs(self) -> int:
        return sum(service.live_runs() for service in self.services)

    @property
    def stores(self) -> list[str]:
        return [store for service in self.services for store in service.stores()]

    @property
    def notices(self) -> list[str]:
        return [notice for service in self.services for notice in service.notices()]

    @property
    def uptime_s(self) -> float:
        return self.clock() - self.started_s

    async def stops_within(self, period_s: float) -> bool:
        """Wait until it drains, at most `period_s`; whether it does."""
        try:
            async with asyncio.timeout(period_s):
                await self.stopping.wait()
        except TimeoutError:
            return False
        return True


Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]
"""An application by the ASGI standard."""

_SHOWN_CHARACTERS = 80
_VERSION = (PROTOCOL_HEADER.encode(), str(PROTOCOL).encode())


class ErrorAnswer(BaseModel):
    """Why a request was refused."""

    error: str
    """A sentence: the field, its value, what is allowed."""


def error_body(sentence: str) -> bytes:
    """The JSON of a refusal. It is ASCII: what a client sent may hold anything, half a surrogate pair too."""
    return json.dumps({"error": sentence}).encode("ascii")


def version_header(headers: Iterable[tuple[bytes, bytes]]) -> list[tuple[bytes, bytes]]:
    """Headers with the protocol's version, by which a client knows us."""
    return [*headers, _VERSION]


def raw_refusal(status: int, sentence: str) -> bytes:
    """A whole answer for a connection that is closed after it."""
    body = error_body(sentence)
    lines = (
        f"HTTP/1.1 {status} {http.HTTPStatus(status).phrase}",
        "content-type: application/json",
        f"content-length: {len(body)}",
        f"{PROTOCOL_HEADER}: {PROTOCOL}",
        "connection: close",
        "\r\n",
    )
    return "\r\n".join(lines).encode("ascii") + body


def failure(error: Exception) -> str:
    """What is said of something that nobody foresaw."""
    return f"the daemon failed ({type(error).__name__}); see its log"


async def refuse(send: Send, status: int, sentence: str, headers: Iterable[tuple[bytes, bytes]] = ()) -> None:
    """Answer with a refusal."""
    body = error_body(sentence)
    wanted = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode()), *headers]
    await send({"type": "http.response.start", "status": status, "headers": wanted})
    await send({"type": "http.response.body", "body": body})


def answer_in_sentences(app: FastAPI) -> None:
    """Have an application answer everything that goes wrong with a sentence."""
    app.add_exception_handler(HTTPException, _refused)
    app.add_exception_handler(RequestValidationError, _invalid)
    app.add_exception_handler(BadInputError, _bad_input)
    app.add_exception_handler(Exception, _failed)


def _answer(status: int, sentence: str, headers: Any = None) -> Response:
    return Response(error_body(sentence), status, headers, media_type="application/json")


async def _refused(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    sentence, path = str(error.detail), request.scope["path"]  # request.url trusts the Host
    if error.status_code == 404 and sentence == "Not Found":
        sentence = f"there is no '{_shown(path)}'"
    if error.status_code == 405:
        allowed = (error.headers or {}).get("Allow", "another one")
        sentence = f"method {request.method} on '{_shown(path)}' is not allowed; it must be {allowed}"
    return _answer(error.status_code, sentence, error.headers)


async def _invalid(_: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    first, *others = error.errors()
    if first["type"] == "json_invalid":
        return _answer(422, f"the body is not JSON ({first['ctx']['error']}, at character {first['loc'][-1]})")
    where = ".".join(str(part) for part in first["loc"][1:]) or str(first["loc"][0])
    what = "" if first["type"] == "missing" else f" is {_shown(first.get('input'))!r}"
    more = f" (and {len(others)} more)" if others else ""
    return _answer(422, f"{where}{what}: {first['msg']}{more}")


async def _bad_input(_: Request, error: Exception) -> Response:
    return _answer(422, str(error))


async def _failed(_: Request, error: Exception) -> Response:
    return _answer(500, failure(error))


def _shown(value: object) -> str:
    text = str(value)
    return text if len(text) <= _SHOWN_CHARACTERS else text[: _SHOWN_CHARACTERS - 3] + "..."
