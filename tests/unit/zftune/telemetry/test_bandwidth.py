"""The bandwidth probe: it touches every element in every pass, counts its bytes right and refuses politely."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from zenflow.errors import ConfigError
from zenflow.host.cores import host_cores
from zftune.telemetry import bandwidth
from zftune.telemetry.bandwidth import host_bandwidth

Words = npt.NDArray[np.uint32]


def pattern(elements: int, stream: int) -> Words:
    x = np.arange(elements, dtype=np.uint32) * np.uint32(2654435761)
    x += np.uint32(stream * 2246822519 % 2**32)
    return x ^ (x >> np.uint32(15))


def expected_checksum(elements: int, update_interval: int, gradient_bytes: int, passes: int) -> int:
    """What the memory must hold after `passes` passes, computed with numpy: state [elements], log [S][elements]."""
    master, m, v = (pattern(elements, stream) for stream in range(3))
    logged = np.zeros(elements, dtype=np.uint32)
    for s in range(update_interval):
        gradient = pattern(elements, 3 + s)
        logged ^= gradient & np.uint32(0xFFFF) if gradient_bytes == 2 else gradient
    result = np.zeros(elements, dtype=np.uint32)
    for _ in range(passes):
        word = logged ^ master
        result = (word ^ (word >> np.uint32(16))) & np.uint32(0xFFFF)
        master, m, v = m, v, master
    words = master.astype(np.uint64) + 3 * m.astype(np.uint64) + 5 * v.astype(np.uint64) + 7 * result.astype(np.uint64)
    position = np.arange(1, elements + 1, dtype=np.uint64)
    return int((words * position).sum(dtype=np.uint64))


@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize("gradient_bytes", [2, 4])
@pytest.mark.parametrize("elements", [1, 2, 31, 1023, 1024, 1025, 3 * 1024 + 1, 100_003])
def test_every_element_is_touched_in_every_pass(elements: int, gradient_bytes: int, threads: int) -> None:
    for update_interval, repeats in ((1, 1), (4, 2), (7, 3)):
        seconds, checksum = bandwidth._run(elements, update_interval, gradient_bytes, repeats, [-1] * threads)
        assert len(seconds) == repeats
        assert checksum == expected_checksum(elements, update_interval, gradient_bytes, passes=repeats + 1)


def test_result_counts_bytes_and_threads() -> None:
    result = host_bandwidth(elements=300_001, update_interval=3, gradient_bytes=4, threads=2, repeats=5)
    assert result.bytes_per_element == 24 + 3 * 4 + 2
    assert (result.elements, result.threads) == (300_001, 2)
    assert 0 < result.gbps_min <= result.gbps <= result.gbps_max


def test_one_thread_for_each_core_by_default() -> None:
    assert host_bandwidth(elements=10_000, repeats=1).threads == len(host_cores(reserved_share=0.0).cpus)


@pytest.mark.parametrize("threads", [None, 1, 2, 5])
def test_threads_run_where_the_host_engines_would(monkeypatch: pytest.MonkeyPatch, threads: int | None) -> None:
    placed: list[list[int]] = []

    def run(*arguments: Any) -> tuple[list[float], int]:
        placed.append(arguments[-1])
        return [1.0], 0

    monkeypatch.setattr(bandwidth, "_run", run)
    assert host_bandwidth(threads=threads).threads == len(placed[0])
    assert placed == [list(host_cores(reserved_share=0.0, threads=threads).cpus)]


def test_too_much_memory_is_a_memory_error_with_the_bytes() -> None:
    with pytest.raises(MemoryError, match=str(2**55 * 22)):
        host_bandwidth(elements=2**55)
    with pytest.raises(MemoryError, match="bytes"):
        host_bandwidth(elements=2**62)
    with pytest.raises(MemoryError, match="bytes"):
        host_bandwidth(elements=1, update_interval=2**60)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ({"elements": 0}, "elements is 0; it must be an integer from 1 to"),
        ({"elements": 1.5}, "elements is 1.5; it must be"),
        ({"elements": True}, "elements is True; it must be"),
        ({"update_interval": 0}, "update_interval is 0; it must be"),
        ({"gradient_bytes": 3}, "gradient_bytes is 3; it must be 2 or 4"),
        ({"threads": 0}, "threads is 0; it must be"),
        ({"threads": "all"}, "threads is 'all'; it must be"),
        ({"repeats": -1}, "repeats is -1; it must be"),
    ],
)
def test_bad_arguments_are_one_sentence(arguments: dict[str, object], sentence: str) -> None:
    with pytest.raises(ConfigError) as caught:
        host_bandwidth(**arguments)  # type: ignore[arg-type]
    assert sentence in str(caught.value)
    assert "\n" not in str(caught.value)
