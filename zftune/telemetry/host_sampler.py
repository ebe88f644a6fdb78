"""`HostSampler`: what this machine and the training processes did over time, read from /proc, /sys and psutil."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from zftune.telemetry.ticker import Log, Reading, Ticker, known, mean, rows

RESOURCES = ("cpu", "memory", "io")
_LEAST_SHARE = 0.01  # of the pages: a node with fewer holds the odd library page


@dataclass(frozen=True, slots=True)
class Throttling:
    """Counters of a control group's CPU quota."""

    periods: int
    """Periods in which the group wanted to run."""
    throttled: int
    """Those in which it had to stop because its quota was spent."""


def cpu_quota(root: Path = Path("/")) -> float | None:
    """Cores that the control groups of this process allow; None if they set no limit."""
    limits = [quota for folder in cpu_folders(root) if (quota := _quota_of(folder)) is not None]
    return min(limits, default=None)


def cpu_folders(root: Path = Path("/")) -> list[Path]:
    """Folders of this process's CPU control groups, each before those that enclose it: the least quota applies."""
    folders: dict[Path, None] = {}
    for line in read(root / "proc/self/cgroup").splitlines():
        _, _, rest = line.partition(":")
        controllers, _, group = rest.partition(":")
        if controllers and "cpu" not in controllers.split(","):
            continue
        for mount in ("", "unified") if not controllers else (controllers, "cpu"):
            base = root / "sys/fs/cgroup" / mount
            # In a container the group's path may belong to the host: then only the mount point itself exists.
            inside = base / group.lstrip("/")
            folders |= dict.fromkeys(folder for folder in (inside, *inside.parents) if folder.is_relative_to(base))
    return list(folders)


def throttling(folders: list[Path]) -> dict[Path, Throttling]:
    """The counters of every group that has a quota and tells."""
    found = {}
    for folder in folders:
        counts = dict(re.findall(r"^(\w+) (\d+)$", read(folder / "cpu.stat"), re.MULTILINE))
        if "nr_periods" in counts and "nr_throttled" in counts:
            found[folder] = Throttling(int(counts["nr_periods"]), int(counts["nr_throttled"]))
    return found


def pressure_file(resource: str, folders: list[Path], root: Path = Path("/")) -> Path | None:
    """The file of a resource's pressure stall information: of the innermost control group that has one, else of the
    machine; None where the kernel keeps none.
    """
    candidates = [folder / f"{resource}.pressure" for folder in folders] + [root / "proc/pressure" / resource]
    return next((path for path in candidates if pressure_us(path) is not None), None)


def pressure_us(path: Path) -> int | None:
    """Microseconds, since boot, in which some task waited for the resource."""
    found = re.search(r"^some .*\btotal=(\d+)", read(path), re.MULTILINE)
    return int(found[1]) if found else None


def numa_node_count(root: Path = Path("/")) -> int | None:
    """NUMA nodes of the machine; None where the kernel does not tell."""
    return len(list((root / "sys/devices/system/node").glob("node[0-9]*"))) or None


def numa_pages(pid: int, root: Path = Path("/")) -> dict[int, int]:
    """Pages of a process's own memory, files left out, by NUMA node; empty where the kernel does not tell.

    The kernel walks through all of the process's pages for it: not to be asked often.
    """
    pages: dict[int, int] = {}
    for line in read(root / "proc" / str(pid) / "numa_maps").splitlines():
        if " file=" not in line:
            for node, count in re.findall(r" N(\d+)=(\d+)", line):
                pages[int(node)] = pages.get(int(node), 0) + int(count)
    return pages


def nodes_used(pages: dict[int, int]) -> int:
    """Nodes that hold at least a hundredth of the pages."""
    return sum(count >= _LEAST_SHARE * sum(pages.values()) for count in pages.values())


def read(path: Path) -> str:
    """A file's text, "" where it cannot be read."""
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def _quota_of(folder: Path) -> float | None:
    fields = read(folder / "cpu.max").split()
    if len(fields) != 2:
        fields = [read(folder / name).strip() for name in ("cpu.cfs_quota_us", "cpu.cfs_period_us")]
    try:
        quota, period = int(fields[0]), int(fields[1])
    except ValueError:  # "max", or no such file
        return None
    return quota / period if quota > 0 and period > 0 else None


_GONE = (psutil.NoSuchProcess, psutil.AccessDenied, ProcessLookupError)
_NUMA_AFTER_NS = 2_000_000_000  # by then a process holds most of its memory


