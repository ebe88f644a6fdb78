"""One GPU or MIG device: everything that is read at a tick, PCIe and performance metrics too, each on its own."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from zftune.telemetry.nvml import FUNCTION_NOT_FOUND, GONE, NOT_SUPPORTED, PERMANENT, Nvml, NvmlError, mig_instances
from zftune.telemetry.ticker import KEPT_S, Log, Reading

_VARIABLE = "CUDA_VISIBLE_DEVICES"
_ORDER = (
    "GPUs of several kinds: indices count in the order of the PCI bus, CUDA's only with CUDA_DEVICE_ORDER=PCI_BUS_ID"
)


@dataclass(frozen=True, slots=True)
class Target:
    """One GPU, or one MIG device of a GPU."""

    handle: Any
    uuid: str | None
    gpu: Any
    """Handle of the whole GPU."""
    gpu_uuid: str | None
    instance: int | None = None
    """Number of the GPU instance that a MIG device belongs to."""

    @property
    def is_mig(self) -> bool:
        """Whether it is a part of a GPU."""
        return self.instance is not None


def visible_devices(environment: Mapping[str, str]) -> list[str] | None:
    """The entries of `CUDA_VISIBLE_DEVICES`; None where the variable is not set: all devices are visible."""
    value = environment.get(_VARIABLE)
    if value is None:
        return None
    return [entry.strip() for entry in value.split(",") if entry.strip()]


def find_targets(nvml: Nvml, devices: Sequence[str] | None) -> tuple[list[Target], dict[str, str]]:
    """The devices that are meant, each once.

    Args:
        nvml: an open session.
        devices: indices, "GPU-" or "MIG-" UUIDs or beginnings of them, UUIDs without the prefix as torch gives them;
            None: all of the machine. As in CUDA, an entry that matches nothing hides those after it, and of a divided
            GPU an index means the first MIG device. Indices count in the order of the PCI bus.

    Returns:
        The devices, and reasons under "devices" for those that are left out.

    Raises:
        NvmlError: the driver lists no devices at all.
    """
    missing: dict[str, str] = {}
    machine = _machine(nvml, missing)
    if devices is None:
        return [target for parts in machine for target in parts], missing
    if any(entry.isdecimal() for entry in devices) and len(_names(nvml, machine)) > 1:
        missing["devices"] = _ORDER
    found: dict[Any, Target] = {}
    for entry in devices:
        target = _match(entry, machine) or _by_uuid(nvml, entry)
        if target is None:
            missing["devices"] = f"no GPU or MIG device matches '{entry}'; what follows it is left out, as in CUDA"
            break
        found.setdefault(target.uuid or id(target), target)
    return list(found.values()), missing


def _machine(nvml: Nvml, missing: dict[str, str]) -> list[list[Target]]:
    """For each GPU of the machine itself, or its MIG devices."""
    machine = []
    for index in range(nvml.call("nvmlDeviceGetCount")):
        try:
            handle = nvml.call("nvmlDeviceGetHandleByIndex", index)
            machine.append(_parts(nvml, handle))
        except NvmlError as error:
            missing["devices"] = f"GPU {index} is left out: {error}"
            machine.append([])
    return machine


def _parts(nvml: Nvml, handle: Any) -> list[Target]:
    uuid = _uuid(nvml, handle)
    try:
        instances = mig_instances(nvml, handle)
    except NvmlError:  # a driver before MIG, or a container that may not ask
        instances = None
    if instances is None:
        return [Target(handle, uuid, handle, uuid)]
    return [_mig_target(nvml, instance, handle, uuid) for instance in instances]


def _mig_target(nvml: Nvml, instance: Any, gpu: Any, gpu_uuid: str | None) -> Target:
    number = nvml.call("nvmlDeviceGetGpuInstanceId", instance)
    return Target(instance, _uuid(nvml, instance), gpu, gpu_uuid, number)


def _names(nvml: Nvml, machine: list[list[Target]]) -> set[str]:
    names = set()
    for parts in machine:
        with suppress(NvmlError):  # a GPU without a name is like any other
            names |= {nvml.call("nvmlDeviceGetName", target.gpu) for target in parts}
    return names


def _uuid(nvml: Nvml, handle: Any) -> str | None:
    try:
        return str(nvml.call("nvmlDeviceGetUUID", handle))
    except NvmlError:
        return None  # such a device can still be asked for by its index


def _match(entry: str, machine: list[list[Target]]) -> Target | None:
    if entry.isdecimal():
        parts = machine[int(entry)] if int(entry) < len(machine) else []
        return parts[0] if parts else None
    everything = [target for parts in machine for target in parts]
    if entry.upper().startswith("MIG-GPU-"):  # drivers before 470: the GPU's UUID, GPU instance, compute instance
        uuid, _, instances = entry[4:].partition("/")
        meant = [
            target
            for target in everything
            if target.gpu_uuid == uuid and str(target.instance) == instances.partition("/")[0]
        ]
        return meant[0] if meant else None
    for prefix in ("", "GPU-", "MIG-"):
        meant = [target for target in everything if _begins(target.uuid, prefix + entry)]
        if len(meant) == 1:
            return meant[0]
    parts = [target for target in everything if target.is_mig and _begins(target.gpu_uuid, entry)]
    return parts[0] if len({target.gpu_uuid for target in parts}) == 1 else None


def _begins(uuid: str | None, text: str) -> bool:
    return uuid is not None and uuid.casefold().startswith(text.casefold())


def _by_uuid(nvml: Nvml, entry: str) -> Target | None:
    """A MIG device that its GPU does not list: so it is in a container that was given no more than the device."""
    if not entry.upper().startswith("MIG-"):
        return None
    try:
        handle = nvml.call("nvmlDeviceGetHandleByUUID", entry)
        gpu = nvml.call("nvmlDeviceGetDeviceHandleFromMigDeviceHandle", handle)
        return _mig_target(nvml, handle, gpu, _uuid(nvml, gpu))
    except NvmlError:
        return None


PCIE_FIELDS = ("pcie_rx_gbps", "pcie_tx_gbps")
_FIELD_IDS = (198, 197)  # NVML_FI_DEV_PCIE_COUNT_RX_BYTES, .._TX_BYTES
_COUNTERS = (1, 0)  # NVML_PCIE_UTIL_RX_BYTES, .._TX_BYTES
_UNSIGNED_INT = 1  # NVML_VALUE_TYPE_UNSIGNED_INT
_WRAP = 1 << 32
_WRAP_64 = 1 << 64

_LANE_GBPS = {1: 0.25, 2: 0.5, 3: 0.985, 4: 1.97, 5: 3.94, 6: 7.56}
_FASTEST_GBPS = 128.0  # of a link whose speed is unknown
_BURST_S = 0.02
_THROUGHPUT_EVERY_NS = 1_000_000_000  # the call blocks for 20 ms a direction


@dataclass(frozen=True, slots=True)
class _Count:
    bytes: int
    at_ns: int


class Pcie:
    """Rates of one GPU's link in 10^9 bytes/s, headers of the packets included."""

    def __init__(self, nvml: Nvml, handle: Any, clock_ns: Callable[[], int]) -> None:
        self._nvml = nvml
        self._handle = handle
        self._clock_ns = clock_ns
        self._last: list[_Count] | None = None
        self._is_long = False  # a count above 32 bits was seen
        self._counts_fail: NvmlError | None = None
        self._throughput_due_ns = 0
        self._fastest_bytes_per_ns = self._link_gbps()

    def read(self, period_s: float, elsewhere: bool) -> dict[str, float]:
        """The rates since the last call; nothing on the first call, and where they are not read this time.

        `period_s`: time to the next call; `elsewhere`: GPM gives the rates as well, without blocking and without wraps.

        Raises:
            NvmlError: no source works.
        """
        if self._counts_fail is None:
            try:
                return self._from_counts(period_s, elsewhere)
            except NvmlError as error:
                if error.code in GONE:
                    raise
                self._counts_fail = error
        if elsewhere:
            return {}
        return self._throughput()

    def _from_counts(self, period_s: float, elsewhere: bool) -> dict[str, float]:
        before, now = self._last, self._counts()
        self._last = now
        self._is_long |= any(count.bytes >= _WRAP for count in now)
        if self._sure(period_s * 1e9):
            return {} if before is None else self._rates(before, now)
        # It may wrap more than once between two calls: only a short look is sure.
        if elsewhere:
            return {}
        time.sleep(min(_BURST_S, 0.5e-9 * _WRAP / self._fastest_bytes_per_ns))
        return self._rates(now, self._counts())

    def _sure(self, span_ns: float) -> bool:
        return self._is_long or span_ns * self._fastest_bytes_per_ns < _WRAP

    def _rates(self, before: list[_Count], now: list[_Count]) -> dict[str, float]:
        rates = {}
        for field, old, new in zip(PCIE_FIELDS, before, now, strict=True):
            rate = self._rate(old, new)
            if rate is not None:
                rates[field] = rate
        return rates

    def _rate(self, old: _Count, new: _Count) -> float | None:
        span_ns = new.at_ns - old.at_ns
        if span_ns <= 0 or not self._sure(
            span_ns
        ):  # the driver has not counted anew; or it wrapped, who knows how often
            return None
        moved = new.bytes - old.bytes
        if moved < 0:
            moved += _WRAP if old.bytes < _WRAP else _WRAP_64
        rate = moved / span_ns
        # A counter that was reset looks like one that wrapped.
        return rate if rate <= 1.2 * self._fastest_bytes_per_ns else None

    def _counts(self) -> list[_Count]:
        entries = self._nvml.call("nvmlDeviceGetFieldValues", self._handle, list(_FIELD_IDS))
        at_ns = self._clock_ns()
        counts = []
        for entry in entries:
            if entry.nvmlReturn != 0:
                raise NvmlError(self._nvml.text(entry.nvmlReturn), entry.nvmlReturn)
            value = entry.value.uiVal if entry.valueType == _UNSIGNED_INT else entry.value.ullVal
            # The driver's own time of the reading where it gives one, in microseconds.
            counts.append(_Count(int(value), entry.timestamp * 1000 or at_ns))
        return counts

    def _throughput(self) -> dict[str, float]:
        now_ns = self._clock_ns()
        if now_ns < self._throughput_due_ns:
            return {}
        self._throughput_due_ns = now_ns + _THROUGHPUT_EVERY_NS
        try:
            return {
                field: self._nvml.call("nvmlDeviceGetPcieThroughput", self._handle, counter) / 1e6
                for field, counter in zip(PCIE_FIELDS, _COUNTERS, strict=True)
            }
        except NvmlError as error:
            if error.code in (NOT_SUPPORTED, FUNCTION_NOT_FOUND) and self._counts_fail is not None:
                raise NvmlError(str(self._counts_fail), error.code) from error
            raise

    def _link_gbps(self) -> float:
        try:
            generation = self._nvml.call("nvmlDeviceGetMaxPcieLinkGeneration", self._handle)
            width = self._nvml.call("nvmlDeviceGetMaxPcieLinkWidth", self._handle)
        except NvmlError:
            return _FASTEST_GBPS
        return float(_LANE_GBPS.get(generation, _FASTEST_GBPS / 16) * width) or _FASTEST_GBPS


