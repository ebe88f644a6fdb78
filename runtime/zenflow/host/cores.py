"""`host_cores`: on which cores the host engine's threads run."""

from __future__ import annotations

import math
import os
import re
import socket
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

from zenflow.errors import ConfigError
from zenflow.host.limits import Cgroup, as_int, cgroups, read_int, read_text

MAX_THREADS = 4096
_MAX_CPU = 1 << 16  # above any kernel's; a list with a larger number is garbage
_DEVICE = re.compile(r"(?:([0-9a-f]{1,8}):)?([0-9a-f]{1,2}):([0-9a-f]{1,2})\.([0-7])", re.IGNORECASE)


@dataclass(frozen=True, kw_only=True)
class HostCores:
    """The threads of the host engine, and what bounded their number."""

    cpus: tuple[int, ...]
    """One entry a thread: the logical CPU that it stays on, or -1 = left to the scheduler (then all are -1)."""
    online_cpus: int | None
    """Logical CPUs of the machine; None where unknown."""
    allowed_cpus: int
    """Those that the affinity allows; the machine's where it is not known."""
    numa_node: int | None
    """The node whose CPUs alone are taken; None where all are."""
    near_cpus: int
    """Allowed CPUs on that node."""
    physical_cores: int
    """Cores that these are, SMT siblings counted once."""
    quota: float | None
    """CPU seconds a second that the control groups grant; None where no limit is known."""
    usable_cores: int
    """Cores that the quota leaves."""
    reserved_cores: int
    """Those of them that stay PyTorch's."""
    threads_set: bool
    """Whether the number of threads was given, and not taken from the cores."""

    @property
    def summary(self) -> str:
        """One line for a report: how many threads, where, and each step that lowered their number."""
        threads = _count(len(self.cpus), "thread")
        place = "not pinned" if -1 in self.cpus else f"on CPU {format_cpulist(self.cpus)}"
        allowed = _count(self.allowed_cpus, "CPU")
        if self.online_cpus not in (None, self.allowed_cpus):
            allowed = f"{self.allowed_cpus} of {self.online_cpus} CPUs"
        steps = [f"{allowed} allowed"]
        if self.threads_set:
            return f"{threads} as set, {place} ({steps[0]})"
        if self.near_cpus < self.allowed_cpus:
            steps.append(f"{self.near_cpus} on NUMA node {self.numa_node}")
        if self.physical_cores < self.near_cpus:
            steps.append(f"{self.physical_cores} without SMT siblings")
        if self.usable_cores < self.physical_cores:
            steps.append(f"{self.usable_cores} by the CPU quota of {self.quota:g}")
        if self.reserved_cores:
            steps.append(f"{self.reserved_cores} left to PyTorch")
        return f"{threads}, {place} ({', '.join(steps)})"


def host_cores(
    *,
    reserved_share: float,
    numa_node: int | None = None,
    threads: int | None = None,
    root: Path = Path("/"),
    affinity: Collection[int] | None = None,
) -> HostCores:
    """Decide on which cores the host engine's threads run.

    In this order: the CPUs that the affinity allows; of these the GPU's NUMA node; one logical CPU a physical core; as
    many as the CPU quota pays for, not pinned then; without the first `ceil(reserved_share * n)`, but at least one.

    `threads` is their number, whatever the cores: spread over the engine's cores if these suffice, else over the
    node's, over all allowed cores, over their SMT siblings too, else left to the scheduler. `numa_node` is the GPU's;
    None, -1 or one without an allowed CPU means all nodes. `affinity`: logical CPUs to take from; None means the
    calling thread's.

    Raises ConfigError if an argument is not allowed.
    """
    _check(reserved_share, threads, affinity)
    # Without affinity there are no numbers: a -1 is on no node and has no siblings, and passes the steps as a core.
    allowed = allowed_cpus() if affinity is None else tuple(sorted(set(affinity)))
    on_node = _on_node(allowed, numa_node, root)
    near = on_node or allowed
    physical = one_a_core(near, root)
    quota = cpu_quota(root)
    usable = physical
    if quota is not None:
        usable = _spread(physical, min(len(physical), max(1, math.floor(quota))))
    # In exact arithmetic: 0.1 of 30 is 3, not a bit more.
    reserved = min(math.ceil(Fraction(str(reserved_share)) * len(usable)), len(usable) - 1)
    own = usable[reserved:]
    # Under a quota, others are likely to share these cores under quotas of their own, and would pick the same ones.
    cpus = own if len(usable) == len(physical) else (-1,) * len(own)
    if threads is not None:
        pools = (own, physical, one_a_core(allowed, root), allowed)
        cpus = next((_spread(pool, threads) for pool in pools if len(pool) >= threads), (-1,) * threads)
    online = parse_cpulist(read_text(root / "sys/devices/system/cpu/online") or "")
    return HostCores(
        cpus=cpus,
        online_cpus=len(online) if online else None,
        allowed_cpus=len(allowed),
        numa_node=numa_node if on_node else None,
        near_cpus=len(near),
        physical_cores=len(physical),
        quota=quota,
        usable_cores=len(usable),
        reserved_cores=reserved,
        threads_set=threads is not None,
    )


def gpu_numa_node(pci_address: str, root: Path = Path("/")) -> int | None:
    """The NUMA node that a GPU is attached to, or None where the kernel does not say.

    `pci_address` is such as "0000:3b:00.0", in either case and with any width of the domain, which may be missing.
    """
    found = _DEVICE.fullmatch(pci_address.strip())
    if found is None:
        return None
    domain, bus, device = (int(part or "0", 16) for part in found.groups()[:3])
    name = f"{domain:04x}:{bus:02x}:{device:02x}.{found[4]}"
    node = read_int(root / "sys/bus/pci/devices" / name / "numa_node")
    return node if node is not None and node >= 0 else None


