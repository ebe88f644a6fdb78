"""A thread that does something at a steady rate until it is stopped, and the log of its readings."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
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


MAX_RATE_HZ = 20.0
_JOIN_S = 5.0


class Ticker:
    """Runs `body` in a thread of its own.

    Args:
        body: gets an iterator that yields at every tick, at once, then at the rate, then once more on `stop`. It opens
            what it needs before the first tick and closes it after the last.
        rate_hz: ticks a second, above 0 and at most 20. A tick that takes too long delays the next; none is made up.
        name: of the thread.

    Raises:
        ValueError: the rate is not allowed.
    """

    def __init__(self, body: Callable[[Iterator[None]], None], *, rate_hz: float, name: str) -> None:
        if not 0 < rate_hz <= MAX_RATE_HZ:
            raise ValueError(f"rate_hz is {rate_hz}; it must be a number above 0 and at most {MAX_RATE_HZ:g}")
        self._body = body
        self._period_s = 1 / rate_hz
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self.failure: str | None = None
        """Why the thread ended early or does not end."""

    @property
    def stopping(self) -> bool:
        """Whether this tick is the last."""
        return self._stopping.is_set()

    def start(self) -> None:
        """Start the thread; once."""
        self._thread.start()

    def stop(self) -> None:
        """Let the thread make its last tick and wait for its end, at most 5 s: a driver may hang."""
        self._stopping.set()
        if self._thread.ident is not None:
            self._thread.join(_JOIN_S)
        if self._thread.is_alive():
            self.failure = f"the sampler has not answered for {_JOIN_S:g} s"

    def _run(self) -> None:
        try:
            self._body(self._ticks())
        except Exception as error:  # noqa: BLE001 - a sampler must not end what it watches; the reason is kept
            self.failure = f"the sampler failed: {type(error).__name__}: {error}"

    def _ticks(self) -> Iterator[None]:
        due_s = time.monotonic()
        while not self._stopping.is_set():
            yield
            due_s = max(due_s + self._period_s, time.monotonic())
            self._stopping.wait(due_s - time.monotonic())
        yield
