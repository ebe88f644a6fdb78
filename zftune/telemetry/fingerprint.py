"""The key under which knobs are remembered: which machine, and which set of trainable parameters."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from zftune.telemetry.hardware import hardware

if TYPE_CHECKING:
    from torch import nn

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


def _gpu_key(gpu: Mapping[str, Any]) -> dict[str, Any]:
    key = {field: gpu[field] for field in ("name", "compute_capability", "mig_profile", "nvlink")}
    key["pcie"] = f"{gpu['pcie_gen']}x{gpu['pcie_width']}"
    key["memory_gib"] = None if gpu["memory_bytes"] is None else round(gpu["memory_bytes"] / _GIB)
    return key


def _digest(key: Any) -> str:
    return hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:_DIGITS]
