"""Fake machines: the kernel's files, in its own formats, in a folder that stands for "/"."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from zenflow.host.cores import format_cpulist

NO_LIMIT_V1 = "9223372036854771712"
PROC_MOUNT = "22 27 0:21 / /proc rw,relatime - proc proc rw"


class Machine:
    """Writes what a test wants to be there; everything else is missing."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._groups: list[str] = []
        self._mounts: list[str] = [PROC_MOUNT]

    def write(self, path: str, text: str | bytes) -> None:
        target = self.root / path.lstrip("/")
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(text.encode() if isinstance(text, str) else text)

    def files(self, folder: str, files: dict[str, str]) -> None:
        for name, text in files.items():
            self.write(f"{folder}/{name}", text + "\n")

    def cores(self, cores: Iterable[Sequence[int]], *, file: str = "thread_siblings_list") -> None:
        """The logical CPUs of each physical core."""
        everything: list[int] = []
        for siblings in cores:
            everything += siblings
            for cpu in siblings:
                self.files(f"sys/devices/system/cpu/cpu{cpu}/topology", {file: format_cpulist(siblings)})
        self.files("sys/devices/system/cpu", {"online": format_cpulist(everything)})

    def nodes(self, *cpulists: str) -> None:
        for node, cpulist in enumerate(cpulists):
            self.files(f"sys/devices/system/node/node{node}", {"cpulist": cpulist})

    def group(self, controllers: str, path: str) -> None:
        """A line of /proc/self/cgroup; no controllers means version 2."""
        number = 0 if not controllers else 1 + len(self._groups)
        self._groups.append(f"{number}:{controllers}:{path}")
        self.write("proc/self/cgroup", "\n".join(self._groups) + "\n")

    def mount(self, folder: str, *, controllers: str = "", root: str = "/", tags: str = "shared:9 ") -> None:
        """A line of /proc/self/mountinfo; no controllers means version 2."""
        kind = f"cgroup cgroup rw,{controllers}" if controllers else "cgroup2 cgroup2 rw,nsdelegate"
        self._mounts.append(f"{30 + len(self._mounts)} 25 0:28 {root} {folder} rw,nosuid,relatime {tags}- {kind}")
        self.write("proc/self/mountinfo", "\n".join(self._mounts) + "\n")
