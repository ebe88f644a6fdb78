"""GPM, the performance counters of Hopper and later: shares of time and rates between two samples of the driver."""

from __future__ import annotations

import math
from typing import Any

from zftune.telemetry.nvml_session import NOT_SUPPORTED, Nvml, NvmlError
from zftune.telemetry.nvml_targets import Target

_MIB_GB = (1 << 20) / 1e9
# Metric: its name here, and its unit in terms of ours. TX is what the GPU sends.
_METRICS = {
    2: ("sm_utilisation_percent", 1.0),
    3: ("sm_occupancy_percent", 1.0),
    10: ("dram_percent", 1.0),
    21: ("pcie_rx_gbps", _MIB_GB),
    20: ("pcie_tx_gbps", _MIB_GB),
}
FIELDS = tuple(name for name, _ in _METRICS.values() if not name.startswith("pcie"))
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
