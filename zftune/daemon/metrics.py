"""What Prometheus reads: at /metrics, or from a file for its node exporter."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path

from fastapi import APIRouter, Response
from prometheus_client import CONTENT_TYPE_PLAIN_0_0_4, CollectorRegistry, Gauge, Info, generate_latest

import zftune
from zftune.daemon import PROTOCOL
from zftune.daemon.service import DaemonState
from zftune.errors import ZftuneError
from zftune.json_output import write_text

TEXTFILE_PERIOD_S = 15.0

_log = logging.getLogger(__name__)


class Metrics:
    """One registry, filled by the daemon and its services.

    Args:
        state: whose figures they are.
    """

    def __init__(self, state: DaemonState) -> None:
        self._state = state
        self.registry = CollectorRegistry()
        info = Info("zftune_daemon", "The daemon", registry=self.registry)
        info.info({"version": zftune.__version__, "protocol": str(PROTOCOL)})
        uptime = Gauge("zftune_daemon_uptime_seconds", "Seconds since the daemon started", registry=self.registry)
        uptime.set_function(lambda: state.uptime_s)
        runs = Gauge("zftune_runs", "Runs that hold a lease", registry=self.registry)
        runs.set_function(lambda: state.live_runs)
        for service in state.services:
            service.register(self.registry)

    def router(self) -> APIRouter:
        """/metrics, in the text format that every Prometheus reads."""
        router = APIRouter()

        @router.get("/metrics", include_in_schema=False)
        async def metrics() -> Response:
            return Response(generate_latest(self.registry), headers={"content-type": CONTENT_TYPE_PLAIN_0_0_4})

        return router

    async def keep_textfile(self, path: Path, period_s: float = TEXTFILE_PERIOD_S) -> None:
        """Write a file again and again, whole each time, and remove it in the end: its figures would look alive.

        Args:
            path: of the file.
            period_s: between two writes.
        """
        failed = False
        while True:
            text = generate_latest(self.registry).decode()
            try:
                await asyncio.to_thread(write_text, text, path, option="--metrics-textfile")
                failed = False
            except ZftuneError as error:  # a full disk does not end the daemon
                if not failed:
                    _log.warning("%s", error)
                failed = True
            if await self._state.stops_within(period_s):
                break
        try:
            path.unlink(missing_ok=True)
        except OSError as error:
            _log.warning("--metrics-textfile '%s' cannot be removed (%s)", path, error.strerror)
