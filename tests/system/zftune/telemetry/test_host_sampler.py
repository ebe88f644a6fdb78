"""`HostSampler` watches real processes; what a test machine does not have comes from files that it writes."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from zftune.telemetry import HostSampler
from zftune.telemetry.host_sampler import SERIES_FIELDS, Watched

BURN = """
import sys, threading, time
end = time.monotonic() + 60
def spin():
    while time.monotonic() < end: pass
extra = [threading.Thread(target=time.sleep, args=(60,), daemon=True) for _ in range(3)]
for thread in extra: thread.start()
held = bytearray(64 << 20)
held[:: 4096] = b"x" * len(held[:: 4096])
print("ready", flush=True)
spin()
"""

RATE_HZ = 20
SOON_S = 30.0
NO_PSI = "the kernel keeps no pressure stall information"


@contextmanager
def burning() -> Iterator[subprocess.Popen[str]]:
    """A process that uses one core, holds 64 MiB and has four threads."""
    process = subprocess.Popen([sys.executable, "-c", BURN], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    process.stdout.readline()
    try:
        yield process
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


def watch(sampler: HostSampler, seconds: float) -> tuple[int, int]:
    begin = time.monotonic_ns()
    sampler.start()
    time.sleep(seconds)
    end = time.monotonic_ns()
    sampler.stop()
    return begin, end


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def cpu_s(process: subprocess.Popen[str]) -> float:
    return sum(psutil.Process(process.pid).cpu_times()[:2])


def wait_for_samples(sampler: HostSampler, count: int) -> None:
    ends = time.monotonic() + SOON_S
    while len(sampler.series(0, time.monotonic_ns())) < count:
        assert time.monotonic() < ends
        time.sleep(0.01)


@pytest.mark.smoke
def test_a_process_that_works() -> None:
    with burning() as process:
        sampler = HostSampler(lambda: [process.pid], rate_hz=RATE_HZ)
        began_s, before_s = time.monotonic(), cpu_s(process)
        sampler.start()
        wait_for_samples(sampler, 1)
        from_s = cpu_s(process)
        wait_for_samples(sampler, 2 * RATE_HZ)
        until_s = cpu_s(process)
        sampler.stop()
        after_s, took_s = cpu_s(process), time.monotonic() - began_s
        rows = sampler.series(0, time.monotonic_ns())
        # Times since 0: those of the first and of the last reading, between which the process worked for `worked_s`.
        at_ns = [round((row["at_ms"] or 0) * 1e6) for row in rows]
        worked_s = sum(
            (row["cpu_percent"] or 0) / 100 * (at - before) / 1e9
            for row, (before, at) in zip(rows[1:], itertools.pairwise(at_ns), strict=True)
        )
        figures, missing = sampler.summary(at_ns[0], at_ns[-1])
        assert figures is not None
        # By the process's own account, whose readings lie within and around those of the sampler.
        assert until_s - from_s - 1e-3 <= worked_s <= after_s - before_s + 1e-3
        assert figures["cpu_percent"] == pytest.approx(100 * worked_s / ((at_ns[-1] - at_ns[0]) / 1e9), rel=1e-3)
        assert figures["rss_bytes"] > 64 << 20
        assert figures["threads"] == 4
        assert figures["affinity_cores"] == len(os.sched_getaffinity(process.pid))
        assert 0 < figures["machine_cpu_percent"] <= 100
        assert 2 * RATE_HZ - 1 <= figures["samples"] <= took_s * RATE_HZ + 2  # none is made up for one that was late
    assert {name for name, value in figures.items() if value is None} == set(missing)
    assert all(set(row) == {"at_ms", *SERIES_FIELDS} for row in rows)
    assert at_ns == sorted(at_ns)
    json.dumps([figures, rows], allow_nan=False)


def test_the_cores_of_all_threads_count() -> None:
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2:
        pytest.skip("needs two cores")
    with burning() as process:
        threads = [thread.id for thread in psutil.Process(process.pid).threads()]
        for thread in threads:
            os.sched_setaffinity(thread, {cores[0]})
        os.sched_setaffinity(threads[-1], {cores[1]})
        sampler = HostSampler(lambda: [process.pid])
        figures, _ = sampler.summary(*watch(sampler, 0.3))
    assert figures is not None
    assert figures["affinity_cores"] == 2


def test_processes_come_and_go() -> None:
    """One that ends is no failure, and what it holds no longer counts."""
    alive: list[int] = []
    sampler = HostSampler(lambda: alive, rate_hz=RATE_HZ)

    def rows() -> list[dict[str, float | None]]:
        return sampler.series(0, time.monotonic_ns())

    with burning() as first:
        alive.append(first.pid)
        sampler.start()
        wait_for_samples(sampler, 3)
    alive.append(4194305)  # no such process
    ended = len(rows()) + 1  # what is being read may have seen it
    wait_for_samples(sampler, ended + 2)
    nobody = rows()[ended:]
    with burning() as second:
        alive.append(second.pid)
        came = len(rows()) + 1
        wait_for_samples(sampler, came + 2)
        sampler.stop()
    assert all(row["rss_bytes"] is None and row["cpu_percent"] is None for row in nobody)
    for held in (*rows()[1:3], *rows()[came:]):
        assert (held["rss_bytes"] or 0) > 64 << 20
    figures, _ = sampler.summary(0, time.monotonic_ns())
    assert figures is not None
    known = [row["rss_bytes"] for row in rows() if row["rss_bytes"] is not None]
    assert min(known) < figures["rss_bytes"] <= max(known)  # the mean of those that lived


@pytest.mark.smoke
def test_a_process_that_comes_brings_no_cpu_time_with_it() -> None:
    watched = Watched(lambda: [os.getpid()], Path("/"))
    watched.update(0)
    assert sum(os.times()[:2]) > 0.1
    assert watched.read()["cpu_s"] == 0
    until_s = time.process_time() + 0.1
    while time.process_time() < until_s:
        pass
    assert watched.read()["cpu_s"] >= 0.08


@pytest.mark.smoke
def test_nobody_to_watch_is_null_with_its_reason() -> None:
    sampler = HostSampler(list)
    figures, missing = sampler.summary(*watch(sampler, 0.3))
    assert figures is not None
    for name in ("cpu_percent", "rss_bytes", "threads", "affinity_cores"):
        assert figures[name] is None
        assert missing[name] == "no process was watched in the measured time"
    assert figures["memory_used_bytes"] > 0


@pytest.mark.smoke
def test_a_machine_without_control_groups_pressure_and_nodes(tmp_path: Path) -> None:
    sampler = HostSampler(lambda: [os.getpid()], root=tmp_path)
    figures, missing = sampler.summary(*watch(sampler, 0.3))
    assert figures is not None
    expected = {f"psi_{resource}_percent": NO_PSI for resource in ("cpu", "memory", "io")} | {
        "quota_cores": "no control group limits the CPU time",
        "throttled_fraction": "no control group reports throttling",
        "numa_nodes_used": "the kernel does not tell where the pages are",
    }
    assert missing == expected
    assert {name for name, value in figures.items() if value is None} == set(expected)


class Group:
    """A control group of version 2 whose counters advance as a test says."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.folder = root / "sys/fs/cgroup/job"
        write(root / "proc/self/cgroup", "0::/job\n")
        write(self.folder / "cpu.max", "150000 100000\n")
        self.set(periods=100, throttled=50, pressure_us=10_000_000)

    def set(self, *, periods: int, throttled: int, pressure_us: int) -> None:
        write(self.folder / "cpu.stat", f"nr_periods {periods}\nnr_throttled {throttled}\nthrottled_usec 5\n")
        text = f"some avg10=0 avg60=0 avg300=0 total={pressure_us}\nfull avg10=0 avg60=0 avg300=0 total=0\n"
        write(self.folder / "cpu.pressure", text)


