"""The node's samplers, one for each GPU that a run trains on and one for the host: shared by all runs that the daemon
follows, from the first to the last. They void measurements, and what they see is shown beside what the runs report.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
from fastapi import APIRouter, Response
from prometheus_client import CONTENT_TYPE_PLAIN_0_0_4, CollectorRegistry, Gauge, Info, generate_latest
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

import zftune
from zftune.daemon import PROTOCOL
from zftune.daemon.server.answers import DaemonState
from zftune.errors import ZftuneError
from zftune.telemetry import HostSampler, NvmlSampler
from zftune.telemetry.disturbance import GpuDisturbance
from zftune.text import write_text

if TYPE_CHECKING:
    from zftune.daemon.protocol.messages import Hello


_OF_GPU = {
    "utilisation_percent": ("zftune_gpu_utilisation_percent", "Utilisation by NVML, mean of the last seconds"),
    "power_w": ("zftune_gpu_power_watts", "Power by NVML, mean of the last seconds"),
    "memory_used_bytes": ("zftune_gpu_memory_used_bytes", "Memory in use by NVML"),
    "other_processes": ("zftune_gpu_other_processes", "Processes on the GPU that belong to no run"),
}
_OF_HOST = {
    "machine_cpu_percent": ("zftune_host_cpu_percent", "Share of all cores in use"),
    "cpu_percent": ("zftune_runs_cpu_percent", "Processor time of the runs' processes, 100 a core"),
    "memory_used_bytes": ("zftune_host_memory_used_bytes", "Memory in use on this machine"),
}


class NodeFigures(Collector):
    """Means of the last seconds; unknown figures are left out."""

    def __init__(self, node: Node) -> None:
        self._node = node

    def collect(self) -> Iterator[GaugeMetricFamily]:
        """Every figure that is known now."""
        gpus = self._node.gpus()
        for field, (name, words) in _OF_GPU.items():
            family = GaugeMetricFamily(name, words, labels=("gpu",))
            for uuid, seen in gpus.items():
                value = (seen.figures or {}).get(field)
                if value is not None:
                    family.add_metric([uuid], float(value))
            yield family
        host = self._node.host.figures or {}
        for field, (name, words) in _OF_HOST.items():
            family = GaugeMetricFamily(name, words)
            if host.get(field) is not None:
                family.add_metric([], float(host[field]))
            yield family


TEXTFILE_PERIOD_S = 15.0

_log = logging.getLogger(__name__)


class Metrics:
    """One registry, filled by the daemon and its services."""

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
        """Write a file every `period_s`, whole each time, and remove it in the end: its figures would look alive."""
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


WINDOW_S = 20.0
"""What is shown are means over so long."""
LOOK_S = 5.0
_MOST_GPUS = 64
_GPU_HZ = 5.0
_HOST_HZ = 0.2
_TOO_MANY = f"the runs name more than {_MOST_GPUS} GPUs; this one is not sampled"
_logger = logging.getLogger("zftune.daemon")

Disturbance = Callable[[], str | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """What a sampler saw of late."""

    figures: Mapping[str, Any] | None
    """As the profile document has them; None: nothing."""
    missing: str = ""
    """Why there is nothing."""


def _sampler(uuid: str, ours: Callable[[int], bool | None]) -> NvmlSampler:
    return NvmlSampler([uuid], _GPU_HZ, ours=ours)


class _Gpu:
    """A GPU that is sampled, from its first run to its last."""

    def __init__(self, make: Callable[[Callable[[int], bool | None]], NvmlSampler]) -> None:
        self.pids: dict[str, int] = {}
        """Of the runs that train on it."""
        self.seen = Seen(figures=None, missing="it has just begun to be sampled")
        self.sampler = make(self._is_ours)
        self.sampler.start()

    def _is_ours(self, pid: int) -> bool | None:
        """Whether a process belongs to one of the runs; None: it is not known here."""
        try:
            process = psutil.Process(pid)
            family = {pid, *(parent.pid for parent in process.parents())}
        except psutil.NoSuchProcess:
            return None
        except psutil.AccessDenied:
            return False  # of another user
        return bool(family & set(self.pids.copy().values()))


class _Disturbance:
    """A run's GPU as that run sees it: other runs on it are co-tenants, though the sampler takes them for ours."""

    def __init__(self, gpu: _Gpu, run: str) -> None:
        self._gpu, self._run = gpu, run
        self._seen = GpuDisturbance(gpu.sampler, None)
        self._fewest = self._others()

    def __call__(self) -> str | None:
        found = self._seen()
        others = self._others()
        self._fewest = min(self._fewest, others)
        more = others - self._fewest
        if found is None and more:
            return f"the GPU was shared with {more} more run{'' if more == 1 else 's'}"
        return found

    def _others(self) -> int:
        pids = self._gpu.pids.copy()
        own = pids.get(self._run)
        return sum(psutil.pid_exists(pid) for pid in {*pids.values()} - {own})


