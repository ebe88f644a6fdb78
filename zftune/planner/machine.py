"""Machines as TOML files: those that come with zftune, and a user's own.

A file has `name`, `gpu` and `host` (texts), a table `[figures]` with every figure of a machine, and a table `[source]`
that says of each where it comes from: a published specification, a measurement, or "estimate: ...".
"""

from __future__ import annotations

import os
import re
import statistics
import sys
import time
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import fields
from importlib import resources
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any

from zenflow.host.limits import available_host_bytes
from zenflow.names import did_you_mean
from zftune.emulation import Rig
from zftune.errors import BadInputError, ZftuneError
from zftune.planner import models
from zftune.planner.model import Machine
from zftune.planner.rates import Rates

UNLIMITED = 1 << 50  # bytes: an emulated accelerator has no memory of its own
_LINK_BYTES = 1 << 28
_MATRIX = 8192
_REPEATS = 5
_TRAINING_SHARE = 0.6
"""Of what a large product reaches: a step also has attention, norms and gaps between kernels."""
_UPDATES_A_CORE = 1.2
"""10^9 a second: what half an AVX-512 core does (study 001), so that no machine is thought too fast."""
_COMM_SHARE = 0.7
_LAYER_UNITS = 236.0
"""Forward and backward of a layer on the training thread, in calls of `add_`: as in the machines that come with us."""
_CALLS = 2000


def machine_here() -> Machine:
    """Measure this machine; takes seconds.

    Raises:
        BadInputError: there is no GPU.
        ZftuneError: a measurement failed.
    """
    import torch

    from zenflow.host.cores import allowed_cpus, cpu_quota

    if not torch.cuda.is_available():
        raise BadInputError("--hardware 'here': this machine has no GPU: give a machine's name or a TOML file")
    down, up = _link_gbps()
    usable, quota = len(allowed_cpus()), cpu_quota()
    cores = max(1, usable if quota is None else int(min(usable, quota)))
    host, threads = _host_gbps()
    free, total = torch.cuda.mem_get_info()
    unit_us = thread_unit_us()
    used = total - free
    figures: dict[str, tuple[Any, str]] = {
        "gpus": (torch.cuda.device_count(), "the GPUs that CUDA sees"),
        "device_memory_bytes": (total, f"the driver; {used} bytes of it are in use now"),
        "device_gbps": (device_gbps(), "measured: copies within device memory"),
        "compute_tflops": (_product_tflops(), f"measured: a bf16 product of {_MATRIX} x {_MATRIX} matrices"),
        "compute_share": (_TRAINING_SHARE, "estimate: of a large product's rate; give --compute-ms to replace it"),
        "link_d2h_gbps": (down, "measured: copies to pinned memory"),
        "link_h2d_gbps": (up, "measured: copies from pinned memory"),
        "host_gbps": (host, f"measured: the streams of a host update on {threads} threads"),
        "host_update_gelements_s": (
            _UPDATES_A_CORE * max(1, cores // 2),
            f"estimate: half of the cores with {_UPDATES_A_CORE}e9 element updates a second each",
        ),
        "cores": (cores, "affinity and control group"),
        "host_memory_bytes": (_host_memory(), "what this process may still allocate"),
        "comm_gbps": (_COMM_SHARE * min(down, up), "estimate: 70% of the measured link; NVLink is not measured"),
        "thread_unit_us": (unit_us, "measured: x.add_(1) to a small CPU tensor"),
        "thread_layer_us": (_LAYER_UNITS * unit_us, f"estimate: {_LAYER_UNITS:g} such calls"),
    }
    return Machine(
        name="here",
        gpu=torch.cuda.get_device_name(),
        source={name: source for name, (_, source) in figures.items()},
        **{name: value for name, (value, _) in figures.items()},
    )


def _host_memory() -> int:
    from zenflow.host.limits import available_host_bytes

    return available_host_bytes() or os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _host_gbps() -> tuple[float, int]:
    from zenflow import HostEngineError
    from zftune.telemetry.bandwidth import host_bandwidth

    try:
        measured = host_bandwidth(repeats=_REPEATS)
    except (HostEngineError, MemoryError) as error:
        raise ZftuneError(f"--hardware 'here': the host's memory could not be measured: {error}") from error
    return measured.gbps, measured.threads


def thread_unit_us() -> float:
    """Microseconds of a thread for `x.add_(1)` to a small CPU tensor: the median of five rounds."""
    import torch

    small = torch.zeros(16)
    times: list[float] = []
    for _ in range(_REPEATS):
        begin = time.thread_time()
        for _ in range(_CALLS):
            small.add_(1)
        times.append(time.thread_time() - begin)
    return 1e6 * statistics.median(times) / _CALLS


def _link_gbps() -> tuple[float, float]:
    """Down and up."""
    import torch

    near = torch.empty(_LINK_BYTES, dtype=torch.uint8, pin_memory=True)
    far = torch.empty(_LINK_BYTES, dtype=torch.uint8, device=torch.device(torch.cuda.current_device()))
    down = _LINK_BYTES / _median_ms(lambda: near.copy_(far, non_blocking=True)) / 1e6
    return down, _LINK_BYTES / _median_ms(lambda: far.copy_(near, non_blocking=True)) / 1e6


def device_gbps(nbytes: int = _LINK_BYTES) -> float:
    """Bandwidth of the current GPU's memory, by copies of `nbytes` within it; twice as much is taken."""
    import torch

    source = torch.empty(nbytes, dtype=torch.uint8, device=torch.device(torch.cuda.current_device()))
    target = torch.empty_like(source)
    return 2 * nbytes / _median_ms(lambda: target.copy_(source)) / 1e6


def _product_tflops() -> float:
    import torch

    device = torch.device(torch.cuda.current_device())
    matrix = torch.randn(_MATRIX, _MATRIX, dtype=torch.bfloat16, device=device)
    return 2 * _MATRIX**3 / _median_ms(lambda: matrix @ matrix) / 1e9


def _median_ms(work: Callable[[], Any]) -> float:
    import torch

    times: list[float] = []
    for _ in range(_REPEATS + 1):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        work()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end))
    return statistics.median(times[1:])  # the first one wakes the device up


