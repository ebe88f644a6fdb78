"""`NvmlSampler`: what the GPUs of this node did over time, sampled by one thread, and its summary."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import suppress
from itertools import pairwise
from operator import methodcaller
from typing import Any

from zftune.telemetry.host_sampler import NO_READING, is_ours
from zftune.telemetry.nvml import NvmlError, load_binding, nvml_session
from zftune.telemetry.nvml_device import GPM_FIELDS, PCIE_FIELDS, DeviceReader, find_targets
from zftune.telemetry.ticker import Ticker, known, mean, rows

_MEANS = (
    *GPM_FIELDS,
    *PCIE_FIELDS,
    "sm_clock_mhz",
    "sm_clock_max_mhz",
    "memory_used_bytes",
    "memory_total_bytes",
    "temperature_c",
)
# Bits of nvmlDeviceGetCurrentClocksEventReasons. That an idle GPU is clocked down (bit 0) hinders nobody.
_CLOCK_REASONS = {
    1: "applications_clocks_setting",
    2: "sw_power_cap",
    3: "hw_slowdown",
    4: "sync_boost",
    5: "sw_thermal_slowdown",
    6: "hw_thermal_slowdown",
    7: "hw_power_brake_slowdown",
    8: "display_clock_setting",
    9: "board_limit",
    10: "reliability",
}
# A figure's reason may be that of the question that it comes from.
_QUESTIONS = dict.fromkeys(GPM_FIELDS, "gpm") | dict.fromkeys(PCIE_FIELDS, "pcie")
_QUESTIONS |= dict.fromkeys(("memory_used_bytes", "memory_total_bytes"), "memory")
_MOST_BEYOND = 0.5  # share of a window that energy may be extrapolated over

_PerDevice = Callable[["_Part"], float | None]


class _Part:
    """The readings of one device that overlap the window."""

    def __init__(self, device: DeviceReader, begin_ns: int, end_ns: int) -> None:
        self.device = device
        self.begin_ns = begin_ns
        self.end_ns = end_ns
        self.readings = device.log.between(begin_ns, end_ns)

    def mean(self, field: str) -> float | None:
        return mean(self.readings, field, self.begin_ns, self.end_ns)

    def utilisation(self) -> float | None:
        """By the driver's own samples, which have no gaps; else by those of the sampler."""
        inside = [value for at_ns, value in tuple(self.device.utilisation) if self.begin_ns <= at_ns <= self.end_ns]
        return sum(inside) / len(inside) if inside else self.mean("utilisation_percent")

    def energy(self) -> float | None:
        """Joules in the window, between readings of the counter a second apart."""
        points = [(r.at_ns, r.values["energy_j"]) for r in self.device.log.all() if "energy_j" in r.values]
        if len(points) < 2:
            return None
        begin_ns, end_ns = (min(max(at, points[0][0]), points[-1][0]) for at in (self.begin_ns, self.end_ns))
        if end_ns - begin_ns < (1 - _MOST_BEYOND) * (self.end_ns - self.begin_ns) or end_ns == begin_ns:
            return None
        joules = _interpolate(points, end_ns) - _interpolate(points, begin_ns)
        return joules * (self.end_ns - self.begin_ns) / (end_ns - begin_ns)

    def power(self) -> float | None:
        """Watts, by the energy counter: power itself is sampled for a part of the time only."""
        joules = self.energy()
        return self.mean("power_w") if joules is None else joules / ((self.end_ns - self.begin_ns) / 1e9)


def summarise(devices: Sequence[DeviceReader], begin_ns: int, end_ns: int) -> tuple[dict[str, Any], dict[str, str]]:
    """The figures over a window, and the reasons of those that are null.

    "energy_j" is that of all devices; "other_processes", "throttle_reasons" and the PCIe link are the most that was
    seen (of several links the least); every other figure is a mean over devices and time.
    """
    parts = [_Part(device, begin_ns, end_ns) for device in devices]
    figures: dict[str, Any] = {
        "devices": len(devices),
        "mig": any(device.target.is_mig for device in devices),
        "samples": max((len(part.readings) for part in parts), default=0),
        "utilisation_percent": _average(parts, _Part.utilisation),
        "power_w": _average(parts, _Part.power),
        "energy_j": _all(parts, _Part.energy),
        "throttle_reasons": _throttle_reasons(parts),
    }
    for field in _MEANS:
        figures[field] = _average(parts, methodcaller("mean", field))
    for field in ("pcie_gen", "pcie_width"):
        figures[field] = min((max(seen) for part in parts if (seen := known(part.readings, field))), default=None)
    others = [max(seen) for part in parts if (seen := known(part.readings, "other_processes"))]
    figures["other_processes"] = max(others, default=None)
    for field in ("pcie_gen", "pcie_width", "other_processes"):
        figures[field] = None if figures[field] is None else int(figures[field])
    missing = {field: _reason(devices, field) for field, value in figures.items() if value is None}
    missing |= dict(_losses(devices, begin_ns))
    return figures, missing


