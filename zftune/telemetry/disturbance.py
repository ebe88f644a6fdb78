"""What NVML sees of a GPU that makes measurements on it void."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

from zftune.telemetry.nvml_sampler import NvmlSampler

_SLOWDOWNS = {
    "hw_slowdown": "the GPU was slowed down by its hardware",
    "sw_thermal_slowdown": "the GPU was slowed down because it was hot",
    "hw_thermal_slowdown": "the GPU was slowed down because it was hot",
    "hw_power_brake_slowdown": "the GPU was slowed down by its power supply",
}


class GpuDisturbance:
    """What NVML saw of one GPU.

    Args:
        sampler: started; ends with this.
        uuid: of the GPU; None: of all that are sampled.
    """

    def __init__(
        self, sampler: NvmlSampler, uuid: str | None, *, clock_ns: Callable[[], int] = time.monotonic_ns
    ) -> None:
        self._sampler, self._clock_ns, self._begin_ns = sampler, clock_ns, clock_ns()
        self._uuids = None if uuid is None else [uuid]
        self._others: int | None = None
        self._links: dict[str, int] = {}

    def __call__(self) -> str | None:
        begin_ns, self._begin_ns = self._begin_ns, self._clock_ns()
        figures, _ = self._sampler.summary(begin_ns, self._begin_ns, self._uuids)
        if figures is None:
            return None
        slowed = next((_SLOWDOWNS[name] for name in figures["throttle_reasons"] or () if name in _SLOWDOWNS), None)
        shared, shifted = self._shared(figures["other_processes"]), self._shifted(figures)
        return slowed or shared or shifted

    def close(self) -> None:
        self._sampler.stop()

    def _shared(self, others: int | None) -> str | None:
        if others is None:
            return None
        self._others = others if self._others is None else min(self._others, others)
        more = others - self._others
        return None if more == 0 else f"the GPU was shared with {more} more process{'' if more == 1 else 'es'}"

    def _shifted(self, figures: Mapping[str, Any]) -> str | None:
        for name, word in (("pcie_gen", "generation"), ("pcie_width", "width")):
            now = figures[name]
            if now is None:
                continue
            best = self._links[name] = max(now, self._links.get(name, now))
            if now < best:
                return f"the PCIe link was shifted down to {word} {now} from {best}"
        return None
