"""What this machine is made of and which software runs on it.

Never a host name, a user or a path. What is not known is null, with its reason under "missing" (dotted names,
relative to the dictionary that holds it); it is never 0.
"""

from __future__ import annotations

import os
import platform
from importlib import metadata
from pathlib import Path
from typing import Any

import psutil

import zftune
from zftune.telemetry.host_files import cpu_quota, numa_node_count, read
from zftune.telemetry.nvml import driver_version, gpus

_ROOT = Path("/")
_PACKAGES = ("torch", "transformers", "deepspeed")


def hardware() -> dict[str, Any]:
    """The machine: CPU, cores, NUMA nodes, memory, GPUs.

    Returns:
        {"cpu_model", "logical_cores", "usable_cores" (by affinity and control group, may be a fraction),
        "numa_nodes", "ram_bytes", "gpus": [{"name", "compute_capability", "memory_bytes", "mig_profile",
        "pcie_gen", "pcie_width", "nvlink"}, ..] or null, "missing": {name: reason}}.
    """
    missing: dict[str, str] = {}
    found: dict[str, Any] = {
        "cpu_model": _cpu_model(_ROOT),
        "logical_cores": os.cpu_count(),
        "usable_cores": _usable_cores(_ROOT),
        "numa_nodes": numa_node_count(_ROOT),
        "ram_bytes": psutil.virtual_memory().total,
        "gpus": gpus(missing),
        "missing": missing,
    }
    for name in ("cpu_model", "logical_cores", "usable_cores", "numa_nodes"):
        if found[name] is None:
            missing[name] = "the operating system does not tell"
    return found


def software() -> dict[str, Any]:
    """Versions, read without importing anything heavy.

    Returns:
        {"os", "python", "zftune", "torch", "transformers", "deepspeed", "nvidia_driver" (each a string or null),
        "missing": {name: reason}}.
    """
    missing: dict[str, str] = {}
    found: dict[str, Any] = {
        "os": f"{platform.system()} {platform.release()} {platform.machine()}",
        "python": platform.python_version(),
        "zftune": zftune.__version__,
    }
    for package in _PACKAGES:
        found[package] = _version(package)
        if found[package] is None:
            missing[package] = "not installed"
    found["nvidia_driver"] = driver_version(missing)
    found["missing"] = missing
    return found


def _usable_cores(root: Path) -> float | None:
    try:
        cores: float | None = len(os.sched_getaffinity(0))
    except (AttributeError, OSError):  # not every operating system has affinity
        cores = os.cpu_count()
    return min((limit for limit in (cores, cpu_quota(root)) if limit is not None), default=None)


def _cpu_model(root: Path) -> str | None:
    for line in read(root / "proc/cpuinfo").splitlines():
        key, _, value = line.partition(":")
        if key.strip() in ("model name", "Processor") and value.strip():
            return value.strip()
    return platform.processor() or None


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