def _average(parts: Sequence[_Part], figure: _PerDevice) -> float | None:
    values = [value for part in parts if (value := figure(part)) is not None]
    return sum(values) / len(values) if values else None


def _all(parts: Sequence[_Part], figure: _PerDevice) -> float | None:
    values = [figure(part) for part in parts]
    return None if None in values or not values else sum(value for value in values if value is not None)


def _throttle_reasons(parts: Sequence[_Part]) -> list[str] | None:
    seen = [int(bits) for part in parts for bits in known(part.readings, "throttle_reasons")]
    if not seen:
        return None
    return [name for bit, name in _CLOCK_REASONS.items() if any(bits >> bit & 1 for bits in seen)]


def _interpolate(points: Sequence[tuple[int, float]], at_ns: int) -> float:
    for (begin_ns, low), (end_ns, high) in pairwise(points):
        if begin_ns <= at_ns <= end_ns:
            return low + (high - low) * (at_ns - begin_ns) / max(1, end_ns - begin_ns)
    return points[-1][1]


def _reason(devices: Sequence[DeviceReader], field: str) -> str:
    for device in devices:
        reasons = device.reasons | device.gpm.reasons
        reason = reasons.get(field) or reasons.get(_QUESTIONS.get(field, field))
        if reason is not None:
            return reason
        if device.lost is not None:
            return device.lost[1]
    return NO_READING


def _losses(devices: Sequence[DeviceReader], begin_ns: int) -> Iterator[tuple[str, str]]:
    for index, device in enumerate(devices):
        if device.lost is not None:
            at_ns, reason = device.lost
            yield f"devices.{index}", f"no reading later than {(at_ns - begin_ns) / 1e9:.1f} s into the run: {reason}"


SERIES_FIELDS = (
    "utilisation_percent",
    "sm_utilisation_percent",
    "pcie_rx_gbps",
    "pcie_tx_gbps",
    "power_w",
    "memory_used_bytes",
    "sm_clock_mhz",
)

_ALL_COUNT = "no GPU that was sampled has the UUID of the run's: figures are of all that it could see"


