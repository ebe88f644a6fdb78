"""What the study needs to know of the machine: cores, caches, and memory in large pages."""

from __future__ import annotations

import itertools
import json
import mmap
import os
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil
import torch

from zenflow.host.cores import host_cores

STATE_BYTES, GRADIENT_BYTES, RESULT_BYTES = 12, 2, 2
"""Of an element: fp32 master and two moments; a logged bf16 gradient; the new bf16 weight."""

COLUMN = 4096
"""Elements of a column; sizes are whole columns."""

_SKEW, _SKEWS = 5 * 64, 12
_CACHES = Path("/sys/devices/system/cpu")
_stream = itertools.count()


@dataclass(frozen=True, slots=True)
class Machine:
    """The cores of this process and their caches."""

    cores: tuple[int, ...]
    """One logical CPU for each physical core that this process may use; -1 where the system does not name them."""
    l2_bytes: int
    """Of all these cores together."""
    llc_bytes: int
    """Last-level cache that these cores reach, over all its instances."""
    source: str
    """Where the sizes come from."""

    @property
    def threads(self) -> int:
        """One on each core, for every contender."""
        return len(self.cores)

    def elements(self, llc_share: float) -> int:
        """Elements whose master, moments and one logged gradient take this share of the last-level cache."""
        return int(llc_share * self.llc_bytes) // (STATE_BYTES + GRADIENT_BYTES) // COLUMN * COLUMN

    @classmethod
    def here(cls) -> Machine:
        """This machine.

        Raises:
            OSError: neither sysfs nor lscpu tells the size of the caches.
        """
        cores = host_cores(reserved_share=0).cpus
        levels, source = _from_sysfs(cores), "sysfs"
        if not levels:
            levels, source = _from_lscpu(), "lscpu"
        if not levels:
            raise OSError("the size of the last-level cache is neither in sysfs nor known to lscpu")
        return cls(cores, levels.get(2, levels[max(levels)]), levels[max(levels)], source)


def tensor(elements: int, dtype: torch.dtype) -> torch.Tensor:
    """Resident zeros in large pages where the system has them; every stream at another offset within its page.

    With equal offsets, a load may wait for a store to another stream whose address ends alike.
    """
    skew = next(_stream) % _SKEWS * _SKEW
    memory = mmap.mmap(-1, elements * dtype.itemsize + skew)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=dtype, count=elements, offset=skew).zero_()


class Others:
    """How much of this machine's processors other processes take from now on."""

    def __init__(self) -> None:
        self._begin = self._now()

    def share(self) -> float:
        """Busy time since then that was not this process's, as a share of all processors' time."""
        total, busy, own = (now - begin for now, begin in zip(self._now(), self._begin, strict=True))
        return max(0.0, busy - own) / total if total > 0 else 0.0

    @staticmethod
    def _now() -> tuple[float, float, float]:
        times, own = psutil.cpu_times(), os.times()
        total = sum(times) - getattr(times, "guest", 0.0) - getattr(times, "guest_nice", 0.0)  # in user and nice, too
        return total, total - times.idle - getattr(times, "iowait", 0.0), own.user + own.system


def huge_pages() -> str:
    """The system's policy: always, madvise or never."""
    try:
        policy = Path("/sys/kernel/mm/transparent_hugepage/enabled").read_text(encoding="ascii")
    except OSError:
        return "unknown"
    return policy.partition("[")[2].partition("]")[0] or "unknown"


def _from_sysfs(cores: Sequence[int]) -> dict[int, int]:
    """Bytes of each level of data cache, over the instances that these cores reach."""
    seen: dict[int, dict[str, int]] = {}
    for core in cores:
        for folder in _CACHES.glob(f"cpu{core}/cache/index*"):
            try:
                level, kind, size, shared = (
                    (folder / name).read_text(encoding="ascii").strip()
                    for name in ("level", "type", "size", "shared_cpu_list")
                )
                if kind != "Instruction":
                    seen.setdefault(int(level), {})[shared] = int(size.removesuffix("K")) << 10
            except (OSError, ValueError):
                continue
    return {level: sum(instances.values()) for level, instances in seen.items()}


def _from_lscpu() -> dict[int, int]:
    command = ["lscpu", "--bytes", "--json", "--caches=LEVEL,TYPE,ALL-SIZE"]
    try:
        said = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout
        caches = json.loads(said)["caches"]
        return {int(c["level"]): int(c["all-size"]) for c in caches if c["type"] != "Instruction"}
    except (OSError, subprocess.SubprocessError, ValueError, KeyError):
        return {}