class Watched:
    """Follows the changing set of processes that `pids` returns at every `update`; those that are gone drop out.

    Args:
        root: stands for "/" where NUMA maps are read.
    """

    def __init__(self, pids: Callable[[], Sequence[int]], root: Path) -> None:
        self._pids = pids
        self._root = root
        self._processes: dict[int, psutil.Process] = {}
        self._first_seen_ns: dict[int, int] = {}
        self._cpu_s: dict[int, float] = {}
        self._pages: dict[int, dict[int, int]] = {}

    def update(self, now_ns: int) -> None:
        """Ask anew which processes to watch."""
        for pid in self._pids():
            if pid not in self._processes:
                with suppress(*_GONE):
                    self._processes[pid] = psutil.Process(pid)
                    self._first_seen_ns[pid] = now_ns

    def read(self) -> dict[str, float]:
        """CPU seconds since the last call ("cpu_s"), "rss_bytes" and "threads"; nothing where no process lives."""
        total: dict[str, float] = {}
        for pid, process in list(self._processes.items()):
            try:
                figures = self._of(pid, process)
            except _GONE:
                del self._processes[pid]
                continue
            total = {name: total.get(name, 0.0) + value for name, value in figures.items()}
        return total

    def _of(self, pid: int, process: psutil.Process) -> dict[str, float]:
        with process.oneshot():
            times = process.cpu_times()
            figures = {"rss_bytes": float(process.memory_info().rss), "threads": float(process.num_threads())}
        used_s = times.user + times.system
        # A process that is new brings its past with it.
        figures["cpu_s"] = used_s - self._cpu_s.get(pid, used_s)
        self._cpu_s[pid] = used_s
        return figures

    def affinity_cores(self) -> int | None:
        """Logical CPUs that at least one thread may run on; None where no process lives."""
        cores: set[int] = set()
        for process in self._processes.values():
            with suppress(*_GONE):
                for thread in process.threads():
                    with suppress(ProcessLookupError):
                        cores |= os.sched_getaffinity(thread.id)
        return len(cores) or None

    def pages(self, now_ns: int, *, last: bool) -> dict[int, int]:
        """Pages by NUMA node, read once of each process: when it is 2 s old, or at the last opportunity."""
        for pid, since_ns in self._first_seen_ns.items():
            if pid not in self._pages and (last or now_ns - since_ns >= _NUMA_AFTER_NS):
                self._pages[pid] = numa_pages(pid, self._root)
        total: dict[int, int] = {}
        for pages in self._pages.values():
            for node, count in pages.items():
                total[node] = total.get(node, 0) + count
        return total


def is_ours(pid: int) -> bool | None:
    """Whether a process is this one or a descendant of it; None where there is no such process here.

    A container's process may be known to the driver by its number outside.
    """
    try:
        process = psutil.Process(pid)
        return pid == os.getpid() or any(parent.pid == os.getpid() for parent in process.parents())
    except psutil.NoSuchProcess:
        return None
    except psutil.AccessDenied:
        return False  # of another user


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
NO_READING = "no reading falls into the measured time"
_REASONS = {
    "cpu_percent": _NO_PROCESS,
    "rss_bytes": _NO_PROCESS,
    "threads": _NO_PROCESS,
    "affinity_cores": _NO_PROCESS,
    "quota_cores": "no control group limits the CPU time",
    "throttled_fraction": "no control group reports throttling",
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
        """The figures over a window on the sampler's clock: the "system" of a profile document.

        Returns:
            The figures or None, and the reason of every null by name relative to "system" ("" for all). "cpu_percent"
            is that of the watched processes, 100 a core; "machine_cpu_percent" is a share of all cores;
            "throttled_fraction" is the share of the quota's periods in which the group had to stop; "threads",
            "affinity_cores" and "numa_nodes_used" are the most that was seen. "psi_*_percent" is the share of time in
            which some task of the control group (else of the machine) waited for the resource.
        """
        readings = self._log.between(begin_ns, end_ns)
        if not readings:
            return None, {"": self._ticker.failure or NO_READING}
        figures: dict[str, Any] = {field: mean(readings, field, begin_ns, end_ns) for field in _MEANS}
        throttled = mean(readings, "throttled_percent", begin_ns, end_ns)
        figures["throttled_fraction"] = None if throttled is None else throttled / 100
        figures["quota_cores"] = cpu_quota(self._root)
        for field in ("threads", "affinity_cores", "numa_nodes_used"):
            # Asked more rarely than a short window is long.
            seen = known(readings, field) or known(self._log.all(), field)
            figures[field] = int(max(seen)) if seen else None
        figures["samples"] = len(readings)
        missing = {name: _REASONS.get(name, NO_READING) for name, value in figures.items() if value is None}
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
