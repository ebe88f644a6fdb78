"""The machine under the runtime: what is installed, what its kernels and its link reach."""

from __future__ import annotations

import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import sysconfig
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from gpu.bench import ROOT, Bench, Size
from gpu.launches import launches_of
from gpu.record import Record, UnavailableError

from zenflow import ZenFlowAdamW, ZenFlowConfig
from zenflow.kernels import kernels_for
from zftune.planner.model import Machine

_PACKAGES = (
    "torch",
    "triton",
    "numpy",
    "deepspeed",
    "transformers",
    "pytest",
    "pytest-xdist",
    "psutil",
    "nvidia-ml-py",
)
_REPEATS = 5
_PIECE = 32 << 20


# --- environment -----------------------------------------------------------------------------------------------------


def environment(record: Record, bench: Bench, _: Size) -> None:
    """What everything else runs on."""
    record.measure("software", _software)
    record.measure("host", _host)
    record.measure("gpu", lambda: _gpu(bench))
    record.measure("doctor", _doctor)


def _software() -> dict[str, Any]:
    found: dict[str, Any] = {"python": platform.python_version(), "kernel": platform.release()}
    for package in _PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            found[package] = None
    found["compiler"] = shutil.which("gcc") or shutil.which("cc") or shutil.which("clang")
    found["python_h"] = (Path(sysconfig.get_paths()["include"]) / "Python.h").is_file()
    try:
        from zenflow import _native
    except ImportError as error:
        found["native"] = f"none: {error}"
    else:
        found["native"] = Path(_native.__file__ or "").name
    return found


def _host() -> dict[str, Any]:
    nodes = sorted(Path("/sys/devices/system/node").glob("node[0-9]*"))
    return {
        "cores": os.cpu_count(),
        "usable": len(os.sched_getaffinity(0)),
        "numa": {node.name: _text(node / "cpulist") for node in nodes},
        "transparent_huge_pages": _text(Path("/sys/kernel/mm/transparent_hugepage/enabled")),
        "memory_bytes": memory_bytes("MemTotal"),
        "available_bytes": memory_bytes("MemAvailable"),
        "driver": _text(Path("/proc/driver/nvidia/version")).partition("\n")[0],
    }


def _gpu(bench: Bench) -> dict[str, Any]:
    if bench.simulated:
        raise UnavailableError("there is no GPU")
    properties: Any = torch.cuda.get_device_properties(bench.torch_device)
    bus = f"{properties.pci_domain_id:04x}:{properties.pci_bus_id:02x}:{properties.pci_device_id:02x}.0"
    attached = Path("/sys/bus/pci/devices") / bus
    return {
        "name": properties.name,
        "count": torch.cuda.device_count(),
        "capability": f"{properties.major}.{properties.minor}",
        "memory_bytes": properties.total_memory,
        "cuda": torch.version.cuda,
        "pcie": {name: _text(attached / name) for name in ("current_link_speed", "current_link_width", "numa_node")},
    }


def _doctor() -> Any:
    command = [sys.executable, "-c", "from zftune.cli.main import main; main()", "doctor", "--json", "-"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=60)
    if not done.stdout.strip():
        raise UnavailableError((done.stderr.strip().splitlines() or ["it said nothing"])[-1])
    return json.loads(done.stdout)


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8").strip()
    except OSError:
        return ""


def memory_bytes(field: str) -> int:
    """A line of /proc/meminfo, in bytes; 0 where there is none."""
    for line in _text(Path("/proc/meminfo")).splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) << 10
    return 0


# --- kernels ---------------------------------------------------------------------------------------------------------


def kernels(record: Record, bench: Bench, size: Size) -> None:
    """One launch of each kernel, its rate beside a copy's; then a short training, so that later parts compile none."""
    made = kernels_for(bench.torch_device)
    record.note("kernels", made.name)
    copy = record.measure("copy", lambda: _copy_gbps(bench, size))
    matrix = bench.put(torch.randn(_rows(bench, size), size.hidden).bfloat16())
    for name, (launch, nbytes) in launches_of(bench, made, matrix).items():
        record.measure(name, lambda launch=launch, nbytes=nbytes: _rate(bench, launch, nbytes, copy))
    if not bench.simulated:
        record.measure("compiled beforehand", lambda: _trained(bench, size), needs_s=5)


def _rows(bench: Bench, size: Size) -> int:
    """Of a matrix that no cache of a GPU holds."""
    return size.intermediate if bench.simulated else 8 * size.intermediate


def _copy_gbps(bench: Bench, size: Size) -> float:
    source = bench.put(torch.zeros(_rows(bench, size), size.hidden, dtype=torch.bfloat16))
    target = torch.empty_like(source)
    return 2 * source.nbytes / _median_ms(bench, lambda: target.copy_(source)) / 1e6


