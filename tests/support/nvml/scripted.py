"""A `libnvidia-ml.so.1` of our own, driven by a script: built with the system's compiler, for the real binding."""

from __future__ import annotations

import ctypes
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

SOURCES = Path(__file__).parent
GPU = "GPU-11111111-2222-3333-4444-555555555555"
SECOND_GPU = "GPU-11aaaaaa-bbbb-cccc-dddd-eeeeeeeeeeee"
MIG = "MIG-aaaaaaaa-0000-0000-0000-000000000001"
SECOND_MIG = "MIG-bbbbbbbb-0000-0000-0000-000000000002"

NOT_SUPPORTED, NO_PERMISSION, LOST = 3, 4, 15

AMPERE = (f"gpu NVIDIA_A100-SXM4-80GB {GPU}", "capability 8 0", "memory_gib 80", "max_link 4 16", "max_clock 1410")
HOPPER = (f"gpu NVIDIA_H200 {GPU}", "capability 9 0", "memory_gib 141", "gpm 1", "max_link 5 16", "max_clock 1980")
DIVIDED = (*HOPPER, f"mig 0 1 NVIDIA_H200_MIG_1g.18gb {MIG}", f"mig 0 5 NVIDIA_H200_MIG_3g.71gb {SECOND_MIG}")


def build(folder: Path, *flags: str) -> Path:
    """Compile the library into a folder of its own; a skip with its reason where there is no compiler."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("there is no C compiler to build the scripted NVML with")
    library = folder / "libnvidia-ml.so.1"
    options = ["-std=c11", "-Wall", "-Wextra", "-Werror", "-O1", "-shared", "-fPIC", "-fvisibility=hidden"]
    sources = [str(SOURCES / name) for name in ("nvml.c", "script.c")]
    command = [compiler, *options, *flags, f"-Wl,-soname,{library.name}", "-o", str(library), *sources]
    subprocess.run(command, check=True, capture_output=True, text=True)
    return library


class Machine:
    """Writes the script of a machine; times are seconds since the script's epoch, which is now."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.epoch_ns = time.monotonic_ns()
        self.script = folder / "machine.txt"
        self.log = folder / "calls.txt"

    def write(
        self,
        lines: Sequence[str],
        *,
        timeline: Sequence[Mapping[str, float]] = (),
        errors: Sequence[tuple[str, int, float, int]] = (),
        clock: Path | None = None,
        from_start: bool = False,
    ) -> None:
        """What it is and becomes, and what fails: call, code, from when on (`from_start`: of use), device (-1: all)."""
        text = [*lines, f"log {self.log}"]
        if not from_start:
            text.append(f"epoch {self.epoch_ns}")
        text += [f"error {call} {code} {from_s} {device}" for call, code, from_s, device in errors]
        if timeline:
            file = self._folder / "timeline.csv"
            rows = [",".join(timeline[0]), *(",".join(f"{value:.9g}" for value in row.values()) for row in timeline)]
            file.write_text("\n".join(rows) + "\n")
            text.append(f"timeline {file}")
        if clock is not None:
            text.append(f"clock {clock}")
        self.script.write_text("\n".join(text) + "\n")

    def calls(self) -> list[tuple[float, int, str, int]]:
        """Second, thread, name and device of every call so far."""
        lines = (line.split() for line in self.log.read_text().splitlines())
        return [((int(at) - self.epoch_ns) / 1e9, int(thread), name, int(device)) for at, thread, name, device in lines]

    def run(self, library: Path | None, code: str, *arguments: str, **environment: str) -> Any:
        """What `code` prints as JSON, in a process of its own that finds this library as the driver's."""
        path = str(library.parent) if library is not None else ""
        done = subprocess.run(
            [sys.executable, *arguments, "-c", code],
            capture_output=True,
            text=True,
            check=False,
            env={**os.environ, "LD_LIBRARY_PATH": path, "NVML_SCRIPT": str(self.script), **environment},
        )
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)


class Clock:
    """A clock that stands until it is set, for the library and for a sampler alike."""

    def __init__(self, file: Path) -> None:
        self.file = file
        self.set(0.0)

    def set(self, now_s: float) -> None:
        self._now_s = now_s
        self.file.write_text(f"{now_s:.9f}")

    def now_ns(self) -> int:
        return round(self._now_s * 1e9)


def load_into_binding(library: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the binding of this process use `library` until the test ends."""
    import pynvml

    monkeypatch.setattr(pynvml, "nvmlLib", ctypes.CDLL(str(library)))
    monkeypatch.setattr(pynvml, "_nvmlGetFunctionPointer_cache", {})


@pytest.fixture(scope="session")
def nvml_library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("nvml"))


@pytest.fixture(scope="session")
def old_nvml_library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("nvml-old"), "-DOLD_DRIVER")


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


@pytest.fixture
def clock(tmp_path: Path) -> Clock:
    return Clock(tmp_path / "clock.txt")


@pytest.fixture
def here(nvml_library: Path, machine: Machine, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., None]]:
    """Call it with a script's parts: from then on this process has that machine's driver."""

    def write(lines: Sequence[str], **parts: Any) -> None:
        machine.write(lines, **parts)
        monkeypatch.setenv("NVML_SCRIPT", str(machine.script))
        load_into_binding(nvml_library, monkeypatch)

    yield write
    if machine.log.exists():
        names = [name for _, _, name, _ in machine.calls()]
        assert names[-1] == "nvmlShutdown", "a session was left open"
