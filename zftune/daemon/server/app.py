"""The daemon's HTTP interface, /v1/..., described by /v1/openapi.json, and the files of its page."""

from __future__ import annotations

import json
import mimetypes
import os
from collections.abc import Awaitable, Callable
from importlib.resources import files
from typing import Annotated, Any

from fastapi import APIRouter, FastAPI, Query
from fastapi.responses import Response
from pydantic import BaseModel, Field
from starlette.exceptions import HTTPException

import zftune
from zftune.daemon import PROTOCOL
from zftune.daemon.server.answers import App, DaemonState, ErrorAnswer, answer_in_sentences
from zftune.daemon.server.limits import Limited, Limits
from zftune.daemon.server.sampling import Metrics
from zftune.plotly_js import plotly_js
from zftune.words import page_words

INDEX = "index.html"


def page_router() -> APIRouter:
    """/ and what its page consists of, read once."""
    router = APIRouter(include_in_schema=False)
    for entry in files("zftune.daemon").joinpath("page").iterdir():
        kind, _ = mimetypes.guess_type(entry.name)
        if kind is None or not entry.is_file():
            continue
        path = "/" if entry.name == INDEX else f"/{entry.name}"
        router.add_api_route(path, _file(entry.read_bytes(), kind), methods=["GET"])
    tables = "".join(f"export const {name} = {json.dumps(table)};\n" for name, table in page_words().items())
    router.add_api_route("/tables.js", _file(tables.encode(), "text/javascript"), methods=["GET"])
    script = _file(plotly_js().encode(), "text/javascript")
    router.add_api_route("/plotly-basic.min.js", script, methods=["GET"])
    return router


def _file(content: bytes, kind: str) -> Callable[[], Awaitable[Response]]:
    async def file() -> Response:
        return Response(content, media_type=kind)

    return file


# FastAPI would report to what OTEL_... in the environment names; the daemon reports to nobody.
_NO_TELEMETRY: Any = {
    "auto_configure": False,
    "tracing": False,
    "metrics": False,
    "logs": False,
    "operation_spans": False,
}


class Health(BaseModel):
    """That the daemon lives, and what it serves."""

    zftune: str = Field(description="Version of the package.")
    protocol: int = Field(description="Version of what agents and the daemon tell each other.")
    pid: int = Field(description="In the daemon's own namespace.")
    uptime_s: float = Field(description="Since it was started.")
    runs: int = Field(description="Runs that hold a lease.")
    private: bool = Field(description="Whether it ends with its runs.")
    stores: list[str] = Field(description="The stores of its runs: the paths of files, or what they are.")
    notices: list[str] = Field(description="Sentences: what it cannot do as it should.")


class PageLink(BaseModel):
    """Where the page opens."""

    url: str = Field(description="Works once, for a minute.")


class Expecting(BaseModel):
    """That the daemon waits for a run that is about to come."""

    expecting: bool


class Stopping(BaseModel):
    """That the daemon ends after the requests that are under way."""

    stopping: bool


def create_app(state: DaemonState, metrics: Metrics, limits: Limits | None = None) -> App:
    """The application that is served on the socket; `guard.Guarded` is put around it for the page."""
    app = FastAPI(
        title="zftune daemon",
        version=str(PROTOCOL),
        openapi_url="/v1/openapi.json",
        docs_url=None,  # these pages load scripts from elsewhere
        redoc_url=None,
        redirect_slashes=False,
        responses={"4XX": {"model": ErrorAnswer, "description": "Refused, with the reason"}},
        telemetry=_NO_TELEMETRY,
    )
    answer_in_sentences(app)
    app.include_router(_own_router(state))
    app.include_router(metrics.router())
    app.include_router(page_router())
    for service in state.services:
        for router in service.routers():
            app.include_router(router)
    return Limited(app, limits or Limits())


def _own_router(state: DaemonState) -> APIRouter:
    router = APIRouter(prefix="/v1", tags=["daemon"])

    @router.get("/health")
    async def health() -> Health:
        return Health(
            zftune=zftune.__version__,
            protocol=PROTOCOL,
            pid=os.getpid(),
            uptime_s=state.uptime_s,
            runs=state.live_runs,
            private=state.private,
            stores=state.stores,
            notices=state.notices,
        )

    @router.post("/page")
    async def page() -> PageLink:
        if state.open_page is None:
            raise HTTPException(409, "this daemon serves no page")
        return PageLink(url=await state.open_page())

    @router.post("/expect")
    async def expect(pid: Annotated[int, Query(ge=1, lt=1 << 31)]) -> Expecting:
        """Tell that a run is about to come in a process: as long as that lives, a private daemon does not end."""
        state.expect_run(pid)
        return Expecting(expecting=True)

    @router.post("/stop", status_code=202)
    async def stop() -> Stopping:
        state.stop("asked to")
        return Stopping(stopping=True)

    return router
