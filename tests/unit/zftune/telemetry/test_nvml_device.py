"""What one device's figures are, on a clock that the test sets: exact."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest

from tests.support.nvml.scripted import AMPERE, DIVIDED, HOPPER, LOST, MIG, NO_PERMISSION, NOT_SUPPORTED, Clock, Machine
from zftune.telemetry.host_sampler import is_ours
from zftune.telemetry.nvml import nvml_session
from zftune.telemetry.nvml_device import DeviceReader, find_targets
from zftune.telemetry.nvml_sampler import summarise

Write = Callable[..., None]
SECOND = 1_000_000_000


@pytest.fixture
def sampled(here: Write, clock: Clock) -> Callable[..., tuple[dict[str, Any], dict[str, str], list[DeviceReader]]]:
    def sample(
        lines: Sequence[str],
        *,
        devices: Sequence[str] | None = None,
        until_s: float = 4.0,
        rate_hz: float = 5.0,
        window: tuple[float, float] | None = None,
        **parts: Any,
    ) -> tuple[dict[str, Any], dict[str, str], list[DeviceReader]]:
        """Read until `until_s`; the summary of the window, which by default is all of it."""
        here(lines, clock=clock.file, **parts)
        with readers(clock, devices, rate_hz) as found:
            ticks = round(until_s * rate_hz)
            for tick in range(ticks + 1):
                clock.set(tick / rate_hz)
                for reader in found:
                    reader.read(last=tick == ticks)
        begin_s, end_s = window or (0.0, until_s)
        return *summarise(found, round(begin_s * SECOND), round(end_s * SECOND)), found

    return sample


@contextmanager
def readers(clock: Clock, devices: Sequence[str] | None, rate_hz: float) -> Iterator[list[DeviceReader]]:
    with nvml_session() as nvml:
        found = [
            DeviceReader(nvml, target, rate_hz, clock.now_ns, is_ours) for target in find_targets(nvml, devices)[0]
        ]
        yield found
        for reader in found:
            reader.close()


Sampled = Callable[..., tuple[dict[str, Any], dict[str, str], list[DeviceReader]]]


def row(at_s: float, **values: float) -> dict[str, float]:
    return {"t": at_s, **values}


STEADY: dict[str, float] = {
    "util": 80,
    "sm": 60,
    "occupancy": 25,
    "dram": 35,
    "rx_gbps": 12,
    "tx_gbps": 20,
    "power_w": 500,
    "memory": 40e9,
    "clock_mhz": 1700,
    "temperature": 66,
    "reasons": 0b1000101,
    "generation": 5,
    "width": 8,
}


def test_every_figure_of_a_hopper(sampled: Sampled) -> None:
    figures, missing, _ = sampled(HOPPER, timeline=[row(0, **STEADY)])
    assert missing == {}
    assert figures == {
        "devices": 1,
        "mig": False,
        "samples": 20,  # each of 0.2 s
        "utilisation_percent": pytest.approx(80),
        "sm_utilisation_percent": pytest.approx(60),
        "sm_occupancy_percent": pytest.approx(25),
        "dram_percent": pytest.approx(35),
        "pcie_rx_gbps": pytest.approx(12, rel=1e-3),
        "pcie_tx_gbps": pytest.approx(20, rel=1e-3),
        "sm_clock_mhz": pytest.approx(1700),
        "sm_clock_max_mhz": pytest.approx(1980),
        "power_w": pytest.approx(500, rel=1e-3),
        "energy_j": pytest.approx(2000, rel=1e-3),
        "memory_used_bytes": pytest.approx(40e9),
        "memory_total_bytes": pytest.approx(141 << 30),
        "pcie_gen": 5,
        "pcie_width": 8,
        "temperature_c": pytest.approx(66),
        "throttle_reasons": ["sw_power_cap", "hw_thermal_slowdown"],
        "other_processes": 0,
    }


def test_a_window_sees_its_own_part_of_the_run(sampled: Sampled) -> None:
    ramp = [row(0, rx_gbps=0, power_w=100, sm=0, clock_mhz=1000), row(4, rx_gbps=8, power_w=500, sm=80, clock_mhz=1000)]
    figures, _, _ = sampled(HOPPER, timeline=ramp, window=(2.0, 4.0))
    assert figures["pcie_rx_gbps"] == pytest.approx(6, rel=1e-2)
    assert figures["sm_utilisation_percent"] == pytest.approx(60, rel=1e-2)
    assert figures["energy_j"] == pytest.approx(2 * 400, rel=1e-2)
    assert figures["power_w"] == pytest.approx(400, rel=1e-2)


def test_no_gpm_before_hopper(sampled: Sampled, machine: Machine) -> None:
    figures, missing, _ = sampled(AMPERE, timeline=[row(0, **STEADY | {"rx_gbps": 3, "tx_gbps": 4})])
    nulls = {"sm_utilisation_percent", "sm_occupancy_percent", "dram_percent"}
    assert {name for name, value in figures.items() if value is None} == nulls
    assert missing == dict.fromkeys(nulls, "this GPU has no GPM, which came with Hopper")
    assert (figures["pcie_rx_gbps"], figures["pcie_tx_gbps"]) == (
        pytest.approx(3, rel=0.01),
        pytest.approx(4, rel=0.01),
    )
    assert [name for _, _, name, _ in machine.calls()].count("nvmlGpmQueryDeviceSupport") == 1


@pytest.mark.parametrize("call", ["nvmlGpmSampleGet", "nvmlGpmMetricsGet", "nvmlGpmSampleAlloc"])
def test_gpm_that_fails_when_it_is_tried_is_given_up(sampled: Sampled, machine: Machine, call: str) -> None:
    figures, missing, _ = sampled(HOPPER, errors=[(call, NO_PERMISSION, 0, -1)], timeline=[row(0, rx_gbps=2)])
    assert figures["sm_utilisation_percent"] is None
    assert figures["pcie_rx_gbps"] == pytest.approx(2, rel=1e-3)
    assert missing["sm_utilisation_percent"] == "NVML: Insufficient Permissions"
    assert [name for _, _, name, _ in machine.calls()].count(call) == 1
    assert figures["utilisation_percent"] is not None


def test_a_single_gpm_metric_may_fail(sampled: Sampled) -> None:
    figures, missing, _ = sampled(HOPPER, errors=[("metric:3", NOT_SUPPORTED, 0, -1)])
    assert figures["sm_occupancy_percent"] is None
    assert missing == {"sm_occupancy_percent": "NVML: Not Supported"}
    assert figures["sm_utilisation_percent"] == pytest.approx(40)


def test_gpm_samples_are_more_than_100_ms_apart(sampled: Sampled) -> None:
    # The scripted driver refuses the metrics of samples that are closer.
    figures, missing, _ = sampled(HOPPER, rate_hz=20.0, until_s=1.0)
    assert figures["sm_utilisation_percent"] == pytest.approx(40)
    assert missing == {}


def test_a_mig_device_has_its_own_figures_and_not_its_gpus(sampled: Sampled) -> None:
    figures, missing, _ = sampled(DIVIDED, devices=[MIG], timeline=[row(0, **STEADY)])
    assert figures["mig"] is True
    assert figures["sm_utilisation_percent"] == pytest.approx(60)
    assert (figures["memory_total_bytes"], figures["memory_used_bytes"]) == (16 << 30, 40e9)
    assert (figures["sm_clock_mhz"], figures["temperature_c"], figures["pcie_gen"]) == (1700, 66, 5)
    shared = {"utilisation_percent", "power_w", "energy_j", "pcie_rx_gbps", "pcie_tx_gbps"}
    assert {name for name, value in figures.items() if value is None} == shared
    assert {missing[name] for name in shared} == {"NVML: Not Supported"}


@pytest.mark.parametrize(
    ("bits", "start", "expected"),
    [(32, (1 << 32) - 1000, 3.0), (64, (1 << 64) - 1000, 3.0), (64, 1 << 40, 3.0), (32, 0, 3.0)],
)
def test_counters_wrap(sampled: Sampled, bits: int, start: int, expected: float) -> None:
    lines = (*AMPERE, "max_link 3 16", f"counter {bits} {start}")
    figures, _, _ = sampled(lines, timeline=[row(0, rx_gbps=3, tx_gbps=15)])
    assert figures["pcie_rx_gbps"] == pytest.approx(expected, rel=1e-3)
    assert figures["pcie_tx_gbps"] == pytest.approx(15, rel=1e-3)


def test_a_counter_that_was_reset_is_not_a_rate(sampled: Sampled) -> None:
    """As a wrap of 64 bits it would be 10^19 bytes."""
    lines = (*AMPERE, f"counter 64 {1 << 40}", "counter_reset 2.1")
    figures, _, found = sampled(lines, timeline=[row(0, rx_gbps=3, tx_gbps=4)])
    rates = [reading.values.get("pcie_rx_gbps") for reading in found[0].log.all()]
    assert rates[0] is None
    assert rates[11] is None  # of 2.0 to 2.2 s
    assert figures["pcie_rx_gbps"] == pytest.approx(3, rel=1e-3)
    assert figures["pcie_tx_gbps"] == pytest.approx(4, rel=1e-3)


@pytest.mark.parametrize("call", ["field:198", "nvmlDeviceGetFieldValues"])
def test_without_counters_the_throughput_call_once_a_second(sampled: Sampled, machine: Machine, call: str) -> None:
    figures, missing, _ = sampled(
        AMPERE, timeline=[row(0, rx_gbps=7, tx_gbps=9)], errors=[(call, NOT_SUPPORTED, 0, -1)]
    )
    assert (figures["pcie_rx_gbps"], figures["pcie_tx_gbps"]) == (pytest.approx(7), pytest.approx(9))
    assert "pcie_rx_gbps" not in missing
    names = [name for _, _, name, _ in machine.calls()]
    assert names.count("nvmlDeviceGetPcieThroughput") == 2 * 5  # rx and tx, at 0, 1, .. 4 s
    assert names.count("nvmlDeviceGetFieldValues") == 1


def test_without_any_source_of_pcie_rates_there_is_a_reason(sampled: Sampled) -> None:
    calls = ("nvmlDeviceGetFieldValues", "nvmlDeviceGetPcieThroughput")
    figures, missing, _ = sampled(AMPERE, errors=[(call, NO_PERMISSION, 0, -1) for call in calls])
    assert (figures["pcie_rx_gbps"], missing["pcie_rx_gbps"]) == (None, "NVML: Insufficient Permissions")


def test_a_lost_gpu_ends_alone(sampled: Sampled, machine: Machine) -> None:
    lines = (*HOPPER, "gpu NVIDIA_H200 GPU-second", "capability 9 0")
    figures, missing, found = sampled(lines, errors=[("*", LOST, 2.0, 0)])
    assert figures["devices"] == 2
    assert missing == {"devices.0": "no reading later than 2.0 s into the run: NVML: GPU is lost", **missing}
    assert [len(reader.log.all()) for reader in found] == [10, 21]
    assert sum(1 for _, _, _, device in machine.calls() if device == 0) < sum(
        1 for _, _, _, device in machine.calls() if device == 1
    )
    # Energy is that of all devices, so half of it is none.
    assert figures["energy_j"] is None
    assert figures["utilisation_percent"] == pytest.approx(50)


def test_a_failure_that_may_pass_does_not_silence_a_question(sampled: Sampled, machine: Machine) -> None:
    figures, missing, _ = sampled(HOPPER, errors=[("nvmlDeviceGetPowerUsage", 999, 2.0, -1)])
    assert figures["power_w"] is not None
    assert missing == {}
    assert [name for _, _, name, _ in machine.calls()].count("nvmlDeviceGetPowerUsage") == 21


def test_everything_forbidden_is_null_with_its_reason(sampled: Sampled) -> None:
    figures, missing, _ = sampled(HOPPER, errors=[("*", NO_PERMISSION, 1.0, -1)], window=(2.0, 4.0))
    nulls = {name for name, value in figures.items() if value is None}
    assert nulls == set(figures) - {"devices", "mig", "samples"}
    assert nulls == set(missing)
    assert set(missing.values()) == {"NVML: Insufficient Permissions"}


def test_two_devices_are_averaged_and_their_energy_added(sampled: Sampled) -> None:
    lines = (*HOPPER, "gpu NVIDIA_H200 GPU-second", "capability 9 0", "memory_gib 71")
    figures, _, _ = sampled(lines, timeline=[row(0, power_w=300)])
    assert figures["power_w"] == pytest.approx(300, rel=1e-3)
    assert figures["energy_j"] == pytest.approx(2 * 300 * 4, rel=1e-3)
    assert figures["memory_total_bytes"] == (141 + 71) / 2 * (1 << 30)


def test_the_link_under_load_is_the_best_that_was_seen(sampled: Sampled) -> None:
    idle = {"generation": 1, "width": 16}
    figures, _, _ = sampled(HOPPER, timeline=[row(0, **idle), row(1.5, generation=5, width=16), row(2.5, **idle)])
    assert (figures["pcie_gen"], figures["pcie_width"]) == (5, 16)


def test_an_idle_gpu_is_not_throttled(sampled: Sampled) -> None:
    figures, _, _ = sampled(HOPPER, timeline=[row(0, reasons=1)])
    assert figures["throttle_reasons"] == []


def test_processes_of_others(sampled: Sampled, machine: Machine) -> None:
    figures, _, _ = sampled((*HOPPER, f"process {os.getpid()}", "process 1"))
    assert figures["other_processes"] == 1
    names = [name for _, _, name, _ in machine.calls()]
    assert names.count("nvmlDeviceGetComputeRunningProcesses_v3") <= 2 * 5  # the binding asks twice


def test_processes_with_numbers_of_another_namespace(sampled: Sampled) -> None:
    figures, missing, _ = sampled((*HOPPER, "process 4194305"))  # above any number that Linux gives
    assert figures["other_processes"] is None
    assert missing == {"other_processes": "the driver counts processes by numbers that are not known here"}