def _rate(bench: Bench, launch: Callable[[], Any], nbytes: int, copy: float | None) -> dict[str, float | None]:
    began = time.perf_counter()
    launch()
    bench.synchronize()
    first_s = time.perf_counter() - began
    gbps = nbytes / _median_ms(bench, launch) / 1e6
    return {"first_launch_s": first_s, "gbps": gbps, "of_copy": None if not copy else gbps / copy}


def _trained(bench: Bench, size: Size) -> dict[str, float]:
    """A model of one layer under each system's knobs, through a selection: the compiler's cache then has them all."""
    from gpu.parts import KNOBS

    small = replace(size, layers=1)
    seconds: dict[str, float] = {}
    for name, knobs in KNOBS.items():
        began = time.perf_counter()
        model = bench.model(small)
        config = ZenFlowConfig(**{**knobs, "select_interval": 1} if knobs.get("topk_ratio") else knobs)
        optimizer = ZenFlowAdamW(model.parameters(), config=config, module=model, device=bench.device())
        for step in range(3 * config.longest_window):
            model(bench.tokens(small, step)).backward()
            optimizer.step()
            optimizer.zero_grad()
        optimizer.close()
        seconds[name] = time.perf_counter() - began
    return seconds


# --- link ------------------------------------------------------------------------------------------------------------


def link(record: Record, bench: Bench, _: Size) -> None:
    """Each direction and both at once, in pieces and at once; what it takes to wake up; the planner's machine."""
    total = 1 << 20 if bench.simulated else 1 << 30
    far, near, back = _buffers(bench, total)
    for name, piece in (("32 MiB pieces", min(_PIECE, total // 4)), ("1 GiB", total)):
        for direction in ("d2h", "h2d", "both"):
            record.measure(
                f"{direction}, {name}",
                lambda piece=piece, direction=direction: _copied(bench, far, near, back, piece, direction),
            )
    record.measure("blocking wake-up, us", lambda: _wake_up_us(bench))
    record.measure("machine", lambda: _machine(bench), needs_s=4)


def _buffers(bench: Bench, nbytes: int) -> tuple[list[torch.Tensor], torch.Tensor, torch.Tensor]:
    device = bench.device()
    near, back = (device.host_empty((nbytes,), torch.uint8) for _ in range(2))
    near.zero_()
    return [bench.put(torch.zeros(nbytes, dtype=torch.uint8)) for _ in range(2)], near, back


def _copied(
    bench: Bench, far: list[torch.Tensor], near: torch.Tensor, back: torch.Tensor, piece: int, direction: str
) -> float:
    """GB/s of all bytes together, on streams of their own."""
    down, up = (torch.cuda.Stream(bench.torch_device) for _ in range(2))
    moved = len(near) * (2 if direction == "both" else 1)

    def copies() -> None:
        here = torch.cuda.current_stream(bench.torch_device)
        for stream in (down, up):
            stream.wait_stream(here)
        for begin in range(0, len(near), piece):
            part = slice(begin, begin + piece)
            if direction != "h2d":
                with torch.cuda.stream(down):
                    back[part].copy_(far[0][part], non_blocking=True)
            if direction != "d2h":
                with torch.cuda.stream(up):
                    far[1][part].copy_(near[part], non_blocking=True)
        for stream in (down, up):
            here.wait_stream(stream)

    rate = moved / _median_ms(bench, copies) / 1e6
    bench.synchronize()
    return rate


def _wake_up_us(bench: Bench) -> float:
    """From a tiny kernel's launch to a thread that slept for it, beside one that asked all the time."""
    one = bench.put(torch.zeros(1))

    def waited(*, blocking: bool) -> float:
        event = torch.cuda.Event(blocking=blocking)
        bench.synchronize()
        began = time.perf_counter()
        one.add_(1)
        event.record(torch.cuda.current_stream(bench.torch_device))
        event.synchronize()
        return time.perf_counter() - began

    slept, spun = ([waited(blocking=blocking) for _ in range(50)] for blocking in (True, False))
    return 1e6 * (statistics.median(slept) - statistics.median(spun))


def _machine(bench: Bench) -> dict[str, Any]:
    return asdict(machine_of(bench))


def machine_of(bench: Bench) -> Machine:
    """What the planner is told: this machine, measured; with the stub one of its library."""
    return Machine.load("a100-80-pcie") if bench.simulated else Machine.here()


def _median_ms(bench: Bench, work: Callable[[], Any]) -> float:
    device = bench.device()
    times = []
    for _ in range(_REPEATS + 1):
        begin = device.mark()
        work()
        end = device.mark()
        device.wait_for(end)
        times.append(1e3 * device.elapsed_s(begin, end))
    return max(statistics.median(times[1:]), 1e-9)  # the first one wakes the device up
