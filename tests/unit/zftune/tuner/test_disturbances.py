"""What voids a measurement, by a scripted driver's word."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.nvml.scripted import HOPPER, Clock, here, machine, nvml_library
from zenflow import CpuDevice
from zftune.emulation import EmulatedAccelerator, Rig
from zftune.telemetry import NvmlSampler
from zftune.telemetry.disturbance import GpuDisturbance
from zftune.tuner.executor import disturbance_of

__all__ = ["here", "machine", "nvml_library"]

_CAP, _HOT = 1 << 2, 1 << 6


class Hand(Clock):
    """A clock that is read while it is set."""

    def set(self, now_s: float) -> None:
        self._now_s = now_s
        new = self.file.with_suffix(".new")
        new.write_text(f"{now_s:.9f}")
        new.replace(self.file)


@pytest.fixture
def clock(tmp_path: Path) -> Clock:
    return Hand(tmp_path / "clock.txt")


class Watched:
    """A GPU that develops as a script says; others come and go."""

    def __init__(self, here: Callable[..., None], clock: Clock, timeline: list[dict[str, float]]) -> None:
        here((*HOPPER, "process 1"), timeline=timeline, clock=clock.file)
        self.clock = clock
        self.shared = False
        self.sampler = NvmlSampler(rate_hz=20, clock_ns=clock.now_ns, ours=lambda pid: not self.shared)
        self.disturbance = GpuDisturbance(self.sampler, None, clock_ns=clock.now_ns)
        self.sampler.start()

    def ask(self, second: float) -> str | None:
        """What is said of the time until `second`."""
        self.clock.set(second - 0.01)
        ends = time.monotonic() + 30
        begin_ns = round((second - 0.02) * 1e9)
        while not self.sampler.series(begin_ns, begin_ns + 10**9):
            assert time.monotonic() < ends
            time.sleep(0.01)
        self.clock.set(second)
        return self.disturbance()


def test_throttling_voids_and_a_power_cap_does_not(here: Callable[..., None], clock: Clock) -> None:
    quiet = {"reasons": _CAP}
    watched = Watched(here, clock, [{"t": 0, **quiet}, {"t": 9, **quiet}, {"t": 10, "reasons": _HOT}])
    assert watched.ask(2) is None
    assert watched.ask(12) == "the GPU was slowed down because it was hot"
    watched.disturbance.close()


def test_a_link_that_is_shifted_down_voids(here: Callable[..., None], clock: Clock) -> None:
    fast = {"generation": 5, "width": 16}
    slow = {"generation": 3, "width": 16}
    watched = Watched(here, clock, [{"t": 0, **fast}, {"t": 9, **fast}, {"t": 9.1, **slow}])
    assert watched.ask(2) is None
    assert watched.ask(4) is None
    assert watched.ask(12) is not None  # in part
    assert watched.ask(14) == "the PCIe link was shifted down to generation 3 from 5"
    watched.disturbance.close()


def test_a_co_tenant_that_comes_voids_and_one_that_was_there_does_not(here: Callable[..., None], clock: Clock) -> None:
    watched = Watched(here, clock, [{"t": 0, "util": 50}])
    assert watched.ask(2) is None
    watched.shared = True
    assert watched.ask(4) == "the GPU was shared with 1 more process"
    watched.shared = False
    watched.ask(6)
    assert watched.ask(8) is None
    watched.shared = True
    from_the_start = GpuDisturbance(watched.sampler, None, clock_ns=clock.now_ns)
    assert watched.ask(10) is not None
    assert from_the_start() is None
    watched.disturbance.close()


def test_without_a_driver_nothing_is_void() -> None:
    assert disturbance_of(CpuDevice()) is None
    sampler = NvmlSampler(["0"])
    assert GpuDisturbance(sampler, None)() is None


def test_a_machine_that_is_too_slow_for_the_emulated_accelerator(request: pytest.FixtureRequest) -> None:
    rig = Rig(
        name="mini", source="test", link_d2h_gbps=1, link_h2d_gbps=1, host_gbps=1, device_gbps=1, forward_ms=1,
        backward_ms=1, scale=1,
    )  # fmt: skip
    device = EmulatedAccelerator(rig)
    request.addfinalizer(device.close)
    watch = disturbance_of(device)
    assert watch is not None
    assert watch() is None
    device._compute_t += 1.0
    device.slack.add(0.1, 0.1, -0.1)
    reason = watch()
    assert reason == "this machine was late on the emulated accelerator by 10.0% of the time"
    device._compute_t += 1.0
    assert watch() is None
