"""Cores, CPU quota, NUMA nodes, memory, how much of it may be pinned, and the bandwidth of host and link."""

from __future__ import annotations

import math
import os
import resource
import statistics
from collections.abc import Iterator
from pathlib import Path

from zftune.doctor.check import Check
from zftune.telemetry.host_sampler import cpu_folders, cpu_quota, numa_node_count, throttling

_LINK_BYTES = 1 << 28
_REPEATS = 5
_MEMORY_SHARE = 8  # the probe takes at most one part in so many of what is free
_STEP_BYTES = 34  # of an update with 4 logged gradients

# 10^9 bytes/s a lane, as large copies get at best: packets' headers taken off.
_LANE_GBPS = {3: 0.82, 4: 1.64, 5: 3.45, 6: 7.0}
_SLOW = 0.6


def bandwidth_checks(has_cuda: bool, pcie: tuple[int, int] | None) -> Iterator[Check]:
    """The host's memory, and the link where there is a GPU.

    Args:
        pcie: generation and width that the GPU can do; None where unknown.
    """
    yield _host()
    if has_cuda:
        yield link_check(*_link_gbps(), pcie)


def _host() -> Check:
    from zenflow import HostEngineError
    from zenflow.host.limits import available_host_bytes
    from zftune.telemetry.bandwidth import DEFAULT_ELEMENTS, host_bandwidth

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
        finding=(
            f"{found.gbps:.1f} GB/s with {threads} in a usual pass over an update's data, {found.gbps_max:.1f} in the "
            f"fastest (a profile's ceiling): a billion parameters take {seconds:.1f} s or more."
        ),
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


_GB = 1e9
_PINNED_BYTES_PER_ELEMENT = 8  # the log: 4 gradients of 2 bytes
_THROTTLED = 0.01
_MANY_PERIODS = 100


def host_checks() -> Iterator[Check]:
    """Everything about the host but its bandwidth."""
    root = Path("/")
    allowed = sorted(os.sched_getaffinity(0))
    yield cores_check(allowed, cpu_quota(root))
    yield from throttled(root)
    yield numa_check(allowed, root)
    yield memory_check()
    yield pinned_check(resource.getrlimit(resource.RLIMIT_MEMLOCK)[0])


def cores_check(allowed: list[int], quota: float | None) -> Check:
    """Which cores the host engine gets.

    Args:
        quota: cores that the control groups grant; None: no limit.
    """
    from zenflow import ZenFlowConfig
    from zenflow.host.cores import host_cores

    name = "cores"
    share = ZenFlowConfig().pt_reserved_cores_perc
    chosen = host_cores(reserved_share=share, affinity=allowed)
    figures: dict[str, float] = {"allowed_cores": len(allowed), "engine_threads": len(chosen.cpus)}
    if quota is not None:
        figures["quota_cores"] = quota
    if quota is not None and quota < len(allowed):
        whole = max(1, math.floor(quota))
        return Check(
            name=name,
            status="note",
            finding=f"A quota of {quota:g} cores lies below the {len(allowed)} that the affinity allows: what takes"
            " the affinity for cores starts too many threads, and is stopped in bursts.",
            fix=f"Raise the limit (docker --cpus, Kubernetes limits.cpu), or start under taskset -c"
            f" {_cpu_list(allowed[:whole])} with OMP_NUM_THREADS={whole}.",
            figures=figures,
        )
    if len(allowed) < 2:
        return Check(
            name=name,
            status="note",
            finding="One core for PyTorch and the host engine: they take turns, so nothing overlaps.",
            fix="Give the process more cores (taskset, docker --cpuset-cpus, Slurm --cpus-per-task).",
            figures=figures,
        )
    return Check(name=name, status="ok", finding=f"The host engine gets {chosen.summary}.", figures=figures)


def throttled(root: Path) -> Iterator[Check]:
    """A check if the quota has stopped this process's group before."""
    counts = throttling(cpu_folders(root)).values()
    share = max((count.throttled / count.periods for count in counts if count.periods >= _MANY_PERIODS), default=0.0)
    if share > _THROTTLED:
        yield Check(
            name="throttling",
            status="note",
            finding=f"The control group was stopped in {share:.0%} of its periods so far: its quota is too small.",
            fix="Raise the CPU limit of the container or the job.",
            figures={"throttled_fraction": share},
        )


def numa_check(allowed: list[int], root: Path) -> Check:
    """Whether memory may lie on another node than the cores that use it."""
    name = "NUMA"
    nodes = numa_node_count(root)
    if nodes is None:
        return Check(name=name, status="note", finding="The kernel does not tell about NUMA nodes.")
    if nodes == 1:
        return Check(name=name, status="ok", finding="One node: all memory is near.", figures={"nodes": 1})
    used = _nodes_of(allowed, root)
    figures = {"nodes": nodes, "nodes_allowed": len(used)}
    if len(used) == 1:
        finding = f"The cores are all on node {used[0]} of {nodes}."
        return Check(name=name, status="ok", finding=finding, figures=figures)
    return Check(
        name=name,
        status="note",
        finding=f"The cores are on {len(used)} nodes: optimizer state on the far one is updated more slowly.",
        fix="Bind each rank to its GPU's node: torchrun --numa-binding=node, deepspeed --bind_cores_to_rank, or"
        " numactl --cpunodebind=N --membind=N.",
        figures=figures,
    )


def memory_check() -> Check:
    """How much memory the host state may take."""
    import psutil

    from zenflow.host.limits import available_host_bytes

    total = psutil.virtual_memory().total
    available = available_host_bytes()
    free = total if available is None else min(total, available)
    elements = free / (14 + _PINNED_BYTES_PER_ELEMENT)
    return Check(
        name="memory",
        status="ok",
        finding=f"{free / _GB:.1f} of {total / _GB:.1f} GB are free: enough for {elements / _GB:.1f} billion offloaded"
        " parameters (22 bytes each with windows of 4 steps).",
        figures={"available_bytes": free, "total_bytes": total},
    )


def pinned_check(limit_bytes: int) -> Check:
    """The limit for locked memory.

    Args:
        limit_bytes: as `ulimit -l`; `resource.RLIM_INFINITY` for none.
    """
    name = "pinned memory"
    if limit_bytes == resource.RLIM_INFINITY:
        return Check(name=name, status="ok", finding="No limit (ulimit -l).")
    return Check(
        name=name,
        status="note",
        finding=f"{_size(limit_bytes)} may be locked (ulimit -l). The host's log is pinned, 8 GB for a billion"
        " parameters: CUDA's own pinning does not count against the limit, InfiniBand and NVMe offloading do.",
        fix="ulimit -l unlimited; in a container --ulimit memlock=-1; for all users in /etc/security/limits.conf.",
        figures={"limit_bytes": limit_bytes},
    )


def _nodes_of(cpus: list[int], root: Path) -> list[int]:
    folder = root / "sys/devices/system/cpu"
    return sorted({int(link.name[4:]) for cpu in cpus for link in (folder / f"cpu{cpu}").glob("node[0-9]*")})


def _cpu_list(cpus: list[int]) -> str:
    from zenflow.host.cores import format_cpulist

    return format_cpulist(cpus)


def _size(nbytes: int) -> str:
    return f"{nbytes / (1 << 20):g} MiB" if nbytes >= 1 << 20 else f"{nbytes / 1024:g} KiB"
