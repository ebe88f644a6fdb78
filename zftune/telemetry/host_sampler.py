"""`HostSampler`: what this machine and the training processes did over time."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil

from zftune.telemetry.host_files import (
    RESOURCES,
    cpu_folders,
    cpu_quota,
    nodes_used,
    numa_node_count,
    pressure_file,
    pressure_us,
    throttling,
)
from zftune.telemetry.readings import Log, Reading, known, mean, rows
from zftune.telemetry.ticker import Ticker
from zftune.telemetry.watched import Watched

SERIES_FIELDS = (
    "cpu_percent",
    "machine_cpu_percent",
    "memory_used_bytes",
    "rss_bytes",
    "psi_cpu_percent",
    "psi_memory_percent",
    "psi_io_percent",
    "throttled_percent",
)
_MEANS = tuple(field for field in SERIES_FIELDS if field != "throttled_percent")
_SLOW_NS = 1_000_000_000
_IDLE = ("idle", "iowait")
_COUNTED_ELSEWHERE = ("guest", "guest_nice")  # parts of user and nice

_NO_PROCESS = "no process was watched in the measured time"
_NO_READING = "no reading falls into the measured time"
_REASONS = {
    "cpu_percent": _NO_PROCESS,
    "rss_bytes": _NO_PROCESS,
    "threads": _NO_PROCESS,
    "affinity_cores": _NO_PROCESS,
    "quota_cores": "no control group limits the CPU time",
    "throttled_fraction": "no control group tells about throttling",
    "numa_nodes_used": "the kernel does not tell where the pages are",
} | {f"psi_{resource}_percent": "the kernel keeps no pressure stall information" for resource in RESOURCES}


class HostSampler:
    """Samples from `start()` to `stop()` and remembers the last hour.

    Args:
        pids: the processes to watch, asked at every tick.
        rate_hz: ticks a second.
        clock_ns: nanoseconds, for all times; CLOCK_MONOTONIC unless said otherwise.
        root: stands for "/" where files of the kernel are read.

    Raises:
        ValueError: the rate is not above 0 and at most 20.
    """

    def __init__(
        self,
        pids: Callable[[], Sequence[int]],
        rate_hz: float = 5.0,
        *,
        clock_ns: Callable[[], int] = time.monotonic_ns,
        root: Path = Path("/"),
    ) -> None:
        self._clock_ns = clock_ns
        self._root = root
        self._watched = Watched(pids, root)
        self._log = Log(rate_hz)
        self._ticker = Ticker(self._run, rate_hz=rate_hz, name="zftune-host")

    def start(self) -> None:
        """Begin to sample."""
        self._ticker.start()

    def stop(self) -> None:
        """Take a last sample and end the thread. What was sampled stays."""
        self._ticker.stop()

    def summary(self, begin_ns: int, end_ns: int) -> tuple[dict[str, Any] | None, dict[str, str]]:
        """The figures over a window: the "system" of a profile document.

        Args:
            begin_ns: begin of the window on the sampler's clock.
            end_ns: its end.

        Returns:
            The figures or None, and the reason of every null by name relative to "system" ("" for all). "cpu_percent"
            is that of the watched processes, 100 a core; "machine_cpu_percent" is a share of all cores;
            "throttled_fraction" is the share of the quota's periods in which the group had to stop; "threads",
            "affinity_cores" and "numa_nodes_used" are the most that was seen. "psi_*_percent" is the share of time in
            which some task of the control group (else of the machine) waited for the resource.
        """
        readings = self._log.between(begin_ns, end_ns)
        if not readings:
            return None, {"": self._ticker.failure or _NO_READING}
        figures: dict[str, Any] = {field: mean(readings, field, begin_ns, end_ns) for field in _MEANS}
        throttled = mean(readings, "throttled_percent", begin_ns, end_ns)
        figures["throttled_fraction"] = None if throttled is None else throttled / 100
        figures["quota_cores"] = cpu_quota(self._root)
        for field in ("threads", "affinity_cores", "numa_nodes_used"):
            # Asked more rarely than a short window is long.
            seen = known(readings, field) or known(self._log.all(), field)
            figures[field] = int(max(seen)) if seen else None
        figures["samples"] = len(readings)
        missing = {name: _REASONS.get(name, _NO_READING) for name, value in figures.items() if value is None}
        if self._ticker.failure is not None:
            missing["samples"] = self._ticker.failure
        return figures, missing

    def series(self, begin_ns: int, end_ns: int) -> list[dict[str, float | None]]:
        """Rows of a window in order of time: "at_ms" since its begin, and figures or None."""
        return rows(self._log.between(begin_ns, end_ns), SERIES_FIELDS, begin_ns)

    def _run(self, ticks: Iterator[None]) -> None:
        counters = _Counters(self._root)
        last_ns: int | None = None
        slow_due_ns = 0
        for _ in ticks:
            now_ns = self._clock_ns()
            since_ns = now_ns if last_ns is None else last_ns
            self._watched.update(now_ns)
            values = self._values(counters, (now_ns - since_ns) / 1e9)
            if now_ns >= slow_due_ns or self._ticker.stopping:
                slow_due_ns = now_ns + _SLOW_NS
                values |= self._slow(now_ns)
            self._log.add(Reading(since_ns, now_ns, values))
            last_ns = now_ns

    def _values(self, counters: _Counters, passed_s: float) -> dict[str, float]:
        values = self._watched.read()
        cpu_s = values.pop("cpu_s", None)
        if cpu_s is not None and passed_s > 0:
            values["cpu_percent"] = 100 * cpu_s / passed_s
        memory = psutil.virtual_memory()
        values["memory_used_bytes"] = float(memory.total - memory.available)
        return values | counters.read(passed_s)

    def _slow(self, now_ns: int) -> dict[str, float]:
        values: dict[str, float] = {}
        cores = self._watched.affinity_cores()
        if cores is not None:
            values["affinity_cores"] = cores
        if numa_node_count(self._root) == 1:
            values["numa_nodes_used"] = 1
        elif pages := self._watched.pages(now_ns, last=self._ticker.stopping):
            values["numa_nodes_used"] = nodes_used(pages)
        return values


class _Counters:
    """Counters of the machine and the control groups, as rates between two calls."""

    def __init__(self, root: Path) -> None:
        self._folders = cpu_folders(root)
        files = {resource: pressure_file(resource, self._folders, root) for resource in RESOURCES}
        self._pressure = {f"psi_{resource}_percent": path for resource, path in files.items() if path is not None}
        self._last_us: dict[str, int] = {}
        self._throttling = throttling(self._folders)
        self._cpu: Mapping[str, float] | None = None

    def read(self, passed_s: float) -> dict[str, float]:
        return self._machine() | self._pressures(passed_s) | self._throttled()

    def _machine(self) -> dict[str, float]:
        before, self._cpu = self._cpu, psutil.cpu_times()._asdict()
        if before is None:
            return {}
        spent = {name: max(0.0, value - before[name]) for name, value in self._cpu.items()}
        total = sum(value for name, value in spent.items() if name not in _COUNTED_ELSEWHERE)
        idle = sum(spent.get(name, 0.0) for name in _IDLE)
        return {"machine_cpu_percent": 100 * (total - idle) / total} if total > 0 else {}

    def _pressures(self, passed_s: float) -> dict[str, float]:
        values = {}
        for field, path in self._pressure.items():
            now_us = pressure_us(path)
            before_us = self._last_us.get(field)
            if now_us is not None:
                self._last_us[field] = now_us
                if before_us is not None and passed_s > 0:
                    values[field] = min(100.0, (now_us - before_us) / 1e6 / passed_s * 100)
        return values

    def _throttled(self) -> dict[str, float]:
        """Of the group that was hindered most; a group without a quota has no periods and is not hindered."""
        before, self._throttling = self._throttling, throttling(self._folders)
        shares = []
        for folder, now in self._throttling.items():
            if folder in before:
                periods = now.periods - before[folder].periods
                shares.append((now.throttled - before[folder].throttled) / periods if periods > 0 else 0.0)
        return {"throttled_percent": 100 * max(shares)} if shares else {}
