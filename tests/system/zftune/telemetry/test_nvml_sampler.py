"""`NvmlSampler` against scripted drivers."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.support.nvml.scripted import (
    AMPERE,
    DIVIDED,
    GPU,
    HOPPER,
    LOST,
    NO_PERMISSION,
    SECOND_GPU,
    SECOND_MIG,
    Clock,
    Machine,
    load_into_binding,
)
from zftune.telemetry import NvmlSampler, nvml_device, ticker
from zftune.telemetry.nvml_sampler import SERIES_FIELDS

pytestmark = pytest.mark.smoke

# Figures (or None), missing, series.
Result = tuple[Any, Any, Any]


def sample(
    machine: Machine,
    library: Path,
    *,
    devices: Sequence[str] | None = None,
    rate_hz: float = 10.0,
    run_s: float = 1.5,
    uuids: Sequence[str] | None = None,
) -> Result:
    """What there is of the whole time. A clock that is the driver's, too, goes on by a period for each tick."""
    clock, through = Clock(machine.script.with_name("clock.txt")), threading.Event()
    with machine.script.open("a") as script:
        script.write(f"clock {clock.file}\n")

    def ticks(running: ticker.Ticker) -> Iterator[None]:
        for tick in range(round(run_s * rate_hz)):
            clock.set(tick / rate_hz)
            yield
        through.set()
        running._stopping.wait()
        clock.set(run_s)
        yield

    def sleep(seconds: float) -> None:
        clock.set(clock.now_ns() / 1e9 + seconds)

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NVML_SCRIPT", str(machine.script))
        load_into_binding(library, patch)
        patch.setattr(ticker.Ticker, "_ticks", ticks)
        patch.setattr(ticker, "_JOIN_S", 60.0)
        patch.setattr(nvml_device, "time", SimpleNamespace(sleep=sleep, time_ns=time.time_ns))
        sampler = NvmlSampler(devices, rate_hz, clock_ns=clock.now_ns)
        sampler.start()
        while sampler._ticker._thread.is_alive() and not through.wait(0.01):
            pass
        sampler.stop()
    end_ns = round(run_s * 1e9)
    figures, missing = sampler.summary(0, end_ns, uuids)
    return figures, missing, sampler.series(0, end_ns, uuids)


def steady(**values: float) -> list[dict[str, float]]:
    return [{"t": 0, **values}]


def test_hopper(machine: Machine, nvml_library: Path) -> None:
    truth = {"util": 70, "sm": 55, "occupancy": 21, "dram": 33, "rx_gbps": 11, "tx_gbps": 22, "power_w": 444}
    machine.write(HOPPER, timeline=steady(**truth))
    figures, missing, series = sample(machine, nvml_library)
    assert missing == {}
    assert None not in figures.values()
    assert figures["utilisation_percent"] == pytest.approx(70)
    assert figures["sm_utilisation_percent"] == pytest.approx(55)
    assert figures["pcie_rx_gbps"] == pytest.approx(11, rel=1e-3)
    assert figures["pcie_tx_gbps"] == pytest.approx(22, rel=1e-3)
    # The first reading of the link takes 20 ms, for which that of the energy is late.
    assert figures["power_w"] == pytest.approx(444, rel=0.02)
    assert figures["energy_j"] == pytest.approx(444 * 1.5, rel=0.02)
    assert [row["at_ms"] for row in series] == pytest.approx([100 * tick for tick in range(1, 16)])
    assert set(series[0]) == {"at_ms", "device", *SERIES_FIELDS}
    # GPM has something to say at every second tick of 10 a second.
    seen = [row["sm_utilisation_percent"] for row in series if row["sm_utilisation_percent"] is not None]
    assert seen == pytest.approx([55] * 7)


def test_what_changes_shows_where_it_changed(machine: Machine, nvml_library: Path) -> None:
    step = [{"t": 0, "util": 0, "power_w": 100}, {"t": 600, "util": 60, "power_w": 700}]
    machine.write(HOPPER, timeline=step)
    _, _, series = sample(machine, nvml_library)
    # The script's time of each row, in seconds, by its power.
    assert [row["power_w"] - 100 for row in series] == pytest.approx([row["at_ms"] / 1000 for row in series], abs=2e-3)


def test_a_short_counter_that_wraps_several_times_between_ticks(machine: Machine, nvml_library: Path) -> None:
    # At 28 GB/s after 153 ms; the ticks are 200 ms apart.
    machine.write((*AMPERE, "counter 32 4294960000"), timeline=steady(rx_gbps=28, tx_gbps=14))
    figures, missing, _ = sample(machine, nvml_library, rate_hz=5.0)
    assert figures["pcie_rx_gbps"] == pytest.approx(28, rel=1e-3)
    assert figures["pcie_tx_gbps"] == pytest.approx(14, rel=1e-3)
    assert "pcie_rx_gbps" not in missing


