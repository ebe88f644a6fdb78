"""Bandwidth of the host's memory and of the link to the GPU, measured in about a second."""

from __future__ import annotations

import statistics
from collections.abc import Iterator

from zftune.doctor.check import Check

_LINK_BYTES = 1 << 28
_REPEATS = 5
_MEMORY_SHARE = 8  # the probe takes at most one part in so many of what is free
_STEP_BYTES = 34  # of an update with 4 logged gradients

# 10^9 bytes/s a lane, as large copies get at best: packets' headers taken off.
_LANE_GBPS = {3: 0.82, 4: 1.64, 5: 3.45, 6: 7.0}
_SLOW = 0.6


def checks(has_cuda: bool, pcie: tuple[int, int] | None) -> Iterator[Check]:
    """The host's memory, and the link where there is a GPU.

    Args:
        has_cuda: whether there is a GPU that works.
        pcie: generation and width that the GPU can do; None where unknown.
    """
    yield _host()
    if has_cuda:
        yield link_check(*_link_gbps(), pcie)


def _host() -> Check:
    from zenflow import HostEngineError, host_bandwidth
    from zenflow.bandwidth import DEFAULT_ELEMENTS
    from zenflow.host.limits import available_host_bytes

    name = "host memory"
    free = available_host_bytes()
    elements = DEFAULT_ELEMENTS
    if free is not None:
        elements = max(1 << 20, min(elements, free // (_MEMORY_SHARE * (14 + 8))))
    try:
        found = host_bandwidth(elements=elements, repeats=_REPEATS)
    except (HostEngineError, MemoryError) as error:
        return Check(name=name, status="broken", finding=f"{error}.", fix="Free some memory, or reinstall zftune.")
    seconds = _STEP_BYTES / found.gbps
    threads = f"{found.threads} thread{'s' if found.threads > 1 else ''}"
    return Check(
        name=name,
        status="ok",
        finding=f"{found.gbps:.1f} GB/s with {threads}: updating a billion parameters takes {seconds:.1f} s or more.",
        figures={"gbps": found.gbps, "gbps_min": found.gbps_min, "gbps_max": found.gbps_max, "threads": found.threads},
    )


def _link_gbps() -> tuple[float, float]:
    """Down (D2H) and up (H2D), medians of copies of pinned memory."""
    import torch

    near = torch.empty(_LINK_BYTES, dtype=torch.uint8, pin_memory=True)
    far = torch.empty(_LINK_BYTES, dtype=torch.uint8, device="cuda")
    return _copy_gbps(near, far), _copy_gbps(far, near)


def _copy_gbps(target: object, source: object) -> float:
    import torch

    rates: list[float] = []
    for _ in range(_REPEATS + 1):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        target.copy_(source, non_blocking=True)  # type: ignore[attr-defined]
        end.record()
        end.synchronize()
        rates.append(_LINK_BYTES / begin.elapsed_time(end) / 1e6)
    return statistics.median(rates[1:])  # the first one wakes the link up


def link_check(down_gbps: float, up_gbps: float, pcie: tuple[int, int] | None) -> Check:
    """What to say of the link.

    Args:
        down_gbps: D2H.
        up_gbps: H2D.
        pcie: generation and width that the GPU can do; None where unknown.
    """
    figures = {"d2h_gbps": down_gbps, "h2d_gbps": up_gbps}
    finding = f"{down_gbps:.1f} GB/s down (D2H), {up_gbps:.1f} GB/s up (H2D) from pinned memory"
    expected = _LANE_GBPS.get(pcie[0], 0.0) * pcie[1] if pcie is not None else 0.0
    if pcie is not None and min(down_gbps, up_gbps) < _SLOW * expected:
        return Check(
            name="link",
            status="note",
            finding=f"{finding}; PCIe {pcie[0]} x{pcie[1]}, which the GPU can do, would give {expected:.0f} GB/s.",
            fix="Look at the slot (nvidia-smi -q -d PCIE under load), at NUMA binding, and at other users of the link.",
            figures=figures,
        )
    return Check(name="link", status="ok", finding=f"{finding}.", figures=figures)
