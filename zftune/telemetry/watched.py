"""The processes that are watched: CPU time, memory, threads, cores and NUMA nodes of all of them together."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil

from zftune.telemetry.host_files import numa_pages

_NUMA_AFTER_NS = 2_000_000_000  # by then a process holds most of its memory


class Watched:
    """Follows a changing set of processes; those that are gone drop out.

    Args:
        pids: called at every `update`.
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
                with _gone_is_fine():
                    self._processes[pid] = psutil.Process(pid)
                    self._first_seen_ns[pid] = now_ns

    def read(self) -> dict[str, float]:
        """CPU seconds since the last call ("cpu_s"), "rss_bytes" and "threads"; nothing where no process lives."""
        total: dict[str, float] = {}
        for pid, process in list(self._processes.items()):
            try:
                figures = self._of(pid, process)
            except (psutil.NoSuchProcess, psutil.AccessDenied):
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
            with _gone_is_fine():
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


@contextmanager
def _gone_is_fine() -> Iterator[None]:
    with suppress(psutil.NoSuchProcess, psutil.AccessDenied, ProcessLookupError):
        yield
