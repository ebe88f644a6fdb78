"""Device kernels on the columns of a weight: importance, gather, scatter, selective update.

In Triton where there is an accelerator and a first kernel could be launched on it, in the native module where the
weights are in host memory and it can be loaded, else in PyTorch.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Mapping
from types import MappingProxyType

import torch

from zenflow.errors import ConfigError, HostEngineError, UnsupportedError
from zenflow.kernels.base import EagerKernels, Kernels
from zenflow.kernels.tables import BucketTables, TablePart
from zenflow.names import did_you_mean

MODES = ("auto", "eager", "native", "triton")


def _eager(_device: torch.device, _threads: int | None) -> Kernels:
    return EagerKernels()


def _native(_device: torch.device, threads: int | None) -> Kernels:
    from zenflow.host.native import load_native
    from zenflow.kernels.native import NativeKernels

    if os.environ.get("ZENFLOW_NATIVE") == "off":
        raise ImportError("ZENFLOW_NATIVE is 'off'")
    return NativeKernels(load_native(), threads)


def _triton(device: torch.device, _threads: int | None) -> Kernels:
    from zenflow.kernels.triton_launch import TritonKernels, require_launch

    kernels = TritonKernels()
    if kernels.runs_on(device):
        require_launch(kernels, device)
    return kernels


# Nothing of Triton is imported before somebody asks for its kernels.
_MAKERS: Mapping[str, Callable[[torch.device, int | None], Kernels]] = MappingProxyType(
    {"eager": _eager, "native": _native, "triton": _triton}
)


def kernels_for(device: torch.device, threads: int | None = None) -> Kernels:
    """The kernels for a device, or those that `$ZENFLOW_KERNELS` asks for.

    Warns where PyTorch's are taken on an accelerator, and says why. Waits for the device.

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
        raise ConfigError.of("ZENFLOW_KERNELS", mode, f"{' or '.join(MODES)}{did_you_mean(mode, MODES)}")
    name = mode if mode != "auto" else "native" if device.type == "cpu" else "triton"
    try:
        kernels = _MAKERS[name](device, threads)
    except (ImportError, HostEngineError, UnsupportedError) as error:
        if isinstance(error, HostEngineError) and os.environ.get("ZENFLOW_NATIVE") == "require":
            raise
        if mode == "auto":
            if device.type != "cpu":
                warnings.warn(f"device updates run in PyTorch, several times slower: {error}", stacklevel=2)
            return _eager(device, threads)
        raise ConfigError(f"ZENFLOW_KERNELS is {mode!r}; it must be auto or eager: {error}") from error
    if not kernels.runs_on(device):
        raise ConfigError(f"ZENFLOW_KERNELS is {mode!r}; on {device} it must be auto or eager")
    return kernels


__all__ = [
    "MODES",
    "BucketTables",
    "Kernels",
    "TablePart",
    "kernels_for",
]