@pytest.mark.smoke
def test_quota_throttling_and_pressure_are_those_of_the_window(tmp_path: Path) -> None:
    group = Group(tmp_path)
    now_ns = 0
    ticks: list[Callable[[], None]] = [
        lambda: None,
        lambda: group.set(periods=110, throttled=54, pressure_us=10_250_000),
        lambda: group.set(periods=120, throttled=54, pressure_us=11_000_000),
    ]

    def clock_ns() -> int:
        """A second a tick; the group's counters advance with it."""
        nonlocal now_ns
        tick, now_ns = now_ns // 10**9, now_ns + 10**9
        if tick < len(ticks):
            ticks[tick]()
        return tick * 10**9

    sampler = HostSampler(lambda: [os.getpid()], rate_hz=20, clock_ns=clock_ns, root=tmp_path)
    sampler.start()
    while now_ns < 3 * 10**9:
        time.sleep(0.01)
    sampler.stop()
    figures, missing = sampler.summary(0, 2 * 10**9)
    assert figures is not None
    assert figures["quota_cores"] == 1.5
    assert figures["throttled_fraction"] == pytest.approx((4 / 10 + 0 / 10) / 2)
    assert figures["psi_cpu_percent"] == pytest.approx((25 + 75) / 2)
    assert "quota_cores" not in missing
    first, _ = sampler.summary(0, 10**9)
    assert first is not None
    assert first["throttled_fraction"] == pytest.approx(0.4)


def test_numa_nodes_of_the_pages(tmp_path: Path) -> None:
    for node in (0, 1):
        (tmp_path / f"sys/devices/system/node/node{node}").mkdir(parents=True)
    write(tmp_path / f"proc/{os.getpid()}/numa_maps", "7f00 default anon=9 N0=5 N1=4 kernelpagesize_kB=4\n")
    sampler = HostSampler(lambda: [os.getpid()], root=tmp_path)
    figures, _ = sampler.summary(*watch(sampler, 0.3))
    assert figures is not None
    assert figures["numa_nodes_used"] == 2


@pytest.mark.smoke
def test_who_to_watch_may_fail() -> None:
    def fail() -> list[int]:
        raise RuntimeError("no list")

    sampler = HostSampler(fail)
    assert sampler.summary(*watch(sampler, 0.2)) == (None, {"": "the sampler failed: RuntimeError: no list"})
