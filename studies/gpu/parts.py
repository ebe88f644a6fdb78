"""The parts in their order, and the process in which one of them runs."""

from __future__ import annotations

import importlib
import sys
import traceback
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from gpu.record import Record


@dataclass(frozen=True, slots=True)
class Part:
    """Something that runs in a process of its own.

    Args:
        name: of it and its files.
        limit_s: seconds that it may take at most.
        least_s: with fewer left of the whole it is left out.
    """

    name: str
    limit_s: float
    least_s: float


PARTS = (
    Part("environment", 40, 5),
    Part("kernels", 60, 10),
    Part("driver", 50, 10),
    Part("link", 30, 8),
    Part("calls", 20, 5),
    Part("invariants", 90, 20),
    Part("sanitizer", 45, 20),
    Part("adamw", 35, 15),
    Part("resident", 40, 15),
    Part("zero-offload", 45, 15),
    Part("zenflow", 45, 15),
    Part("deepspeed-zero-offload", 60, 25),
    Part("deepspeed-zenflow", 150, 25),
    Part("synchronised", 35, 15),
    Part("loader", 35, 15),
    Part("exactness", 110, 20),
    Part("ratios", 75, 20),
    Part("search", 150, 30),
    Part("commands", 150, 60),
    Part("kernel-tests", 600, 20),
)
"""What the others need comes first, then what matters most; the last ones have what is left of the time."""
_ZENFLOW: dict[str, Any] = {"topk_ratio": 0.05, "update_interval": 4, "select_interval": 16}
KNOBS: Mapping[str, dict[str, Any]] = MappingProxyType(
    {
        "resident": {"topk_ratio": 0.0, "update_interval": 1, "overlap_step": False, "offload_ratio": 0.0},
        "zero-offload": {"topk_ratio": 0.0, "update_interval": 1, "overlap_step": False, "pipeline": "none"},
        "zenflow": _ZENFLOW,
    }
)
"""Of our own systems."""
LIKE = MappingProxyType({"adamw": "resident", "deepspeed-zero-offload": "zero-offload", "deepspeed-zenflow": "zenflow"})
"""Which of them does the same as another one."""
NO_GPU = 4
"""What a part's process ends with where there is no GPU."""


def preload(*, stub: bool) -> None:
    """Import once what every part needs, torch above all; one that fails is the parts' own to tell."""
    with suppress(ImportError):
        _function("")
        importlib.import_module("torch._dynamo")  # which the first optimizer asks for, and takes seconds
        if stub:
            importlib.import_module("tests.support.zenflow.simulated_cuda")


def run_part(name: str, path: Path, *, size: str, stub: bool, limit_s: float) -> int:
    """Run a part in this process; its exit code.

    Args:
        name: of the part.
        path: of its results.
        size: of the model.
        stub: whether the simulated device stands for a GPU.
        limit_s: seconds that it has.
    """
    record = Record(path, name, simulated=stub, limit_s=limit_s)
    try:
        from gpu.bench import SIZES, NoGpuError, bench_for

        bench = bench_for(stub=stub)
    except ImportError as error:
        record.refuse(str(error))
        return 0
    except NoGpuError as error:
        record.refuse(str(error))
        return NO_GPU
    try:
        _function(name)(record, bench, SIZES[size])
    except Exception as error:  # noqa: BLE001 - what it has measured stays
        traceback.print_exc(file=sys.stderr)
        record.failed(name, error)
    if stub:
        problems = bench.problems()
        record.hold("the simulated device's checker found nothing", not problems, problems[:5])
    record.end()
    return 0


def _function(name: str) -> Callable[..., None]:
    from gpu import calls, checks, commands, driver, exactness, machine, sweeps, systems

    return {
        "environment": machine.environment,
        "kernels": machine.kernels,
        "driver": driver.driver,
        "link": machine.link,
        "calls": calls.calls,
        "invariants": checks.invariants,
        "sanitizer": checks.sanitizer,
        "synchronised": systems.synchronised,
        "loader": systems.loader,
        "exactness": exactness.exactness,
        "ratios": sweeps.ratios,
        "search": sweeps.search,
        "commands": commands.commands,
        "kernel-tests": checks.kernel_tests,
    }.get(name) or systems.system(name)