class NvmlSampler:
    """Samples GPUs from `start()` to `stop()`, remembers the last hour, and never raises because of them.

    Utilisation, GPM, PCIe bytes, memory, power and clocks are read at every tick; energy, temperature, the link's
    state, the driver's utilisation samples and the list of processes once a second. A device that is lost ends alone.
    One per node: every call takes the driver's lock.

    Args:
        devices: as in CUDA_VISIBLE_DEVICES: indices, UUIDs of GPUs or MIG devices, beginnings of UUIDs; None: all.
        rate_hz: ticks a second; 5 to 10 is what the driver bears.
        clock_ns: nanoseconds, for all times; CLOCK_MONOTONIC unless said otherwise.
        ours: tells which processes on a GPU are not others'; None: of a process that is not known here. Unless said
            otherwise, this process and its descendants.

    Raises:
        ValueError: the rate is not above 0 and at most 20.
    """

    def __init__(
        self,
        devices: Sequence[str] | None = None,
        rate_hz: float = 5.0,
        *,
        clock_ns: Callable[[], int] = time.monotonic_ns,
        ours: Callable[[int], bool | None] = is_ours,
    ) -> None:
        self._wanted = None if devices is None else list(devices)
        self._rate_hz = rate_hz
        self._clock_ns = clock_ns
        self._ours = ours
        self._ticker = Ticker(self._run, rate_hz=rate_hz, name="zftune-nvml")
        self._devices: list[DeviceReader] = []
        self._missing: dict[str, str] = {"": "NVML was not sampled"}

    def start(self) -> None:
        """Begin to sample. Where that cannot be done, the summary says why."""
        try:
            load_binding()  # here: it changes the filters of warnings for a moment, which all threads share
        except NvmlError as error:
            self._missing = {"": str(error)}
            return
        self._ticker.start()

    def stop(self) -> None:
        """Take a last sample and end the thread; waits at most 5 s. What was sampled stays."""
        self._ticker.stop()

    def summary(
        self, begin_ns: int, end_ns: int, uuids: Collection[str] | None = None
    ) -> tuple[dict[str, Any] | None, dict[str, str]]:
        """The figures over a window: the "nvml" of a profile document.

        Args:
            begin_ns: begin of the window on the sampler's clock.
            end_ns: its end.
            uuids: of the GPUs or MIG devices that count, with or without "GPU-" and "MIG-"; None: all. Where none of
                them is sampled, all count, and "devices" says so.

        Returns:
            The figures, means over devices and time but for "energy_j" (all devices, the whole window),
            "other_processes" and the PCIe link (the most seen), or None; and reasons by name relative to "nvml": of
            every null, under "" where all is null; also under "devices" for those that were left out,
            "devices.INDEX" for one that was lost, "samples" where the sampler itself ended early.
        """
        missing, failure = self._missing, self._ticker.failure
        devices, unknown = self._meant(uuids)
        if not any(device.log.between(begin_ns, end_ns) for device in devices):
            return None, {"": failure or missing.get("") or missing.get("devices") or self._silence(devices)}
        figures, reasons = summarise(devices, begin_ns, end_ns)
        if unknown:
            reasons["devices"] = _ALL_COUNT
        if failure is not None:
            reasons["samples"] = failure
        return figures, missing | reasons

    def series(self, begin_ns: int, end_ns: int, uuids: Collection[str] | None = None) -> list[dict[str, float | None]]:
        """Rows of a window in order of time: "at_ms" since its begin, "device", and figures or None.

        Devices are numbered from 0 among those that count, which `uuids` says as for `summary`.
        """
        devices, _ = self._meant(uuids)
        found = [
            row
            for number, device in enumerate(devices)
            for row in rows(device.log.between(begin_ns, end_ns), SERIES_FIELDS, begin_ns, device=number)
        ]
        return sorted(found, key=lambda row: (row["at_ms"], row["device"]))

    def _meant(self, uuids: Collection[str] | None) -> tuple[Sequence[DeviceReader], bool]:
        """The devices that count, and whether none of those that were asked for is sampled."""
        if uuids is None or not self._devices:
            return self._devices, False
        wanted = {_bare(uuid) for uuid in uuids}
        found = [device for device in self._devices if wanted & _names_of(device)]
        return found or self._devices, not found

    def _silence(self, devices: Sequence[DeviceReader]) -> str:
        """Why there is no reading at all."""
        for device in devices:
            if device.lost is not None:
                return device.lost[1]
            if device.reasons and not device.log.all():
                return next(iter(device.reasons.values()))
        return NO_READING

    def _run(self, ticks: Iterator[None]) -> None:
        self._missing = {"": "NVML has not answered yet"}
        try:
            with nvml_session() as nvml:
                targets, self._missing = find_targets(nvml, self._wanted)
                if not targets:
                    self._missing = {"": self._missing.get("devices", "no GPU is visible")}
                    return
                more = (self._rate_hz, self._clock_ns, self._ours)
                devices = [DeviceReader(nvml, target, *more) for target in targets]
                self._devices = devices
                self._sample(devices, ticks)
        except NvmlError as error:
            self._missing = {"": str(error)}

    def _sample(self, devices: Sequence[DeviceReader], ticks: Iterator[None]) -> None:
        for _ in ticks:
            for device in devices:
                device.read(last=self._ticker.stopping)
        for device in devices:
            with suppress(NvmlError):  # nothing to give back to a driver that has gone
                device.close()


def _names_of(device: DeviceReader) -> set[str]:
    """UUIDs that mean a device: its own, and of a MIG device that of its GPU."""
    return {_bare(uuid) for uuid in (device.target.uuid, device.target.gpu_uuid) if uuid is not None}


def _bare(uuid: str) -> str:
    return uuid.casefold().removeprefix("gpu-").removeprefix("mig-")
