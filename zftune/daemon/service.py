"""What the daemon hosts, and what they share."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fastapi import APIRouter
    from prometheus_client import CollectorRegistry

    from zftune.daemon.answers import App


class Service:
    """A part of the daemon: its routes, its figures, its life. Everything has a default.

    All methods are called in the thread of the event loop; none may block it.
    """

    def routers(self) -> Sequence[APIRouter]:
        """Its routes; their paths begin with /v1."""
        return ()

    def shortcut(self, app: App) -> App:
        """Put around the daemon's application what is asked too often for it.

        Args:
            app: answers everything, the documentation included.
        """
        return app

    def live_runs(self) -> int:
        """Runs that hold a lease: a private daemon ends when nobody has one any more."""
        return 0

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
    started_s: float = field(default_factory=time.monotonic)
    stopping: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when it drains: an answer that never ends by itself has to end then."""

    @property
    def live_runs(self) -> int:
        """Of all services."""
        return sum(service.live_runs() for service in self.services)

    @property
    def uptime_s(self) -> float:
        """Seconds since its start."""
        return time.monotonic() - self.started_s

    async def stops_within(self, period_s: float) -> bool:
        """Wait until it drains, at most `period_s`; whether it does."""
        try:
            async with asyncio.timeout(period_s):
                await self.stopping.wait()
        except TimeoutError:
            return False
        return True
