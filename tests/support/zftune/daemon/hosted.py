"""A daemon with a service for tests: `python -m tests.support.zftune.daemon.hosted`."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import logging
import os
import time
from collections.abc import Iterator, Sequence
from typing import Annotated

from fastapi import APIRouter
from fastapi import Path as Part
from fastapi.responses import StreamingResponse
from prometheus_client import CollectorRegistry, Counter
from pydantic import BaseModel, Field

from zftune.daemon.process import Options, serve
from zftune.daemon.server import limits as protocols
from zftune.daemon.server.answers import Service
from zftune.errors import BadInputError
from zftune.store.location import meant_by

_log = logging.getLogger(__name__)


class Knobs(BaseModel):
    topk_ratio: float = Field(ge=0, le=1, allow_inf_nan=False)
    name: str = Field(max_length=40)


class Hosted(Service):
    """Routes that are slow, fail, stream (with a pause in the midst), take input; and runs that come and go."""

    def __init__(self, pause_s: float = 3.0) -> None:
        self._runs, self._pause_s = 0, pause_s
        self._release = asyncio.Event()

    def live_runs(self) -> int:
        return self._runs

    def stores(self) -> Sequence[str]:
        return [str(meant_by(os.environ).path)]

    def register(self, registry: CollectorRegistry) -> None:
        self._asked = Counter("test_asked", "Requests to /v1/test/echo", registry=registry)

    async def start(self) -> None:
        _log.info("service starts")

    async def stop(self) -> None:
        _log.info("service stops")

    def routers(self) -> Sequence[APIRouter]:
        router = APIRouter(prefix="/v1/test")

        @router.post("/echo/{number}")
        async def echo(number: Annotated[int, Part(ge=0, lt=1 << 31)], knobs: Knobs) -> Knobs:
            self._asked.inc()
            return knobs

        @router.post("/runs/{count}")
        async def runs(count: Annotated[int, Part(ge=0, lt=100)]) -> int:
            self._runs = count
            return count

        self._add_odd_ones(router)
        return (router,)

    def _add_odd_ones(self, router: APIRouter) -> None:
        @router.get("/held", include_in_schema=False)
        async def held() -> str:
            _log.info("held")
            await self._release.wait()
            return "released"

        @router.post("/release", include_in_schema=False)
        async def release() -> str:
            self._release.set()
            return "ok"

        @router.get("/fails", include_in_schema=False)
        async def fails() -> str:
            raise RuntimeError("secret reason")

        @router.get("/refuses", include_in_schema=False)
        async def refuses() -> str:
            raise BadInputError("name 'x': allowed is y")

        @router.get("/streams", include_in_schema=False)
        async def streams() -> StreamingResponse:
            async def parts() -> object:
                yield b"one "
                await asyncio.sleep(self._pause_s)
                yield b"two"

            return StreamingResponse(parts())  # type: ignore[arg-type]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--private", action="store_true")
    parser.add_argument("--idle-exit-s", type=float)
    parser.add_argument("--head-s", type=float, default=protocols.HEAD_S)
    parser.add_argument("--slow", action="store_true")
    given = parser.parse_args()
    protocols.HEAD_S = given.head_s
    serve(Options(private=given.private, idle_exit_s=given.idle_exit_s), lambda: hosting(given.slow))


@contextlib.contextmanager
def hosting(slow: bool) -> Iterator[list[Service]]:
    """The service; with `slow`, it takes ages until it is there."""
    if slow:
        _log.info("is slow")
        time.sleep(600)
    yield [Hosted()]


if __name__ == "__main__":
    main()
