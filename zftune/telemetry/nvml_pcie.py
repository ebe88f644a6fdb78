"""Bytes over the GPU's PCIe link, by the best source that works here.

Seen from the GPU: what it receives (rx) is H2D, what it sends (tx) is D2H. The byte counters hold 32 bits on GPUs that
we know of, so a fast link wraps them within a tenth of a second.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from zftune.telemetry.nvml_session import FUNCTION_NOT_FOUND, GONE, NOT_SUPPORTED, Nvml, NvmlError

FIELDS = ("pcie_rx_gbps", "pcie_tx_gbps")
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
    """Rates of one GPU's link in 10^9 bytes/s, headers of the packets included.

    Args:
        nvml: an open session.
        handle: of the GPU.
        clock_ns: the sampler's clock.
    """

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

        Args:
            period_s: time to the next call.
            elsewhere: whether GPM gives the rates as well; it does so without blocking and without wraps.

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
        for field, old, new in zip(FIELDS, before, now, strict=True):
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
                for field, counter in zip(FIELDS, _COUNTERS, strict=True)
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
