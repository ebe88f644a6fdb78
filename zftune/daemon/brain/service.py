"""The brains as a part of the daemon."""

from __future__ import annotations

from collections.abc import Sequence

from fastapi import APIRouter
from starlette.concurrency import run_in_threadpool

from zftune.daemon.brain.api import router
from zftune.daemon.brain.registry import Registry
from zftune.daemon.service import Service


class Runs(Service):
    """Hosts a registry.

    Args:
        registry: of the runs; started and closed with the daemon.
    """

    def __init__(self, registry: Registry) -> None:
        self.registry = registry

    def routers(self) -> Sequence[APIRouter]:
        return (router(self.registry),)

    def live_runs(self) -> int:
        return self.registry.live_runs

    async def start(self) -> None:
        self.registry.start()

    async def stop(self) -> None:
        await run_in_threadpool(self.registry.close)
