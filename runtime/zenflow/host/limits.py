"""How much host memory this process may still allocate, and the refusal of what would not fit."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from zenflow.errors import HostMemoryError
from zenflow.host.cgroup import Cgroup, as_int, cgroups, read_int, read_text

_NO_LIMIT_BYTES = 1 << 60  # version 1 writes "no limit" as 2^63, rounded down to a page

# The files of a control group by version: limit, use, and in memory.stat the page cache that is given back first.
_MEMORY_FILES = {
    1: ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    2: ("memory.max", "memory.current", "inactive_file"),
}
_RESOURCE_LIMITS = (("Max address space", "VmSize"), ("Max data size", "VmData"))


def available_host_bytes(root: Path = Path("/")) -> int | None:
    """Bytes that this process may still allocate, or None where nothing is known.

    The least of what the machine has available, what each control group around the process leaves (page cache that it
    would give back counts as free) and what the process's own resource limits leave.

    Args:
        root: folder that stands for "/".
    """
    return min((nbytes for nbytes, _ in _bounds(root)), default=None)


def require_host_bytes(needed_bytes: int, what: str, advice: str, root: Path = Path("/")) -> None:
    """Refuse an allocation that would not fit; where nothing is known about the host's memory, everything fits.

    Args:
        needed_bytes: what is about to be allocated.
        what: who needs it; the subject of the sentence.
        advice: what to lower; ends the sentence.
        root: folder that stands for "/".

    Raises:
        HostMemoryError: less is available; names both figures, what bounds the memory, and the advice.
    """
    available, source = min(_bounds(root), default=(needed_bytes, ""))
    if needed_bytes > available:
        raise HostMemoryError(
            f"{what} needs {needed_bytes} bytes of host memory, available are {available} ({source}); {advice}"
        )


def _bounds(root: Path) -> Iterator[tuple[int, str]]:
    """Each known bound in bytes, and where it comes from."""
    free = _kib(root / "proc/meminfo", "MemAvailable")
    if free is not None:
        yield free, "MemAvailable of the machine"
    for group in cgroups("memory", root):
        yield from _group_bound(group)
    for limit, use in _RESOURCE_LIMITS:
        allowed = _resource_limit(limit, root)
        if allowed is not None:
            yield max(0, allowed - (_kib(root / "proc/self/status", use) or 0)), f'"{limit}" of the process'


def _group_bound(group: Cgroup) -> Iterator[tuple[int, str]]:
    limit_file, use_file, cache = _MEMORY_FILES[group.version]
    limit = read_int(group.folder / limit_file)
    if limit is None or not 0 <= limit < _NO_LIMIT_BYTES:
        return
    # Unknown use counts as none: what is left is at most the limit.
    in_use = (read_int(group.folder / use_file) or 0) - (_statistic(group.folder / "memory.stat", cache) or 0)
    yield max(0, limit - max(0, in_use)), f"{limit_file} of the control group {group.folder}"


def _statistic(path: Path, key: str) -> int | None:
    found = re.search(rf"^{key} (\d+)$", read_text(path) or "", re.MULTILINE)
    return as_int(found[1]) if found else None


def _kib(path: Path, key: str) -> int | None:
    """Bytes in a line such as "MemAvailable:   24395808 kB"."""
    found = re.search(rf"^{key}:\s+(\d+) kB$", read_text(path) or "", re.MULTILINE)
    kib = as_int(found[1]) if found else None
    return None if kib is None else kib * 1024


def _resource_limit(name: str, root: Path) -> int | None:
    """Soft limit in bytes from a line such as "Max data size   unlimited   unlimited   bytes"; None: no limit."""
    found = re.search(rf"^{name} +(\d+) ", read_text(root / "proc/self/limits") or "", re.MULTILINE)
    return as_int(found[1]) if found else None
