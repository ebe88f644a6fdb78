"""What a sampler keeps: readings over time, the part of them that lies in a window, and means over it."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

KEPT_S = 3600.0
"""How far back a sampler that runs for long remembers, in seconds."""

_NS_PER_MS = 1e6


@dataclass(frozen=True, slots=True)
class Reading:
    """The figures of one tick; those that were not read are left out."""

    since_ns: int
    """When the tick before was: rates are means from there to `at_ns`."""
    at_ns: int
    values: Mapping[str, float]


class Log:
    """Readings of the last hour; written by one thread, read by any."""

    def __init__(self, rate_hz: float) -> None:
        self._lock = threading.Lock()
        self._readings: deque[Reading] = deque(maxlen=max(1, round(rate_hz * KEPT_S)))

    def add(self, reading: Reading) -> None:
        """Append a reading, later than those before."""
        with self._lock:
            self._readings.append(reading)

    def all(self) -> list[Reading]:
        """Everything that is remembered, in order."""
        with self._lock:
            return list(self._readings)

    def between(self, begin_ns: int, end_ns: int) -> list[Reading]:
        """The readings whose interval overlaps a window, in order."""
        return [reading for reading in self.all() if reading.at_ns > begin_ns and reading.since_ns < end_ns]


def mean(readings: Iterable[Reading], field: str, begin_ns: int, end_ns: int) -> float | None:
    """Mean of a figure over a window, each reading weighted with its part of it; None where there is none."""
    total = weight = 0.0
    for reading in readings:
        if field in reading.values:
            # An interval of length 0 is a first reading: it counts a little, for where there is nothing else.
            overlap_ns = min(reading.at_ns, end_ns) - max(reading.since_ns, begin_ns)
            part = max(overlap_ns, 1)
            total += part * reading.values[field]
            weight += part
    return total / weight if weight else None


def known(readings: Iterable[Reading], field: str) -> list[float]:
    """Every value of a figure."""
    return [reading.values[field] for reading in readings if field in reading.values]


def rows(
    readings: Iterable[Reading], fields: Iterable[str], begin_ns: int, **more: float
) -> list[dict[str, float | None]]:
    """A dictionary for each reading: "at_ms" since `begin_ns`, what is given in `more`, then the fields or None."""
    wanted = tuple(fields)
    found: list[dict[str, float | None]] = []
    for reading in readings:
        row: dict[str, float | None] = {"at_ms": (reading.at_ns - begin_ns) / _NS_PER_MS, **more}
        found.append(row | {field: reading.values.get(field) for field in wanted})
    return found
