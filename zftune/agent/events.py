"""Marks on a timeline that can be compared later, without waiting for them. Imports no torch."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from zenflow.device import Device


class EventBackend(Protocol):
    """Where marks come from; called by the training thread only."""

    has_stream: bool
    """Whether marks time a device stream, so that a wait on it is a stall."""
    source: str
    """What a report calls the origin of the times."""

    def mark(self) -> Any:
        """Record the point that the compute stream has been given work up to."""

    def passed(self, mark: Any) -> bool:
        """Whether a mark has been reached; never blocks."""

    def elapsed_ms(self, begin: Any, end: Any) -> float:
        """Milliseconds between two marks that have both been passed; negative if `end` came first."""


class StreamBackend(EventBackend, Protocol):
    """One that knows a compute stream among others."""

    def on_compute_stream(self) -> bool:
        """Whether what is queued now, a mark too, goes to the compute stream."""


class WallClock:
    """No device stream: a mark is the time at which it was made."""

    has_stream = False
    source = "wall clock"

    def __init__(self, clock_ns: Callable[[], int] = time.monotonic_ns) -> None:
        self.mark = clock_ns

    def passed(self, mark: int) -> bool:
        return True

    def elapsed_ms(self, begin: int, end: int) -> float:
        return (end - begin) / 1e6

    def on_compute_stream(self) -> bool:
        return True


class DeviceEvents:
    """Marks of an accelerator: CUDA events, or times of the emulated one.

    Args:
        device: whose stream of this moment is the compute stream.
    """

    has_stream = True
    source = "event"

    def __init__(self, device: Device) -> None:
        self.mark = device.mark
        self.passed = device.passed
        self._elapsed_s = device.elapsed_s
        self._current_stream = device.current_stream
        self._compute_stream = device.current_stream()

    def elapsed_ms(self, begin: Any, end: Any) -> float:
        return 1e3 * self._elapsed_s(begin, end)

    def on_compute_stream(self) -> bool:
        return self._current_stream() == self._compute_stream
