"""One GPU or MIG device: everything that is asked of it at a tick, each question with an end of its own."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import Any

from zftune.telemetry.nvml_gpm import Gpm
from zftune.telemetry.nvml_pcie import Pcie
from zftune.telemetry.nvml_session import FUNCTION_NOT_FOUND, GONE, PERMANENT, Nvml, NvmlError
from zftune.telemetry.nvml_targets import Target
from zftune.telemetry.readings import KEPT_S, Log, Reading

_SM_CLOCK = 1  # NVML_CLOCK_SM
_TEMPERATURE_GPU = 0
_UTILISATION_SAMPLES = 1  # NVML_GPU_UTILIZATION_SAMPLES
_MEMORY_V2 = 0x02000028
_SLOW_NS = 1_000_000_000
_SAMPLES_KEPT = round(10 * KEPT_S)


class DeviceReader:
    """Asks and remembers; used by one thread.

    Args:
        nvml: an open session.
        target: the device.
        rate_hz: how often `read` is called.
        clock_ns: the sampler's clock.
        ours: whether a process is of the run; None where it is not known here.
    """

    def __init__(
        self,
        nvml: Nvml,
        target: Target,
        rate_hz: float,
        clock_ns: Callable[[], int],
        ours: Callable[[int], bool | None],
    ) -> None:
        self.target = target
        self.log = Log(rate_hz)
        self.utilisation: deque[tuple[int, float]] = deque(maxlen=_SAMPLES_KEPT)
        """The driver's own samples: time on the sampler's clock, percent."""
        self.reasons: dict[str, str] = {}
        """The last failure of each field."""
        self.lost: tuple[int, str] | None = None
        """When and why the device stopped to answer."""
        self._nvml = nvml
        self._clock_ns = clock_ns
        self._ours = ours
        self._period_s = 1 / rate_hz
        self._given_up: set[str] = set()
        self._values: dict[str, float] = {}
        self._last_ns: int | None = None
        self._slow_due_ns = 0
        self._newest_us = 0
        self.gpm = Gpm(nvml, target)
        self._pcie = Pcie(nvml, target.handle, clock_ns)

    def read(self, *, last: bool = False) -> None:
        """Add a reading to the log; none once the device is lost.

        Args:
            last: whether no other reading follows: what is asked once a second is asked now.
        """
        if self.lost is not None:
            return
        now_ns = self._clock_ns()
        self._values = {}
        try:
            self._fast(now_ns)
            if last or now_ns >= self._slow_due_ns:
                self._slow_due_ns = now_ns + _SLOW_NS
                self._slow()
        except NvmlError as error:
            self.lost = now_ns, str(error)
        if self._values:
            self.log.add(Reading(now_ns if self._last_ns is None else self._last_ns, now_ns, self._values))
        self._last_ns = now_ns

    def close(self) -> None:
        """Give back what the driver holds for this device."""
        self.gpm.close()

    def _fast(self, now_ns: int) -> None:
        call, handle, gpu = self._nvml.call, self.target.handle, self.target.gpu
        self._ask("utilisation_percent", lambda: call("nvmlDeviceGetUtilizationRates", handle).gpu)
        self._ask("memory", self._memory)
        self._ask("sm_clock_mhz", lambda: call("nvmlDeviceGetClockInfo", gpu, _SM_CLOCK))
        self._ask("power_w", lambda: call("nvmlDeviceGetPowerUsage", handle) / 1000)
        self._ask("throttle_reasons", self._clock_reasons)
        self._ask("gpm", lambda: self.gpm.read(now_ns), probing=not self.gpm.works)
        self._ask("pcie", lambda: self._pcie.read(self._period_s, self._gpm_has_pcie()))

    def _slow(self) -> None:
        call, handle, gpu = self._nvml.call, self.target.handle, self.target.gpu
        self._ask("energy_j", lambda: call("nvmlDeviceGetTotalEnergyConsumption", handle) / 1000)
        self._ask("utilisation_samples", self._utilisation_samples)
        self._ask("sm_clock_max_mhz", lambda: call("nvmlDeviceGetMaxClockInfo", gpu, _SM_CLOCK))
        self._ask("temperature_c", self._temperature)
        self._ask("pcie_gen", lambda: call("nvmlDeviceGetCurrPcieLinkGeneration", gpu))
        self._ask("pcie_width", lambda: call("nvmlDeviceGetCurrPcieLinkWidth", gpu))
        self._ask("other_processes", self._other_processes)

    def _ask(self, field: str, question: Callable[[], Any], *, probing: bool = False) -> None:
        """Take an answer, which is a number, or a dictionary of several, or None.

        Raises:
            NvmlError: the device is gone.
        """
        if field in self._given_up:
            return
        try:
            answer = question()
        except NvmlError as error:
            if error.code in GONE:
                raise
            self.reasons[field] = str(error)
            if probing or error.code in PERMANENT:
                self._given_up.add(field)
            return
        if isinstance(answer, dict):
            self._values |= answer
        elif answer is not None:
            self._values[field] = float(answer)

    def _memory(self) -> dict[str, float]:
        """What is in use; the newer call does not count what the driver keeps for itself."""
        try:
            info = self._nvml.call("nvmlDeviceGetMemoryInfo", self.target.handle, _MEMORY_V2)
        except NvmlError as error:
            if error.code not in PERMANENT:
                raise
            info = self._nvml.call("nvmlDeviceGetMemoryInfo", self.target.handle)
        return {"memory_used_bytes": float(info.used), "memory_total_bytes": float(info.total)}

    def _clock_reasons(self) -> int:
        return int(
            self._newer_or_older(
                "nvmlDeviceGetCurrentClocksEventReasons",
                "nvmlDeviceGetCurrentClocksThrottleReasons",  # its name before driver 535
            )
        )

    def _temperature(self) -> int:
        return int(self._newer_or_older("nvmlDeviceGetTemperatureV", "nvmlDeviceGetTemperature", _TEMPERATURE_GPU))

    def _newer_or_older(self, newer: str, older: str, *arguments: Any) -> Any:
        try:
            return self._nvml.call(newer, self.target.gpu, *arguments)
        except NvmlError as error:
            if error.code != FUNCTION_NOT_FOUND:
                raise
        return self._nvml.call(older, self.target.gpu, *arguments)

    def _utilisation_samples(self) -> None:
        """Take up the samples since the last time; at first, those of the seconds before as well."""
        arguments = (self.target.handle, _UTILISATION_SAMPLES, self._newest_us)
        _, samples = self._nvml.call("nvmlDeviceGetSamples", *arguments)
        # Times are the system's, in microseconds.
        offset_ns = self._clock_ns() - time.time_ns()
        for sample in samples:
            if sample.timeStamp > self._newest_us:
                self._newest_us = sample.timeStamp
                self.utilisation.append((sample.timeStamp * 1000 + offset_ns, float(sample.sampleValue.uiVal)))

    def _other_processes(self) -> int | None:
        processes = self._nvml.call("nvmlDeviceGetComputeRunningProcesses", self.target.handle)
        ours = [self._ours(process.pid) for process in processes]
        if None in ours:
            self.reasons["other_processes"] = "the driver counts processes by numbers that are not known here"
            return None
        return ours.count(False)

    def _gpm_has_pcie(self) -> bool:
        usable = self.gpm.works and "gpm" not in self._given_up
        return usable and not self.target.is_mig and "pcie_rx_gbps" not in self.gpm.reasons