class Node:
    """Samples the GPUs of the runs, and the host, while there are any.

    Args:
        live: the runs that live; a run that is not among them any more is not sampled for.
        sampler: makes the sampler of a GPU, given its UUID and what tells whose a process is.
    """

    def __init__(
        self,
        live: Callable[[], Collection[str]],
        *,
        sampler: Callable[[str, Callable[[int], bool | None]], NvmlSampler] = _sampler,
        look_s: float = LOOK_S,
    ) -> None:
        self._live, self._make, self._look_s = live, sampler, look_s
        self._gpus: dict[str, _Gpu] = {}
        self._runs: dict[str, tuple[int, str | None]] = {}
        """Process and GPU."""
        self._host: HostSampler | None = None
        self._host_seen = Seen(figures=None, missing="there is no run")
        self._lock = threading.Lock()
        self._closing = threading.Event()
        self._thread: threading.Thread | None = None

    def watch(self, hello: Hello) -> Disturbance:
        """Sample for a run from now on; returns at once. The result tells why a measurement does not count. Returns
        says why a measurement does not count.
        """
        uuid = hello.gpu_uuid
        with self._lock:
            if self._closing.is_set():
                return lambda: None
            self._runs[hello.run] = (hello.pid, uuid)
            self._begin()
            gpu = None if uuid is None else self._gpu(uuid)
            if gpu is None:
                return lambda: None
            gpu.pids[hello.run] = hello.pid
        return _Disturbance(gpu, hello.run)

    def gpu(self, run: str) -> tuple[str, Seen] | None:
        """The UUID of a run's GPU, and what was seen of it; None: it trains on none, or has ended."""
        with self._lock:
            _, uuid = self._runs.get(run, (0, None))
            if uuid is None:
                return None
            gpu = self._gpus.get(uuid.casefold())
        return uuid, Seen(figures=None, missing=_TOO_MANY) if gpu is None else gpu.seen

    def gpus(self) -> dict[str, Seen]:
        """All that are sampled, by UUID."""
        with self._lock:
            return {uuid: gpu.seen for uuid, gpu in self._gpus.items()}

    @property
    def host(self) -> Seen:
        """What was seen of the machine and the runs' processes."""
        return self._host_seen

    def look(self) -> None:
        """Take in what was sampled, and let go of runs that have ended; takes some milliseconds."""
        with self._lock:
            known = set(self._runs)
        self._forget(known - set(self._live()))  # asked after: a run that has just come is among them
        end_ns = time.monotonic_ns()
        begin_ns = end_ns - round(WINDOW_S * 1e9)
        with self._lock:
            gpus, host = list(self._gpus.values()), self._host
        for gpu in gpus:
            gpu.seen = _seen(gpu.sampler.summary(begin_ns, end_ns))
        self._host_seen = (
            Seen(figures=None, missing="there is no run") if host is None else _seen(host.summary(begin_ns, end_ns))
        )

    def close(self) -> None:
        """End all samplers; a driver that hangs is waited for some seconds."""
        self._closing.set()
        if self._thread is not None:
            self._thread.join(self._look_s)
        with self._lock:
            runs = set(self._runs)
        self._forget(runs)

    def _begin(self) -> None:
        """Under the lock."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._go_on, name="zftune-node", daemon=True)
            self._thread.start()
        if self._host is None:
            self._host = HostSampler(self._pids, _HOST_HZ)
            self._host.start()

    def _gpu(self, uuid: str) -> _Gpu | None:
        """Under the lock."""
        found = self._gpus.get(uuid.casefold())
        if found is None and len(self._gpus) < _MOST_GPUS:
            found = self._gpus[uuid.casefold()] = _Gpu(functools.partial(self._make, uuid))
        return found

    def _pids(self) -> list[int]:
        with self._lock:
            return sorted({pid for pid, _ in self._runs.values()})

    def _forget(self, runs: Collection[str]) -> None:
        ended: list[NvmlSampler | HostSampler] = []
        with self._lock:
            for run in runs:
                _, uuid = self._runs.pop(run, (0, None))
                gpu = None if uuid is None else self._gpus.get(uuid.casefold())
                if gpu is None or uuid is None:
                    continue
                gpu.pids.pop(run, None)
                if not gpu.pids:
                    ended.append(self._gpus.pop(uuid.casefold()).sampler)
            if not self._runs and self._host is not None:
                ended.append(self._host)
                self._host = None
        for sampler in ended:
            sampler.stop()

    def _go_on(self) -> None:
        while not self._closing.wait(self._look_s):
            try:
                self.look()
            except Exception:
                _logger.exception("The samplers could not be looked at.")


def _seen(found: tuple[Mapping[str, Any] | None, Mapping[str, str]]) -> Seen:
    figures, missing = found
    return Seen(figures=figures, missing="" if figures is not None else missing.get("", "nothing was sampled"))