FIGURES = tuple(field.name for field in fields(Machine) if field.name not in ("name", "gpu", "source"))
_OPTIONAL = ("thread_unit_us", "thread_layer_us")
_WHOLE = {"gpus", "device_memory_bytes", "cores", "host_memory_bytes"}
_COUNTED = re.compile(r"(?P<gpus>\d+)\s*[x×*]\s*(?P<name>.+)", re.IGNORECASE)
_MOST_BYTES = 1 << 20  # of a file: a machine takes three thousand


def machine_names() -> list[str]:
    """Names of the machines that come with the package."""
    return sorted(file.name.removesuffix(".toml") for file in _folder().iterdir() if file.name.endswith(".toml"))


def load_machine(name_or_path: str) -> Machine:
    """A machine by its name, or from a TOML file.

    Raises:
        BadInputError: there is no such machine, or the file is not a valid one.
    """
    names = machine_names()
    if name_or_path.lower() in names:
        return _of_library(name_or_path.lower())
    try:
        found = Path(name_or_path).is_file()
    except OSError:  # a name that is too long
        found = False
    if not found:
        if proper := _proper(name_or_path, names):
            return _of_library(proper)
        counted = _COUNTED.fullmatch(name_or_path)
        if counted and (proper := _proper(counted["name"], names)):
            raise BadInputError(
                f"--hardware '{name_or_path}': it must be a machine without a number: "
                f"--hardware {proper} --gpus {counted['gpus']}"
            )
        near = did_you_mean(name_or_path, [*names, *models.MACHINES])
        raise BadInputError(f"--hardware '{name_or_path}': it must be here, {', '.join(names)}, or a TOML file{near}")
    try:
        if Path(name_or_path).stat().st_size > _MOST_BYTES:
            raise BadInputError(f"--hardware '{name_or_path}': it must be a file of at most {_MOST_BYTES} bytes")
        text = Path(name_or_path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise BadInputError(f"--hardware '{name_or_path}': it cannot be read ({reason})") from error
    return parse_machine(text, name_or_path)


def _of_library(name: str) -> Machine:
    return parse_machine((_folder() / f"{name}.toml").read_text(encoding="utf-8"), name)


def _proper(name: str, names: list[str]) -> str | None:
    """What the library calls a machine of another spelling, or with such a GPU; None: it has none."""
    asked = models.machine_key(name)
    known = {models.machine_key(each): each for each in names} | models.MACHINES
    if asked in known:
        return known[asked]
    return next((each for each in names if models.machine_key(_of_library(each).gpu) == asked), None)


def parse_machine(text: str, origin: str) -> Machine:
    """A machine from TOML; `origin` names it in errors.

    Raises:
        BadInputError: a figure or its source is missing, unknown, or not allowed.
    """
    try:
        document = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise BadInputError(f"--hardware '{origin}': it is not TOML ({error})") from error
    unknown = set(document) - {"name", "gpu", "host", "figures", "source"}
    if unknown:
        raise BadInputError(
            f"--hardware '{origin}': has {min(unknown)!r}; it may have name, gpu, host, [figures] and [source]"
        )
    for key in ("name", "gpu"):
        if not isinstance(document.get(key), str):
            raise BadInputError(f"--hardware '{origin}': {key} is {document.get(key)!r}; it must be a text")
    figures, source = _table(document, "figures", origin), _table(document, "source", origin)
    for key in FIGURES:
        if key in _OPTIONAL and key not in figures:
            continue
        _check(key, figures.get(key), origin)
        if not isinstance(source.get(key), str) or not source[key]:
            raise BadInputError(
                f"--hardware '{origin}': source.{key} is {source.get(key)!r}; it must be a text that says "
                "where the figure comes from"
            )
    return Machine(name=document["name"], gpu=document["gpu"], source=dict(source), **figures)


def _table(document: Mapping[str, Any], name: str, origin: str) -> Mapping[str, Any]:
    table = document.get(name)
    if not isinstance(table, dict):
        needed = (key for key in FIGURES if key not in _OPTIONAL)
        raise BadInputError(f"--hardware '{origin}': has no [{name}]; needed are {', '.join(needed)}")
    unknown = set(table) - set(FIGURES)
    if unknown:
        raise BadInputError(f"--hardware '{origin}': has {name}.{min(unknown)}; figures are {', '.join(FIGURES)}")
    return table


def _check(key: str, value: Any, origin: str) -> None:
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    whole = key not in _WHOLE or isinstance(value, int)
    most = 1.0 if key == "compute_share" else sys.float_info.max
    if not number or not whole or not 0 < value <= most:
        kind = "an integer > 0" if key in _WHOLE else "a number above 0, at most 1" if most == 1.0 else "a number > 0"
        raise BadInputError(f"--hardware '{origin}': figures.{key} is {value!r}; it must be {kind}")


def _folder() -> Traversable:
    return resources.files("zftune") / "machines"


def machine_of(
    name: str, gpu: str, rates: Rates, *, host_memory_bytes: int, device_memory_bytes: int = UNLIMITED
) -> Machine:
    """A machine of which only the rates of a training and its memory are known."""
    return Machine(
        name=name,
        source={"host_memory_bytes": "what this process may still allocate"},
        gpu=gpu,
        gpus=1,
        device_memory_bytes=device_memory_bytes,
        device_gbps=rates.device_gbps or 0.0,
        compute_tflops=0.0,
        compute_share=0.0,
        link_d2h_gbps=rates.d2h_gbps,
        link_h2d_gbps=rates.h2d_gbps,
        host_gbps=rates.host_gbps,
        host_update_gelements_s=0.0,
        cores=1,
        host_memory_bytes=host_memory_bytes,
        comm_gbps=0.0,
    )


def rig_machine(rig: Rig) -> Machine:
    """An emulated accelerator as a machine: its rates, and this host's memory."""
    host_bytes = available_host_bytes() or UNLIMITED
    return machine_of(rig.name, "emulated accelerator", Rates.of_rig(rig), host_memory_bytes=host_bytes)
