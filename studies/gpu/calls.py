"""What each call of a hook and a step costs the training thread, weight by weight, and who uses the host's cores."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from gpu.bench import Bench, Size
from gpu.launches import launches_of
from gpu.record import Record

from zenflow.device import Device, HostSpan
from zenflow.kernels import kernels_for
from zenflow.standin import GradientPlaceholder, GradientRecord

_CALLS = 200


def calls(record: Record, bench: Bench, size: Size) -> None:
    """Microseconds of the calling thread, mean of many calls in a row, with a device that has nothing else to do."""
    device, made = bench.device(), kernels_for(bench.torch_device)
    matrix = bench.put(torch.randn(size.hidden, size.hidden).bfloat16())
    parameter = torch.nn.Parameter(matrix.clone())
    energies = made.energies(matrix)
    rows = matrix[: -(-19 * len(matrix) // 20)]
    timed: dict[str, Callable[[], Any]] = {
        "a launch of torch": lambda: energies.add_(1),
        **{name: call for name, (call, _) in launches_of(bench, made, matrix).items()},
        "stand in for a gradient": lambda: GradientPlaceholder(parameter, GradientRecord("weight", energies)),
        "count a write": lambda: torch.autograd.graph.increment_version([parameter]),
        "watch for writes": parameter.detach()._lazy_clone,
        **_of_device(device, rows),
    }
    for name, call in timed.items():
        record.measure(name, lambda call=call: _microseconds(bench, call))


def _of_device(device: Device, rows: torch.Tensor) -> dict[str, Callable[[], Any]]:
    """The copies of a weight, and what they are made of."""
    near = device.host_empty(rows.shape, rows.dtype)
    other = torch.cuda.Stream(device.torch_device)
    mark = device.mark()

    def switch() -> None:
        with torch.cuda.stream(other):
            pass

    return {
        "mark": device.mark,
        "ask whether a mark has passed": lambda: device.passed(mark),
        "ask for the current stream": lambda: torch.cuda.current_stream(device.torch_device),
        "switch to another stream and back": switch,
        "copy to the host": lambda: device.d2h(rows, near),
        "copy from the host": lambda: device.h2d(near, HostSpan(), None),
    }


def _microseconds(bench: Bench, call: Callable[[], Any]) -> float:
    for _ in range(3):
        call()
    bench.synchronize()
    count = 2 if bench.simulated else _CALLS
    began = time.perf_counter()
    for _ in range(count):
        call()
    spent = time.perf_counter() - began
    bench.synchronize()
    return 1e6 * spent / count


class ThreadTimes:
    """Milliseconds of a core, by thread, between `begin` and `figures`; Linux tells them."""

    def __init__(self) -> None:
        self._before: dict[int, float] = {}

    def begin(self) -> None:
        """From now on."""
        self._before = {thread: used for thread, (_, used) in _threads().items()}

    def figures(self, steps: int) -> dict[str, float]:
        """By the thread's name, those of one name together.

        Args:
            steps: that were taken since.
        """
        names = {thread.native_id: thread.name for thread in threading.enumerate()}
        found: dict[str, float] = {}
        for thread, (name, used) in _threads().items():
            known = names.get(thread, name)
            found[known] = found.get(known, 0.0) + (used - self._before.get(thread, 0.0)) / steps
        return dict(sorted(found.items(), key=lambda item: -item[1])[:12])


def _threads() -> dict[int, tuple[str, float]]:
    found = {}
    for folder in Path("/proc/self/task").glob("*"):
        try:
            name, used = (folder / "comm").read_text(), (folder / "schedstat").read_text()
        except OSError:  # it has ended, or this is no Linux
            continue
        found[int(folder.name)] = name.strip(), int(used.split()[0]) / 1e6
    return found
