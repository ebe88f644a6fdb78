"""How much host memory this process and the ranks beside it may still allocate, and refusals."""

from __future__ import annotations

import re
import socket
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Literal, NamedTuple

from zenflow.errors import HostMemoryError

Version = Literal[1, 2]


@dataclass(frozen=True)
class Cgroup:
    """A control group that holds this process, or one that encloses such a group."""

    folder: Path
    """Where its files are. It may not exist: every file of it then reads as unknown."""
    version: Version


def cgroups(controller: str, root: Path = Path("/")) -> tuple[Cgroup, ...]:
    """The groups that may limit this process by `controller`, each before those that enclose it.

    Where a container sees a path of its host's, which leads nowhere under its own mount, the mount itself remains.
    """
    paths = _paths(controller, root)
    mounts = list(_mounts(controller, root)) or [
        _Mount(2, PurePosixPath("/"), root / "sys/fs/cgroup"),
        _Mount(1, PurePosixPath("/"), root / "sys/fs/cgroup" / controller),
    ]
    found: dict[Cgroup, None] = {}
    versions: tuple[Version, ...] = (2, 1)
    for version in versions:
        path = paths.get(version, PurePosixPath("/"))
        of_version = [mount for mount in mounts if mount.version == version]
        # A mount that does not hold the path may belong to another group altogether: only where there is no better.
        for mount in [mount for mount in of_version if mount.holds(path)] or of_version[:1]:
            inside = path.relative_to(mount.root).parts if mount.holds(path) else ()
            for depth in range(len(inside), -1, -1):
                found[Cgroup(mount.folder.joinpath(*inside[:depth]), version)] = None
    return tuple(found)


def read_text(path: Path) -> str | None:
    """A kernel file, or None where it cannot be read."""
    try:
        return path.read_text(encoding="utf-8", errors="surrogateescape")
    except (OSError, ValueError):  # ValueError: a path with a NUL
        return None


def read_int(path: Path) -> int | None:
    """A file that holds one number, or None where it cannot be read or holds something else."""
    return as_int(read_text(path) or "")


def as_int(text: str) -> int | None:
    """A number as the kernel prints it (64 bits, signed or not), or None."""
    found = re.fullmatch(r"\s*(-?[0-9]{1,20})\s*", text)
    return int(found[1]) if found else None


@dataclass(frozen=True)
class _Mount:
    version: Version
    root: PurePosixPath  # the group that is mounted
    folder: Path

    def holds(self, path: PurePosixPath) -> bool:
        # ".." leads out of the cgroup namespace, where no names are known.
        return ".." not in (*path.parts, *self.root.parts) and path.is_relative_to(self.root)


def _paths(controller: str, root: Path) -> dict[Version, PurePosixPath]:
    """This process's group in each version's hierarchy, from lines such as "4:cpu,cpuacct:/a/b" and "0::/a/b"."""
    paths: dict[Version, PurePosixPath] = {}
    for line in (read_text(root / "proc/self/cgroup") or "").split("\n"):
        number, _, rest = line.partition(":")
        controllers, colon, path = rest.partition(":")
        if not colon or not path.startswith("/"):
            continue
        if controller in controllers.split(","):
            paths[1] = _absolute(path)
        elif number == "0" and not controllers:
            paths[2] = _absolute(path)
    return paths


def _mounts(controller: str, root: Path) -> Iterator[_Mount]:
    """The mounts that show `controller`, from lines such as "32 31 0:29 /group /folder rw - cgroup source rw,cpu"."""
    for line in (read_text(root / "proc/self/mountinfo") or "").split("\n"):
        mount, _, source = line.partition(" - ")
        fields, types = mount.split(" "), source.split(" ")
        if len(fields) < 6 or not (fields[3].startswith("/") and fields[4].startswith("/")):
            continue
        folder = root / _unescaped(fields[4]).lstrip("/")
        if types[0] == "cgroup2":
            yield _Mount(2, _absolute(_unescaped(fields[3])), folder)
        elif types[0] == "cgroup" and controller in types[-1].split(","):
            yield _Mount(1, _absolute(_unescaped(fields[3])), folder)


def _absolute(path: str) -> PurePosixPath:
    return PurePosixPath("/", path.lstrip("/"))


def _unescaped(text: str) -> str:
    return re.sub(r"\\([0-7]{3})", lambda found: chr(int(found[1], 8)), text)


_NO_LIMIT_BYTES = 1 << 60  # version 1 writes "no limit" as 2^63, rounded down to a page

