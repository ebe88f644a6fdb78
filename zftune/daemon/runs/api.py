"""The HTTP interface of the daemon's runs (/v1/runs), and how the daemon hosts them.

Messages of agents are read by the wire's own strict decoder. What must not wait runs in the event loop; what reads or
writes the store runs in threads.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Annotated, Any, TypeVar

from fastapi import APIRouter
from fastapi.responses import Response
from prometheus_client import CollectorRegistry
from pydantic import GetCoreSchemaHandler
from pydantic_core import CoreSchema
from pydantic_core.core_schema import no_info_wrap_validator_function
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException

from zftune.daemon.protocol.codec import decode, encode
from zftune.daemon.protocol.messages import Directive, Farewell, Goodbye, Hello, Report, Welcome
from zftune.daemon.runs.registry import Command, Registry, UnknownRunError
from zftune.daemon.runs.states import NotAllowedError
from zftune.daemon.runs.views import RunDetails, RunView, run_details, run_view
from zftune.daemon.server.answers import Service
from zftune.daemon.server.sampling import Node, NodeFigures
from zftune.errors import BadInputError, ZftuneError

T = TypeVar("T")
_COMMANDS: tuple[tuple[Command, str], ...] = (
    ("pause", "Let the best settings so far run undisturbed until `resume`."),
    ("resume", "Go on after a pause."),
    ("rollback", "End the search with the setting before the last that was adopted, and never try that one again."),
    ("stop", "End the tuning; the best settings so far stay."),
)


def router(registry: Registry, node: Node | None = None) -> APIRouter:
    """The routes; `node` samples for the runs, if given."""
    routes = APIRouter(prefix="/v1/runs", tags=["runs"])
    _add_messages(routes, registry)
    _add_readers(routes, registry, node)
    for command, description in _COMMANDS:
        _add_command(routes, registry, node, command, description)
    return routes


class _Strictly:
    """A body that the wire's decoder reads, where FastAPI's would take texts for numbers."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __get_pydantic_core_schema__(self, kind: Any, described: GetCoreSchemaHandler) -> CoreSchema:
        return no_info_wrap_validator_function(lambda value, _: decode(kind, value, self._name), described(kind))


def _add_messages(routes: APIRouter, registry: Registry) -> None:
    @routes.post("", responses=_answer(Welcome), summary="Follow a run.")
    async def hello(message: Annotated[Hello, _Strictly("hello")]) -> Response:
        return _json(_allowed(lambda: registry.hello(message)))

    @routes.post("/{run}/report", responses=_answer(Directive), summary="Hear of a run.")
    async def report(run: str, message: Annotated[Report, _Strictly("report")]) -> Response:
        return _json(_allowed(lambda: registry.report(run, message)))

    @routes.post("/{run}/goodbye", responses=_answer(Farewell), summary="A run ends.")
    async def goodbye(run: str, message: Annotated[Goodbye, _Strictly("goodbye")]) -> Response:
        return _json(await run_in_threadpool(_allowed, lambda: registry.goodbye(run, message)))


def _json(message: Any) -> Response:
    return Response(encode(message), media_type="application/json")


def _answer(kind: type[Any]) -> dict[int | str, dict[str, Any]]:
    return {200: {"model": kind}}


def _add_readers(routes: APIRouter, registry: Registry, node: Node | None) -> None:
    @routes.get("")
    def runs() -> list[RunView]:  # in a thread: it asks the store which trainings live
        """The runs that are followed, and the last that have ended."""
        return [run_view(brain, registry.silent_s(brain), node) for brain in registry.shown()]

    @routes.get("/{run}")
    def details(run: str) -> RunDetails:
        """A run with its trials, and its decisions with their reasons; `run` may be the name that screens show."""

        def read() -> RunDetails:
            brain = registry.brain(run)
            return run_details(brain, registry.silent_s(brain), node)

        return _allowed(read)


def _add_command(routes: APIRouter, registry: Registry, node: Node | None, command: Command, description: str) -> None:
    @routes.post(f"/{{run}}/{command}", name=command, description=description)
    def carry_out(run: str) -> RunView:
        brain = _allowed(lambda: registry.command(run, command))
        return run_view(brain, registry.silent_s(brain), node)


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


class Runs(Service):
    """The service of the runs; registry and node (None: nothing is sampled) are closed with the daemon."""

    def __init__(self, registry: Registry, node: Node | None = None) -> None:
        self.registry, self.node = registry, node

    def routers(self) -> Sequence[APIRouter]:
        return (router(self.registry, self.node),)

    def register(self, registry: CollectorRegistry) -> None:
        if self.node is not None:
            registry.register(NodeFigures(self.node))

    def live_runs(self) -> int:
        return self.registry.live_runs

    def stores(self) -> Sequence[str]:
        return [str(store.path or "memory, or a server") for store in self.registry.stores]

    def notices(self) -> Sequence[str]:
        return self.registry.notices

    async def start(self) -> None:
        self.registry.start()

    async def stop(self) -> None:
        await run_in_threadpool(self.registry.close)
        if self.node is not None:
            await run_in_threadpool(self.node.close)
