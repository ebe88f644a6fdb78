"""`host_bandwidth`: how fast this machine's memory can carry the host update."""

from __future__ import annotations

import statistics
import sys
from dataclasses import dataclass

from zenflow.errors import ConfigError, HostEngineError
from zenflow.host.cores import host_cores
from zenflow.host.native import load_native

DEFAULT_ELEMENTS = 1 << 25
"""With 4 gradients of 2 bytes: 0.7 GB, well above any last-level cache that a core sees."""

# Bytes of an element: what a pass moves, and what it keeps in memory.
_STATE_TRAFFIC = 24  # master and two moments in fp32, read and written
_STATE_MEMORY = 12
_RESULT = 2  # the new weight, written


@dataclass(frozen=True, kw_only=True)
class HostBandwidth:
    """Memory bandwidth on the streams of one host update; the ceiling for the host engine, in the same units."""

    gbps: float
    """Median over the passes, 10^9 bytes/s."""
    gbps_min: float
    """Slowest pass, 10^9 bytes/s."""
    gbps_max: float
    """Fastest pass, 10^9 bytes/s."""
    threads: int
    """Threads that shared the work."""
    bytes_per_element: int
    """Bytes read and written per element: 24 of state, S gradients, 2 of result."""
    elements: int
    """Elements per pass."""


def host_bandwidth(
    *,
    elements: int = DEFAULT_ELEMENTS,
    update_interval: int = 4,
    gradient_bytes: int = 2,
    threads: int | None = None,
    repeats: int = 7,
) -> HostBandwidth:
    """Measure a pass that reads and writes what the host update of a window does, without its arithmetic.

    Reads master, two moments (fp32) and `update_interval` logged gradients per element; writes master, moments and a
    2-byte result. Each thread works in memory that it touched first. The GIL is released; the call takes a second or
    less and needs `elements * (14 + update_interval * gradient_bytes)` bytes.

    Args:
        elements: Deferred elements per pass. Few of them fit into the caches, and the figure is then theirs.
        update_interval: S, logged gradients per element.
        gradient_bytes: Size of a logged gradient, 2 or 4 bytes.
        threads: None means one on each physical core that affinity and CPU quota leave to this process.
        repeats: Timed passes, after one that warms up.

    Raises:
        ConfigError: an argument is not allowed.
        MemoryError: the machine does not give that much memory; the message names the bytes.
        HostEngineError: the native module is missing, or the threads could not be started.
    """
    _check_range("elements", elements, sys.maxsize)
    _check_range("update_interval", update_interval, sys.maxsize)
    _check_range("repeats", repeats, 1_000_000)
    if isinstance(gradient_bytes, bool) or gradient_bytes not in (2, 4):
        raise ConfigError.of("gradient_bytes", gradient_bytes, "2 or 4")

    cpus = list(host_cores(reserved_share=0.0, threads=threads).cpus)
    seconds, _ = _run(elements, update_interval, gradient_bytes, repeats, cpus)
    bytes_per_element = _STATE_TRAFFIC + update_interval * gradient_bytes + _RESULT
    gbps = [bytes_per_element * elements / s / 1e9 for s in seconds]
    return HostBandwidth(
        gbps=statistics.median(gbps),
        gbps_min=min(gbps),
        gbps_max=max(gbps),
        threads=len(cpus),
        bytes_per_element=bytes_per_element,
        elements=elements,
    )


def _run(
    elements: int, update_interval: int, gradient_bytes: int, repeats: int, cpus: list[int]
) -> tuple[list[float], int]:
    """Seconds of each timed pass, and the checksum of the memory after the last."""
    native = load_native()
    memory = elements * (_STATE_MEMORY + _RESULT + update_interval * gradient_bytes)
    try:
        if memory > sys.maxsize:
            raise MemoryError
        found: tuple[list[float], int] = native.bandwidth(
            elements=elements,
            update_interval=update_interval,
            gradient_bytes=gradient_bytes,
            repeats=repeats,
            cpus=cpus,
        )
        return found
    except MemoryError:
        raise MemoryError(f"host_bandwidth could not get {memory} bytes of host memory; lower elements") from None
    except RuntimeError as error:
        raise HostEngineError(f"host_bandwidth could not run {len(cpus)} threads: {error}") from error


def _check_range(name: str, value: object, most: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= most:
        raise ConfigError.of(name, value, f"an integer from 1 to {most}")