# The files of a control group by version: limit, use, and in memory.stat the page cache that is given back first.
_MEMORY_FILES = {
    1: ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    2: ("memory.max", "memory.current", "inactive_file"),
}
_RESOURCE_LIMITS = (("Max address space", "VmSize"), ("Max data size", "VmData"))


class Bound(NamedTuple):
    """What is left of one resource."""

    nbytes: int
    source: str  # where the figure comes from
    shared: bool
    """Whether ranks on the same node that name the same source take from the same bytes."""


@dataclass(frozen=True, slots=True)
class Claim:
    """What one rank is about to allocate, and what bounds it."""

    needs: tuple[int, ...]
    """Bytes: the one that it would like best, and what it could do with instead."""
    node: tuple[str, str]
    """Its machine's name, and something that another machine of the same name does not have."""
    bounds: tuple[Bound, ...]

    @classmethod
    def of(cls, needs: Sequence[int], root: Path = Path("/")) -> Claim:
        boot = read_text(root / "proc/sys/kernel/random/boot_id") or ""
        return cls(tuple(needs), (socket.gethostname(), boot.strip()), tuple(_bounds(root)))


def available_host_bytes(root: Path = Path("/")) -> int | None:
    """Bytes that this process may still allocate, or None where nothing is known.

    The least of what the machine has available, what each control group around the process leaves (page cache that it
    would give back counts as free) and what the process's own resource limits leave.
    """
    return min((bound.nbytes for bound in _bounds(root)), default=None)


def first_fitting(claims: Sequence[Claim], what: str, advice: str) -> int:
    """The first of the needs that fits on all ranks; where nothing is known about the memory, everything fits.

    `claims` are of all ranks, which have as many needs each: from the same ones every rank draws the same conclusion.
    `what` is the subject of the refusal's sentence, `advice` its end.

    Raises HostMemoryError if none fits, naming what the last needs, what is available, what bounds it, and the advice.
    """
    refusals = [_refusal(claims, number, what) for number in range(len(claims[0].needs))]
    if None in refusals:
        return refusals.index(None)
    raise HostMemoryError(f"{refusals[-1]}; {advice}")


def _refusal(claims: Sequence[Claim], number: int, what: str) -> str | None:
    """Why a need does not fit, by what has least left for a rank; None where it fits."""
    resources: defaultdict[tuple[object, ...], list[tuple[int, Bound]]] = defaultdict(list)
    for rank, claim in enumerate(claims):
        for bound in claim.bounds:
            key = (*claim.node, bound.source, None if bound.shared else rank)
            resources[key].append((claim.needs[number], bound))
    scarce: list[tuple[int, str]] = []
    for (name, *_), sharers in resources.items():
        total, ranks = sum(needed for needed, _ in sharers), len(sharers)
        available, source, _ = min(bound for _, bound in sharers)
        if total <= available:
            continue
        sentence = f"{what} needs {total} bytes of host memory, available are {available} ({source})"
        if ranks > 1:
            most = max(needed for needed, _ in sharers)
            sentence = (
                f"{what} needs {total} bytes of host memory on {name}, up to {most} for each of its {ranks} ranks, "
                f"available are {available} ({source}), {available // ranks} for each"
            )
        scarce.append((available // ranks, sentence))
    return min(scarce)[1] if scarce else None


def _bounds(root: Path) -> Iterator[Bound]:
    free = _kib(root / "proc/meminfo", "MemAvailable")
    if free is not None:
        yield Bound(free, "MemAvailable of the machine", shared=True)
    for group in cgroups("memory", root):
        yield from _group_bound(group)
    for limit, use in _RESOURCE_LIMITS:
        allowed = _resource_limit(limit, root)
        if allowed is not None:
            left = max(0, allowed - (_kib(root / "proc/self/status", use) or 0))
            yield Bound(left, f'"{limit}" of the process', shared=False)


def _group_bound(group: Cgroup) -> Iterator[Bound]:
    limit_file, use_file, cache = _MEMORY_FILES[group.version]
    limit = read_int(group.folder / limit_file)
    if limit is None or not 0 <= limit < _NO_LIMIT_BYTES:
        return
    # Unknown use counts as none: what is left is at most the limit.
    in_use = (read_int(group.folder / use_file) or 0) - (_statistic(group.folder / "memory.stat", cache) or 0)
    yield Bound(max(0, limit - max(0, in_use)), f"{limit_file} of the control group {group.folder}", shared=True)


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