def test_mig(machine: Machine, nvml_library: Path) -> None:
    machine.write(DIVIDED, timeline=steady(sm=44))
    figures, missing, series = sample(machine, nvml_library, devices=[SECOND_MIG])
    assert (figures["mig"], figures["devices"]) == (True, 1)
    assert figures["sm_utilisation_percent"] == pytest.approx(44)
    assert figures["utilisation_percent"] is None
    assert missing["utilisation_percent"] == "NVML: Not Supported"
    assert {row["device"] for row in series} == {0}
    assert all(device in (-1, 0, 1, 2) for _, _, _, device in machine.calls())


def test_devices_are_chosen_by_uuid(machine: Machine, nvml_library: Path) -> None:
    machine.write((*HOPPER, f"gpu NVIDIA_H200 {SECOND_GPU}", "capability 9 0", "memory_gib 71"))
    figures, _, _ = sample(machine, nvml_library, devices=[SECOND_GPU], run_s=0.5)
    assert (figures["devices"], figures["memory_total_bytes"]) == (1, 71 << 30)


def test_only_the_gpus_that_a_run_uses_count(machine: Machine, nvml_library: Path) -> None:
    machine.write((*HOPPER, f"gpu NVIDIA_H200 {SECOND_GPU}", "capability 9 0", "memory_gib 71"))
    used = [SECOND_GPU.removeprefix("GPU-").upper()]
    figures, missing, series = sample(machine, nvml_library, uuids=used, run_s=0.5)
    assert (figures["devices"], figures["memory_total_bytes"]) == (1, 71 << 30)
    assert "devices" not in missing
    assert {row["device"] for row in series} == {0}
    figures, _, series = sample(machine, nvml_library, uuids=[*used, GPU], run_s=0.5)
    assert (figures["devices"], {row["device"] for row in series}) == (2, {0, 1})


def test_a_run_on_a_gpu_that_nvml_does_not_know(machine: Machine, nvml_library: Path) -> None:
    machine.write((*HOPPER, f"gpu NVIDIA_H200 {SECOND_GPU}", "capability 9 0"))
    figures, missing, series = sample(machine, nvml_library, uuids=["GPU-nonesuch"], run_s=0.5)
    assert figures["devices"] == 2
    assert "figures are of all that it could see" in missing["devices"]
    assert {row["device"] for row in series} == {0, 1}


def test_the_parts_of_a_gpu_count_by_its_uuid(machine: Machine, nvml_library: Path) -> None:
    machine.write(DIVIDED)
    assert sample(machine, nvml_library, uuids=[SECOND_MIG], run_s=0.5)[0]["devices"] == 1
    assert sample(machine, nvml_library, uuids=[GPU], run_s=0.5)[0]["devices"] == 2


def test_permission_denied(machine: Machine, nvml_library: Path) -> None:
    machine.write(HOPPER, errors=[("*", NO_PERMISSION, 0, -1)])
    figures, missing, series = sample(machine, nvml_library, run_s=0.5)
    assert (figures, missing, series) == (None, {"": "GPU 0 is left out: NVML: Insufficient Permissions"}, [])


def test_permission_denied_for_all_but_the_handle(machine: Machine, nvml_library: Path) -> None:
    machine.write(HOPPER, errors=[("*", NO_PERMISSION, 0, -1), ("handle", 0, 0, -1)][::-1])
    assert sample(machine, nvml_library, run_s=0.5) == (None, {"": "NVML: Insufficient Permissions"}, [])


def test_a_gpu_is_lost_while_it_is_watched(machine: Machine, nvml_library: Path) -> None:
    lines = (*HOPPER, f"gpu NVIDIA_H200 {SECOND_GPU}", "capability 9 0")
    machine.write(lines, errors=[("*", LOST, 1.0, 0)])
    figures, missing, series = sample(machine, nvml_library, run_s=2.5)
    assert figures["devices"] == 2
    assert missing["devices.0"] == "no reading later than 1.0 s into the run: NVML: GPU is lost"
    last = {device: max(row["at_ms"] for row in series if row["device"] == device) for device in (0, 1)}
    assert (last[0], last[1]) == (pytest.approx(900), pytest.approx(2500))
    assert figures["utilisation_percent"] is not None


def test_the_only_gpu_is_lost_before_the_window(machine: Machine, nvml_library: Path) -> None:
    machine.write(HOPPER, errors=[("nvmlDeviceGetUtilizationRates", LOST, 0, -1)])
    assert sample(machine, nvml_library, run_s=0.3) == (None, {"": "NVML: GPU is lost"}, [])


@pytest.mark.parametrize(
    ("lines", "reason"),
    [((), "no GPU is visible"), (HOPPER, "no GPU or MIG device matches '7'; what follows it is left out, as in CUDA")],
)
def test_no_device(machine: Machine, nvml_library: Path, lines: Sequence[str], reason: str) -> None:
    machine.write(lines)
    devices = ["7"] if lines else None
    assert sample(machine, nvml_library, devices=devices, run_s=0.2) == (None, {"": reason}, [])


