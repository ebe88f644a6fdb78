"""The profile document's "nvml": the figures of all devices over a window, each with its reason where it is null."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from operator import methodcaller
from typing import Any

from zftune.telemetry.nvml_device import DeviceReader
from zftune.telemetry.nvml_gpm import FIELDS as GPM_FIELDS
from zftune.telemetry.nvml_pcie import FIELDS as PCIE_FIELDS
from zftune.telemetry.readings import known, mean

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
_NO_READING = "no reading falls into the measured time"
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
    return _NO_READING


def _losses(devices: Sequence[DeviceReader], begin_ns: int) -> Iterator[tuple[str, str]]:
    for index, device in enumerate(devices):
        if device.lost is not None:
            at_ns, reason = device.lost
            yield f"devices.{index}", f"no reading later than {(at_ns - begin_ns) / 1e9:.1f} s into the run: {reason}"
