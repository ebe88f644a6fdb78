"""Cores, CPU quota, NUMA nodes, memory and how much of it may be pinned."""

from __future__ import annotations

import math
import os
import resource
from collections.abc import Iterator
from pathlib import Path

from zftune.doctor.check import Check
from zftune.telemetry.host_files import cpu_folders, cpu_quota, numa_node_count, throttling

_GB = 1e9
_PINNED_BYTES_PER_ELEMENT = 8  # the log: 4 gradients of 2 bytes
_THROTTLED = 0.01
_MANY_PERIODS = 100


def checks() -> Iterator[Check]:
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
        allowed: logical CPUs of this process.
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