def cpu_quota(root: Path = Path("/")) -> float | None:
    """CPU seconds a second that the least of the control groups around this process grants; None: not known."""
    return min((quota for group in cgroups("cpu", root) if (quota := _quota_of(group)) is not None), default=None)


def parse_cpulist(text: str) -> frozenset[int] | None:
    """The numbers of a list such as "0-3,8-11" (empty: none), or None where it is not one."""
    cpus: set[int] = set()
    for part in text.strip().split(",") if text.strip() else []:
        found = re.fullmatch(r"([0-9]{1,9})(?:-([0-9]{1,9}))?", part)
        if found is None:
            return None
        first, last = int(found[1]), int(found[2] or found[1])
        if not first <= last <= _MAX_CPU:
            return None
        cpus.update(range(first, last + 1))
    return frozenset(cpus)


def format_cpulist(cpus: Collection[int]) -> str:
    """CPU numbers as the kernel writes them, such as "0-3,8"; each number once, in ascending order."""
    runs: list[list[int]] = []
    for cpu in sorted(set(cpus)):
        if runs and cpu == runs[-1][1] + 1:
            runs[-1][1] = cpu
        else:
            runs.append([cpu, cpu])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)


def allowed_cpus() -> tuple[int, ...]:
    """The logical CPUs that the calling thread may run on, in ascending order; -1 each where there are no numbers."""
    if hasattr(os, "sched_getaffinity"):  # Linux
        return tuple(sorted(os.sched_getaffinity(0)))
    return (-1,) * (os.cpu_count() or 1)


@dataclass(frozen=True, slots=True)
class CpuClaim:
    """What one of several processes would take its host threads' CPUs from."""

    machine: str
    allowed: tuple[int, ...]
    numa_node: int | None

    @classmethod
    def of_process(cls, numa_node: int | None) -> CpuClaim:
        return cls(socket.gethostname(), allowed_cpus(), numa_node)


def dealt_cpus(claims: Sequence[CpuClaim], number: int, root: Path = Path("/")) -> tuple[int, ...] | None:
    """The CPUs that are left to process `number` of `claims` where others want the same: cores are dealt in turn.

    The cores of a NUMA node are dealt among the processes whose GPU is on it; all cores among all, where somebody's
    node is not known. One CPU a core; None: all that the affinity allows, as nobody else takes them or they are too
    few.
    """
    mine = claims[number]
    near = {claim.numa_node: _on_node(mine.allowed, claim.numa_node, root) for claim in claims}
    rivals = [at for at, one in enumerate(claims) if (one.machine, one.allowed) == (mine.machine, mine.allowed)]
    pool = mine.allowed
    if all(near[claims[at].numa_node] for at in rivals):
        rivals = [at for at in rivals if claims[at].numa_node == mine.numa_node]
        pool = near[mine.numa_node]
    cores = one_a_core(pool, root)
    return None if len(rivals) == 1 or len(cores) < len(rivals) else cores[rivals.index(number) :: len(rivals)]


def _on_node(cpus: tuple[int, ...], node: int | None, root: Path) -> tuple[int, ...]:
    if node is None or node < 0:
        return ()
    listed = parse_cpulist(read_text(root / f"sys/devices/system/node/node{node}/cpulist") or "") or frozenset()
    return tuple(cpu for cpu in cpus if cpu in listed)


def one_a_core(cpus: tuple[int, ...], root: Path = Path("/")) -> tuple[int, ...]:
    """The lowest of `cpus` on each physical core."""
    known = frozenset(cpus)
    return tuple(cpu for cpu in cpus if cpu == min(_siblings(cpu, root) & known))


def _siblings(cpu: int, root: Path) -> frozenset[int]:
    folder = root / f"sys/devices/system/cpu/cpu{cpu}/topology"
    for name in ("thread_siblings_list", "core_cpus_list"):  # the second is the newer name of the first
        listed = parse_cpulist(read_text(folder / name) or "")
        if listed is not None and cpu in listed:
            return listed
    return frozenset({cpu})


def _quota_of(group: Cgroup) -> float | None:
    if group.version == 2:
        quota, _, period = (read_text(group.folder / "cpu.max") or "").partition(" ")
        quota_us, period_us = as_int(quota), as_int(period)  # "max" is no number
    else:
        quota_us = read_int(group.folder / "cpu.cfs_quota_us")  # -1: no limit
        period_us = read_int(group.folder / "cpu.cfs_period_us")
    if quota_us is None or period_us is None or quota_us <= 0 or period_us <= 0:
        return None
    return quota_us / period_us


def _spread(pool: tuple[int, ...], count: int) -> tuple[int, ...]:
    """`count` of the entries, evenly."""
    return tuple(pool[i * len(pool) // count] for i in range(count))


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def _check(reserved_share: Any, threads: Any, affinity: Collection[int] | None) -> None:
    share_ok = isinstance(reserved_share, (int, float)) and not isinstance(reserved_share, bool)
    if not share_ok or not 0 <= reserved_share <= 1:
        raise ConfigError.of("reserved_share", reserved_share, "a number from 0 to 1")
    threads_ok = isinstance(threads, int) and not isinstance(threads, bool)
    if threads is not None and not (threads_ok and 1 <= threads <= MAX_THREADS):
        raise ConfigError.of("threads", threads, f"an integer from 1 to {MAX_THREADS}")
    if affinity is not None and not affinity:
        raise ConfigError(f"affinity is {affinity!r}; it must hold at least one CPU number")
