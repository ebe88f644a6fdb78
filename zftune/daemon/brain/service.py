"""The brains as a part of the daemon."""

from __future__ import annotations

from collections.abc import Sequence

from fastapi import APIRouter
from prometheus_client import CollectorRegistry
from starlette.concurrency import run_in_threadpool

from zftune.daemon.answers import App
from zftune.daemon.brain.api import Reports, router
from zftune.daemon.brain.registry import Registry
from zftune.daemon.sampling import Node
from zftune.daemon.sampling_metrics import NodeFigures
from zftune.daemon.service import Service


class Runs(Service):
    """Hosts a registry.

    Args:
        registry: of the runs; started and closed with the daemon.
        node: samples for them, and is closed with the daemon; None: nobody does.
    """

    def __init__(self, registry: Registry, node: Node | None = None) -> None:
        self.registry, self.node = registry, node

    def routers(self) -> Sequence[APIRouter]:
        return (router(self.registry, self.node),)

    def register(self, registry: CollectorRegistry) -> None:
        if self.node is not None:
            registry.register(NodeFigures(self.node))

    def shortcut(self, app: App) -> App:
        return Reports(self.registry, app)

    def live_runs(self) -> int:
        return self.registry.live_runs

    async def start(self) -> None:
        self.registry.start()

    async def stop(self) -> None:
        await run_in_threadpool(self.registry.close)
        if self.node is not None:
            await run_in_threadpool(self.node.close)
