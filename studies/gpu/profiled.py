"""What torch's profiler saw the GPU do in a few steps, beside what the runtime says of its stall."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from gpu.bench import Bench

Span = tuple[float, float]
"""Begin and end, in microseconds."""


def profiled(bench: Bench, step: Callable[[], Any], count: int) -> dict[str, Any]:
    """Take some steps under the profiler; its figures, a step.

    Args:
        bench: where.
        step: takes one.
        count: how many.
    """
    counted = bench.counted_launches()
    if counted is not None:  # of the simulated device, which no profiler sees
        before = counted()
        for _ in range(count):
            step()
        bench.synchronize()
        return {"launches": (counted() - before) / count}
    bench.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(count):
            step()
        bench.synchronize()
    on_gpu = [event for event in profile.events() or () if _is_device_work(event)]
    spans = [(str(event.name), (float(event.time_range.start), float(event.time_range.end))) for event in on_gpu]
    return account(spans, count)


def _is_device_work(event: Any) -> bool:
    return event.device_type == torch.autograd.DeviceType.CUDA and not getattr(event, "is_user_annotation", False)


def account(spans: Sequence[tuple[str, Span]], steps: int) -> dict[str, Any]:
    """Idle time and overlap of what a GPU did.

    Args:
        spans: name, and when it ran, of every kernel and copy.
        steps: how many that was.

    Returns:
        "launches" a step, "idle" (the share of the time in which no kernel ran), and for "d2h" and "h2d" the ms a step
        and the "overlap" (the share of them beside kernels; None without any).
    """
    copies: dict[str, list[Span]] = {"d2h": [], "h2d": []}
    kernels: list[Span] = []
    for name, span in spans:
        direction = "d2h" if "DtoH" in name else "h2d" if "HtoD" in name else None
        if direction is not None:
            copies[direction].append(span)
        elif not name.startswith(("Memcpy", "Memset")):  # which run beside kernels
            kernels.append(span)
    busy = union(kernels)
    lasted = busy[-1][1] - busy[0][0] if busy else 0.0
    found: dict[str, Any] = {
        "launches": len(kernels) / steps,
        "idle": 1 - length(busy) / lasted if lasted else None,
    }
    for direction, each in copies.items():
        there = union(each)
        total = length(there)
        found[direction] = {
            "ms": total / 1e3 / steps,
            "overlap": common(there, busy) / total if total else None,
        }
    return found


def union(spans: Iterable[Span]) -> list[Span]:
    """The same time in spans that do not meet, in order."""
    found: list[Span] = []
    for begin, end in sorted(spans):
        if found and begin <= found[-1][1]:
            found[-1] = (found[-1][0], max(found[-1][1], end))
        else:
            found.append((begin, end))
    return found


def length(spans: Iterable[Span]) -> float:
    """Of spans that do not meet."""
    return sum(end - begin for begin, end in spans)


def common(ours: Sequence[Span], theirs: Sequence[Span]) -> float:
    """Time that is in both of two unions."""
    total, other = 0.0, 0
    for begin, end in ours:
        while other < len(theirs) and theirs[other][1] <= begin:
            other += 1
        at = other
        while at < len(theirs) and theirs[at][0] < end:
            total += min(end, theirs[at][1]) - max(begin, theirs[at][0])
            at += 1
    return total
