"""`NvmlSampler`: what the GPUs of this node did over time, asked by one thread with a session of its own."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import suppress
from typing import Any

from zftune.telemetry.nvml_device import DeviceReader
from zftune.telemetry.nvml_session import NvmlError, load_binding, nvml_session
from zftune.telemetry.nvml_summary import summarise
from zftune.telemetry.nvml_targets import find_targets
from zftune.telemetry.process_tree import is_ours
from zftune.telemetry.readings import rows
from zftune.telemetry.ticker import Ticker

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
        return "no reading falls into the measured time"

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
