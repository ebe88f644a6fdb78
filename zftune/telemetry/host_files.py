"""What the kernel's files say about this machine and this process's control groups (version 1 and 2).

`root` stands for "/" everywhere.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

RESOURCES = ("cpu", "memory", "io")
_LEAST_SHARE = 0.01  # of the pages: a node with fewer holds the odd library page


@dataclass(frozen=True, slots=True)
class Throttling:
    """Counters of a control group's CPU quota."""

    periods: int
    """Periods in which the group wanted to run."""
    throttled: int
    """Those in which it had to stop because its quota was spent."""


def cpu_quota(root: Path = Path("/")) -> float | None:
    """Cores that the control groups of this process allow; None if they set no limit."""
    limits = [quota for folder in cpu_folders(root) if (quota := _quota_of(folder)) is not None]
    return min(limits, default=None)


def cpu_folders(root: Path = Path("/")) -> list[Path]:
    """Folders of this process's CPU control groups, each before those that enclose it: the least quota applies."""
    folders: dict[Path, None] = {}
    for line in read(root / "proc/self/cgroup").splitlines():
        _, _, rest = line.partition(":")
        controllers, _, group = rest.partition(":")
        if controllers and "cpu" not in controllers.split(","):
            continue
        for mount in ("", "unified") if not controllers else (controllers, "cpu"):
            base = root / "sys/fs/cgroup" / mount
            # In a container the group's path may belong to the host: then only the mount point itself exists.
            inside = base / group.lstrip("/")
            folders |= dict.fromkeys(folder for folder in (inside, *inside.parents) if folder.is_relative_to(base))
    return list(folders)


def throttling(folders: list[Path]) -> dict[Path, Throttling]:
    """The counters of every group that has a quota and tells."""
    found = {}
    for folder in folders:
        counts = dict(re.findall(r"^(\w+) (\d+)$", read(folder / "cpu.stat"), re.MULTILINE))
        if "nr_periods" in counts and "nr_throttled" in counts:
            found[folder] = Throttling(int(counts["nr_periods"]), int(counts["nr_throttled"]))
    return found


def pressure_file(resource: str, folders: list[Path], root: Path = Path("/")) -> Path | None:
    """The file of a resource's pressure stall information: of the innermost control group that has one, else of the
    machine; None where the kernel keeps none.
    """
    candidates = [folder / f"{resource}.pressure" for folder in folders] + [root / "proc/pressure" / resource]
    return next((path for path in candidates if pressure_us(path) is not None), None)


def pressure_us(path: Path) -> int | None:
    """Microseconds, since boot, in which some task waited for the resource."""
    found = re.search(r"^some .*\btotal=(\d+)", read(path), re.MULTILINE)
    return int(found[1]) if found else None


def numa_node_count(root: Path = Path("/")) -> int | None:
    """NUMA nodes of the machine; None where the kernel does not tell."""
    return len(list((root / "sys/devices/system/node").glob("node[0-9]*"))) or None


def numa_pages(pid: int, root: Path = Path("/")) -> dict[int, int]:
    """Pages of a process's own memory, files left out, by NUMA node; empty where the kernel does not tell.

    The kernel walks through all of the process's pages for it: not to be asked often.
    """
    pages: dict[int, int] = {}
    for line in read(root / "proc" / str(pid) / "numa_maps").splitlines():
        if " file=" not in line:
            for node, count in re.findall(r" N(\d+)=(\d+)", line):
                pages[int(node)] = pages.get(int(node), 0) + int(count)
    return pages


def nodes_used(pages: dict[int, int]) -> int:
    """Nodes that hold at least a hundredth of the pages."""
    return sum(count >= _LEAST_SHARE * sum(pages.values()) for count in pages.values())


def read(path: Path) -> str:
    """A file's text, "" where it cannot be read."""
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def _quota_of(folder: Path) -> float | None:
    fields = read(folder / "cpu.max").split()
    if len(fields) != 2:
        fields = [read(folder / name).strip() for name in ("cpu.cfs_quota_us", "cpu.cfs_period_us")]
    try:
        quota, period = int(fields[0]), int(fields[1])
    except ValueError:  # "max", or no such file
        return None
    return quota / period if quota > 0 and period > 0 else None