def test_no_library(machine: Machine) -> None:
    code = """
import json
from zftune.telemetry import NvmlSampler
sampler = NvmlSampler()
sampler.start()
sampler.stop()
print(json.dumps([*sampler.summary(0, 10**9), sampler.series(0, 10**9)]))
"""
    figures, missing, series = machine.run(None, code)
    if figures is not None:
        pytest.skip("this machine has a driver of its own")
    assert missing == {"": "no NVIDIA driver answers (NVML Shared Library Not Found)"}
    assert series == []


def test_an_old_driver(machine: Machine, old_nvml_library: Path) -> None:
    machine.write(AMPERE, timeline=steady(memory=3e9, reasons=4, rx_gbps=3, tx_gbps=3))
    figures, missing, series = sample(machine, old_nvml_library)
    assert all(row["sm_utilisation_percent"] is None for row in series)
    assert missing == dict.fromkeys(
        ("sm_utilisation_percent", "sm_occupancy_percent", "dram_percent"),
        "NVML: the installed driver has no nvmlGpmQueryDeviceSupport",
    )
    assert figures["throttle_reasons"] == ["sw_power_cap"]
    assert figures["temperature_c"] == 60
    assert figures["memory_used_bytes"] == pytest.approx(3e9 + (1 << 29))  # the older call counts what the driver keeps


def test_one_thread_one_session_and_no_call_too_often(machine: Machine, nvml_library: Path) -> None:
    machine.write((*HOPPER, "process 1"))
    sample(machine, nvml_library, rate_hz=20.0, run_s=2.2)
    calls = machine.calls()
    assert len({thread for _, thread, _, _ in calls}) == 1
    names = [name for _, _, name, _ in calls]
    assert names.count("nvmlShutdown") == 1
    assert names[-1] == "nvmlShutdown"
    for rare in ("nvmlDeviceGetTotalEnergyConsumption", "nvmlDeviceGetCurrPcieLinkWidth"):
        assert names.count(rare) == 4  # at 0, 1 and 2 s, and at the end
    assert names.count("nvmlGpmSampleGet") == 15  # 2.2 s, and the driver wants more than 100 ms between two
    assert names.count("nvmlGpmSampleAlloc") == names.count("nvmlGpmSampleFree") == 2


def test_two_samplers_of_one_process(machine: Machine, nvml_library: Path) -> None:
    machine.write(HOPPER)
    code = """
import json, sys, time
from zftune.telemetry import NvmlSampler
from zftune.telemetry.nvml import gpus
first, second = NvmlSampler(rate_hz=10), NvmlSampler(rate_hz=10)
begin = time.monotonic_ns()
first.start(); second.start()
time.sleep(0.4); known = gpus({}); first.stop()
middle = time.monotonic_ns()
time.sleep(0.4); second.stop()
end = time.monotonic_ns()
window = middle + 10**8, end
assert "torch" not in sys.modules  # the parent of a training should not carry it
print(json.dumps([len(known), first.summary(*window)[0], second.summary(*window)[0]["samples"]]))
"""
    known, first, second = machine.run(nvml_library, code)
    assert (known, first) == (1, None)
    assert second >= 2


def test_a_driver_that_hangs_does_not_hold_up_the_end(
    machine: Machine, here: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ticker, "_JOIN_S", 0.2)
    here(HOPPER, errors=[("nvmlDeviceGetPowerUsage", 1000, 0.4, -1)])  # answers after 2 s
    sampler = NvmlSampler(rate_hz=10.0)
    begin_ns = machine.epoch_ns
    sampler.start()
    time.sleep(0.7)
    sampler.stop()
    assert "zftune-nvml" in [thread.name for thread in threading.enumerate()]  # it hangs, and was not waited for
    figures, missing = sampler.summary(begin_ns, time.monotonic_ns())
    assert figures is not None
    assert figures["power_w"] is not None
    assert missing["samples"] == "the sampler has not answered for 0.2 s"
    for thread in threading.enumerate():
        if thread.name == "zftune-nvml":
            thread.join()


def test_a_sampler_that_was_not_started(machine: Machine) -> None:
    sampler = NvmlSampler([GPU])
    sampler.stop()
    assert sampler.summary(0, 10**9) == (None, {"": "NVML was not sampled"})
    assert sampler.series(0, 10**9) == []


@pytest.mark.parametrize("rate_hz", [0.0, -1.0, 21.0, float("nan")])
def test_a_rate_that_is_not_allowed(rate_hz: float) -> None:
    with pytest.raises(ValueError, match="it must be a number above 0 and at most 20"):
        NvmlSampler(rate_hz=rate_hz)
