"""The control groups that bound this process, of version 1, 2 or both, and tolerant readers of kernel files."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Literal

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

    Args:
        controller: as version 1 calls it, such as "cpu" or "memory".
        root: folder that stands for "/".
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
