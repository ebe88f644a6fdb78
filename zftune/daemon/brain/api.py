"""The brains' part of the daemon's HTTP interface: /v1/runs.

Messages of agents are read by the wire's own strict decoders, and described by their schemas. What must not wait runs
in the event loop; what reads or writes the store runs in threads.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any, TypeVar

from fastapi import APIRouter, Request
from fastapi.responses import Response
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException

from zftune.daemon.answers import App, Receive, Scope, Send, failure, refuse
from zftune.daemon.brain.registry import Command, Registry, UnknownRunError
from zftune.daemon.brain.states import NotAllowedError
from zftune.daemon.brain.views import RunDetails, RunView, run_details, run_view
from zftune.daemon.sampling import Node
from zftune.daemon.wire import MOST_BYTES, Directive, Farewell, Goodbye, Hello, Report, Welcome, decode, encode, parse
from zftune.daemon.wire.schema import schema
from zftune.errors import BadInputError, ZftuneError

T = TypeVar("T")
_REPORT = re.compile(r"/v1/runs/([^/]+)/report")
_COMMANDS: tuple[tuple[Command, str], ...] = (
    ("pause", "Let the incumbent's knobs run undisturbed until `resume`."),
    ("resume", "Go on after a pause."),
    ("rollback", "Pin the setting before the last that was adopted, and never try that one again."),
    ("stop", "End the tuning; the incumbent's knobs stay."),
)


def router(registry: Registry, node: Node | None = None) -> APIRouter:
    """The routes.

    Args:
        registry: of the runs.
        node: samples for them; None: nobody does.
    """
    routes = APIRouter(prefix="/v1/runs", tags=["runs"])
    _add_messages(routes, registry)
    _add_readers(routes, registry, node)
    for command, description in _COMMANDS:
        _add_command(routes, registry, node, command, description)
    return routes


def _add_messages(routes: APIRouter, registry: Registry) -> None:
    @routes.post("", openapi_extra=_body(Hello), responses=_answer(Welcome), summary="Follow a run.")
    async def hello(request: Request) -> Response:
        message = _read(Hello, await request.body(), "hello")
        return _json(_allowed(lambda: registry.hello(message)))

    @routes.post("/{run}/report", openapi_extra=_body(Report), responses=_answer(Directive), summary="Hear of a run.")
    async def report(run: str, request: Request) -> Response:
        return Response(_heard(registry, run, await request.body()), media_type="application/json")

    @routes.post("/{run}/goodbye", openapi_extra=_body(Goodbye), responses=_answer(Farewell), summary="A run ends.")
    async def goodbye(run: str, request: Request) -> Response:
        message = _read(Goodbye, await request.body(), "goodbye")
        return _json(await run_in_threadpool(_allowed, lambda: registry.goodbye(run, message)))


def _add_readers(routes: APIRouter, registry: Registry, node: Node | None) -> None:
    @routes.get("")
    async def runs() -> list[RunView]:
        """The runs that are followed, and the last that have ended."""
        return [run_view(brain, registry.silent_s(brain), node) for brain in registry.brains()]

    @routes.get("/{run}")
    def details(run: str) -> RunDetails:
        """A run with its trials, and its decisions with their reasons."""

        def read() -> RunDetails:
            brain = registry.brain(run)
            return run_details(brain, registry.silent_s(brain), registry.store, node)

        return _allowed(read)


def _add_command(routes: APIRouter, registry: Registry, node: Node | None, command: Command, description: str) -> None:
    @routes.post(f"/{{run}}/{command}", name=command, description=description)
    def carry_out(run: str) -> RunView:
        brain = _allowed(lambda: registry.command(run, command))
        return run_view(brain, registry.silent_s(brain), node)


class Reports:
    """Answers reports, and leaves all else to another application: FastAPI takes longer than all else about them.

    Args:
        registry: of the runs.
        app: for other requests; it has the same route, which its documentation shows.
    """

    def __init__(self, registry: Registry, app: App) -> None:
        self._registry, self._app = registry, app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        route = _REPORT.fullmatch(scope["path"]) if scope["type"] == "http" and scope["method"] == "POST" else None
        if route is None:
            await self._app(scope, receive, send)
            return
        body = (await receive()).get("body", b"")  # whole, as `limits.Limited` hands it over
        try:
            text = _heard(self._registry, route[1], body)
        except HTTPException as error:
            await refuse(send, error.status_code, str(error.detail))
        except Exception as error:
            await refuse(send, 500, failure(error))
            raise  # the server logs it
        else:
            headers = [(b"content-type", b"application/json"), (b"content-length", str(len(text)).encode())]
            await send({"type": "http.response.start", "status": 200, "headers": headers})
            await send({"type": "http.response.body", "body": text})


def _heard(registry: Registry, run: str, body: bytes) -> bytes:
    """The answer to a report."""
    message = _read(Report, body, "report")
    return _allowed(lambda: registry.answer(run, message))


def _allowed(work: Callable[[], T]) -> T:
    """What comes of it; what is refused becomes a status with its sentence."""
    try:
        return work()
    except UnknownRunError as error:
        raise HTTPException(404, str(error)) from error
    except NotAllowedError as error:
        raise HTTPException(409, str(error)) from error
    except BadInputError as error:
        raise HTTPException(422, str(error)) from error
    except ZftuneError as error:  # the store cannot be read or written now
        raise HTTPException(503, str(error)) from error


def _read(kind: type[T], body: bytes, name: str) -> T:
    try:
        return decode(kind, parse(body, most_bytes=MOST_BYTES), name)
    except BadInputError as error:
        raise HTTPException(422, str(error)) from error


def _json(message: Any) -> Response:
    return Response(json.dumps(encode(message), allow_nan=False), media_type="application/json")


def _body(kind: type[Any]) -> dict[str, Any]:
    content = {"application/json": {"schema": schema(kind)}}
    return {"requestBody": {"required": True, "content": content}}


def _answer(kind: type[Any]) -> dict[int | str, dict[str, Any]]:
    return {200: {"content": {"application/json": {"schema": schema(kind)}}}}
