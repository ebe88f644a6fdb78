"""Device kernels on the columns of a weight: importance, gather, scatter, selective update.

In Triton where there is an accelerator and Triton can be imported, in the native module where the weights are in host
memory and it can be loaded, else in PyTorch.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from types import MappingProxyType

import torch

from zenflow.errors import ConfigError, HostEngineError
from zenflow.kernels.base import ColumnUpdate, Kernels

MODES = ("auto", "eager", "native", "triton")


def _eager(_: int | None = None) -> Kernels:
    from zenflow.kernels.eager import EagerKernels

    return EagerKernels()


def _native(threads: int | None) -> Kernels:
    from zenflow.host.native import load_native
    from zenflow.kernels.native import NativeKernels

    if os.environ.get("ZENFLOW_NATIVE") == "off":
        raise ImportError("ZENFLOW_NATIVE is 'off'")
    return NativeKernels(load_native(), threads)


def _triton(_: int | None) -> Kernels:
    from zenflow.kernels.triton_launch import TritonKernels

    return TritonKernels()


# Nothing of Triton is imported before somebody asks for its kernels.
_MAKERS: Mapping[str, Callable[[int | None], Kernels]] = MappingProxyType(
    {"eager": _eager, "native": _native, "triton": _triton}
)


def kernels_for(device: torch.device, threads: int | None = None) -> Kernels:
    """The kernels for a device, or those that `$ZENFLOW_KERNELS` asks for.

    Args:
        device: where the weights are.
        threads: of those that run on the CPU; None: as many as PyTorch has.

    Raises:
        ConfigError: the variable has a value that is not allowed, or asks for kernels that cannot be loaded or cannot
            run there.
        HostEngineError: `$ZENFLOW_NATIVE` is "require", the device is the CPU, and there is no native module.
    """
    mode = os.environ.get("ZENFLOW_KERNELS") or "auto"
    if mode not in MODES:
        raise ConfigError(f"ZENFLOW_KERNELS is {mode!r}, allowed is {', '.join(MODES)}")
    name = mode if mode != "auto" else "native" if device.type == "cpu" else "triton"
    try:
        kernels = _MAKERS[name](threads)
    except (ImportError, HostEngineError) as error:
        if isinstance(error, HostEngineError) and os.environ.get("ZENFLOW_NATIVE") == "require":
            raise
        if mode == "auto":
            return _eager()
        raise ConfigError(f"ZENFLOW_KERNELS is {mode!r}, allowed is auto or eager: {error}") from error
    if not kernels.runs_on(device):
        raise ConfigError(f"ZENFLOW_KERNELS is {mode!r} on {device}, allowed is auto or eager there")
    return kernels


__all__ = ["MODES", "ColumnUpdate", "Kernels", "kernels_for"]