_MIB_GB = (1 << 20) / 1e9
# Metric: its name here, and its unit in terms of ours. TX is what the GPU sends.
_METRICS = {
    2: ("sm_utilisation_percent", 1.0),
    3: ("sm_occupancy_percent", 1.0),
    10: ("dram_percent", 1.0),
    21: ("pcie_rx_gbps", _MIB_GB),
    20: ("pcie_tx_gbps", _MIB_GB),
}
GPM_FIELDS = tuple(name for name, _ in _METRICS.values() if not name.startswith("pcie"))
_VERSION = 1
_LEAST_SPAN_NS = 105_000_000  # the driver wants more than 100 ms between two samples


class Gpm:
    """Metrics of one GPU or MIG device.

    The first pair of samples is the probe: what works in the documentation may be forbidden in a container or fail on
    a part of a GPU. If it fails, `read` raises and must not be called again.
    """

    def __init__(self, nvml: Nvml, target: Target) -> None:
        self._nvml = nvml
        self._target = target
        # The link is the whole GPU's: of a part of it, its bytes mean nothing.
        self._wanted = {id_: how for id_, how in _METRICS.items() if not (target.is_mig and how[0].startswith("pcie"))}
        self._samples: list[Any] = []
        self._taken_ns: int | None = None
        self.works = False
        """Whether a pair of samples gave metrics."""
        self.reasons: dict[str, str] = {}
        """Why single metrics are missing, by field."""

    def read(self, now_ns: int) -> dict[str, float]:
        """Metrics since the last sample; nothing on the first call, and when that was no more than 105 ms ago.

        Raises:
            NvmlError: the device has no GPM, or the driver does not let this process read it.
        """
        if self._taken_ns is None:
            self._begin()
        elif now_ns - self._taken_ns < _LEAST_SPAN_NS:
            return {}
        self._take(self._samples[1])
        first, self._taken_ns = self._taken_ns is None, now_ns
        metrics = {} if first else self._metrics()
        self._samples.reverse()
        return metrics

    def close(self) -> None:
        """Free the samples."""
        while self._samples:
            self._nvml.call("nvmlGpmSampleFree", self._samples.pop())

    def _begin(self) -> None:
        support = self._nvml.call("nvmlGpmQueryDeviceSupport", self._target.gpu)
        if not support.isSupportedDevice:
            raise NvmlError("this GPU has no GPM, which came with Hopper", NOT_SUPPORTED)
        for _ in range(2):
            self._samples.append(self._nvml.call("nvmlGpmSampleAlloc"))

    def _take(self, sample: Any) -> None:
        if self._target.is_mig:
            self._nvml.call("nvmlGpmMigSampleGet", self._target.gpu, self._target.instance, sample)
        else:
            self._nvml.call("nvmlGpmSampleGet", self._target.gpu, sample)

    def _metrics(self) -> dict[str, float]:
        request = self._nvml.struct("c_nvmlGpmMetricsGet_t")
        request.version = _VERSION
        request.numMetrics = len(self._wanted)
        request.sample1, request.sample2 = self._samples
        for entry, metric in zip(request.metrics, self._wanted, strict=False):
            entry.metricId = metric
        answer = self._nvml.call("nvmlGpmMetricsGet", request)
        found = {}
        for entry, (name, unit) in zip(answer.metrics, self._wanted.values(), strict=False):
            if entry.nvmlReturn != 0:
                self.reasons[name] = self._nvml.text(entry.nvmlReturn)
            elif math.isfinite(entry.value):
                found[name] = entry.value * unit
        self.works = True
        return found


_SM_CLOCK = 1  # NVML_CLOCK_SM
_TEMPERATURE_GPU = 0
_UTILISATION_SAMPLES = 1  # NVML_GPU_UTILIZATION_SAMPLES
_MEMORY_V2 = 0x02000028
_SLOW_NS = 1_000_000_000
_SAMPLES_KEPT = round(10 * KEPT_S)


class DeviceReader:
    """Asks and remembers; used by one thread.

    Args:
        rate_hz: how often `read` is called.
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

        `last`: no other follows, so that what is asked once a second is asked now.
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
