"""This machine's hardware, and the key under which settings are remembered: which machine, which trainable
parameters.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
from collections import Counter
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

import zftune
from zftune.telemetry.host_sampler import cpu_quota, numa_node_count, read
from zftune.telemetry.nvml import driver_version, gpus

if TYPE_CHECKING:
    from torch import nn


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
        "ram_bytes": os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"),  # where /proc is hidden, too
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
        found[package] = installed(package)
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


def installed(distribution: str) -> str | None:
    """The version of a distribution; None where it is not installed."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


_GIB = 1 << 30
_DIGITS = 16


def fingerprint(
    model: nn.Module, *, machine: Mapping[str, Any] | None = None, rig: str | None = None
) -> dict[str, str]:
    """The fingerprint of training `model` here.

    Args:
        model: only shapes, dtypes and ties of its trainable parameters count; no name and no value.
        machine: as `hardware()` returns it; measured here by default.
        rig: name of the emulated accelerator, whose results must never be taken for a machine's own.

    Returns:
        {"hw_id", "model_id"}, each 16 hexadecimal digits.
    """
    return {"hw_id": hw_id(hardware() if machine is None else machine, rig=rig), "model_id": model_id(model)}


def hw_id(machine: Mapping[str, Any], *, rig: str | None = None) -> str:
    """Hash of what the speed of offloading follows from. Equal machines agree, and the number of GPUs is left out.

    Memory is rounded, since firmware and kernel take a part that varies: a GPU's to GiB, the host's up to a power
    of two GiB. Usable cores, driver and versions are no part of it.
    """
    key: dict[str, Any] = {
        "gpus": sorted({json.dumps(_gpu_key(gpu), sort_keys=True) for gpu in machine["gpus"] or ()}),
        "cpu_model": machine["cpu_model"],
        "numa_nodes": machine["numa_nodes"],
        "ram_gib": 1 << max(0, -(-machine["ram_bytes"] // _GIB) - 1).bit_length(),
    }
    if rig is not None:
        key["rig"] = rig
    return _digest(key)


def model_id(model: nn.Module) -> str:
    """Hash over the multiset of (shape, dtype, number of uses) of the trainable parameters."""
    uses: Counter[int] = Counter()
    kinds: dict[int, tuple[tuple[int, ...], str]] = {}
    for _, parameter in model.named_parameters(remove_duplicate=False):
        if parameter.requires_grad:
            uses[id(parameter)] += 1
            kinds[id(parameter)] = (tuple(parameter.shape), str(parameter.dtype).removeprefix("torch."))
    return _digest(sorted([*kind, uses[key]] for key, kind in kinds.items()))


def recomputes(model: nn.Module) -> bool:
    """Whether activations are computed again in backward, where a model tells as those of transformers do."""
    return any(getattr(part, "gradient_checkpointing", False) for part in model.modules())


def _gpu_key(gpu: Mapping[str, Any]) -> dict[str, Any]:
    key = {field: gpu[field] for field in ("name", "compute_capability", "mig_profile", "nvlink")}
    key["pcie"] = f"{gpu['pcie_gen']}x{gpu['pcie_width']}"
    key["memory_gib"] = None if gpu["memory_bytes"] is None else round(gpu["memory_bytes"] / _GIB)
    return key


def _digest(key: Any) -> str:
    return hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:_DIGITS]
