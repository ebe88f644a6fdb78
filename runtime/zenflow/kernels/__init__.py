"""Device kernels on the columns of a weight: importance, gather, scatter, selective update.

In Triton where there is an accelerator and Triton can be imported, else in PyTorch.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from types import MappingProxyType

import torch

from zenflow.errors import ConfigError
from zenflow.kernels.base import Kernels

MODES = ("auto", "eager", "triton")


def _eager() -> Kernels:
    from zenflow.kernels.eager import EagerKernels

    return EagerKernels()


def _triton() -> Kernels:
    from zenflow.kernels.triton_launch import TritonKernels

    return TritonKernels()


# Nothing of Triton is imported before somebody asks for its kernels.
_MAKERS: Mapping[str, Callable[[], Kernels]] = MappingProxyType({"eager": _eager, "triton": _triton})


def kernels_for(device: torch.device) -> Kernels:
    """The kernels for a device, or those that `$ZENFLOW_KERNELS` asks for.

    Args:
        device: where the weights are.

    Raises:
        ConfigError: the variable has a value that is not allowed, or asks for Triton where it cannot be imported or
            cannot run.
    """
    mode = os.environ.get("ZENFLOW_KERNELS") or "auto"
    if mode not in MODES:
        raise ConfigError(f"ZENFLOW_KERNELS is {mode!r}, allowed is {', '.join(MODES)}")
    if mode == "eager" or (mode == "auto" and device.type == "cpu"):
        return _MAKERS["eager"]()
    try:
        kernels = _MAKERS["triton"]()
    except ImportError as error:
        if mode == "auto":
            return _MAKERS["eager"]()
        raise ConfigError(f"ZENFLOW_KERNELS is 'triton', allowed is auto or eager: {error}") from error
    if not kernels.runs_on(device):
        raise ConfigError(f"ZENFLOW_KERNELS is 'triton' on {device}, allowed is auto or eager there")
    return kernels


__all__ = ["MODES", "Kernels", "kernels_for"]
