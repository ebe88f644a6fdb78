"""The brains' part of the daemon's HTTP interface: /v1/runs.

Messages of agents are read by the wire's own strict decoders, and described by their schemas. What must not wait runs
in the event loop; what reads or writes the store runs in threads.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, TypeVar

from fastapi import APIRouter, Request
from fastapi.responses import Response
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException

from zftune.daemon.brain.registry import Command, Registry, UnknownRunError
from zftune.daemon.brain.states import NotAllowedError
from zftune.daemon.brain.views import RunDetails, RunView, run_details, run_view
from zftune.daemon.wire import MOST_BYTES, Directive, Farewell, Goodbye, Hello, Report, Welcome, decode, encode, parse
from zftune.daemon.wire.schema import schema
from zftune.errors import BadInputError, ZftuneError

T = TypeVar("T")
_COMMANDS: tuple[tuple[Command, str], ...] = (
    ("pause", "Let the incumbent's knobs run undisturbed until `resume`."),
    ("resume", "Go on after a pause."),
    ("rollback", "Pin the setting before the last that was adopted, and never try that one again."),
    ("stop", "End the tuning; the incumbent's knobs stay."),
)


def router(registry: Registry) -> APIRouter:
    """The routes.

    Args:
        registry: of the runs.
    """
    routes = APIRouter(prefix="/v1/runs", tags=["runs"])
    _add_messages(routes, registry)
    _add_readers(routes, registry)
    for command, description in _COMMANDS:
        _add_command(routes, registry, command, description)
    return routes


def _add_messages(routes: APIRouter, registry: Registry) -> None:
    @routes.post("", openapi_extra=_body(Hello), responses=_answer(Welcome), summary="Follow a run.")
    async def hello(request: Request) -> Response:
        message = _read(Hello, await request.body(), "hello")
        return _json(_allowed(lambda: registry.hello(message)))

    @routes.post("/{run}/report", openapi_extra=_body(Report), responses=_answer(Directive), summary="Hear of a run.")
    async def report(run: str, request: Request) -> Response:
        message = _read(Report, await request.body(), "report")
        return _json(_allowed(lambda: registry.report(run, message)))

    @routes.post("/{run}/goodbye", openapi_extra=_body(Goodbye), responses=_answer(Farewell), summary="A run ends.")
    async def goodbye(run: str, request: Request) -> Response:
        message = _read(Goodbye, await request.body(), "goodbye")
        return _json(await run_in_threadpool(_allowed, lambda: registry.goodbye(run, message)))


def _add_readers(routes: APIRouter, registry: Registry) -> None:
    @routes.get("")
    async def runs() -> list[RunView]:
        """The runs that are followed, and the last that have ended."""
        return [run_view(brain, registry.silent_s(brain)) for brain in registry.brains()]

    @routes.get("/{run}")
    def details(run: str) -> RunDetails:
        """A run with its trials, and its decisions with their reasons."""

        def read() -> RunDetails:
            brain = registry.brain(run)
            return run_details(brain, registry.silent_s(brain), registry.store)

        return _allowed(read)


def _add_command(routes: APIRouter, registry: Registry, command: Command, description: str) -> None:
    @routes.post(f"/{{run}}/{command}", name=command, description=description)
    def carry_out(run: str) -> RunView:
        brain = _allowed(lambda: registry.command(run, command))
        return run_view(brain, registry.silent_s(brain))


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
