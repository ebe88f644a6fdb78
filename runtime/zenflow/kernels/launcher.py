"""Launches of Triton kernels at a sixth of what `kernel[grid]` takes on the calling thread.

`kernel[grid]` looks at every argument anew to find the compiled kernel. Here it is compiled once, and started by its
own `run`, which is no public interface of Triton: where it is not as expected, launches go through `kernel[grid]`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from triton.runtime import driver
from triton.runtime.interpreter import InterpretedFunction


def address_of(tensor: torch.Tensor | None) -> int:
    """Address of a tensor's first element, 0 for None; memory that is shared lazily stays so, unlike by `data_ptr`."""
    if tensor is None:
        return 0
    # A wrapper has no memory of its own, but may know whose it is; what is empty has none, and is there.
    return _data_address(tensor) or tensor.data_ptr() or 16


def _no_address(tensor: torch.Tensor) -> int:
    return 0


_data_address: Callable[[torch.Tensor], int] = getattr(torch._C, "_data_address", _no_address)


class Launcher:
    """One kernel with its constants. No argument may be specialized by value: the first call's kernel serves all.

    Args:
        kernel: from `triton.jit`.
        num_warps: of a program.
        constants: all its constexprs, in the order of the kernel's parameters, behind all arguments.
    """

    def __init__(self, kernel: Any, num_warps: int, constants: Sequence[tuple[str, Any]]) -> None:
        self.kernel = kernel
        self._options = {"num_warps": num_warps, "enable_fp_fusion": False}
        self._constants = dict(constants)
        self._tail = tuple(self._constants.values())
        self._started: dict[int | None, tuple[Any, Any, Any] | None] = {}

    def __call__(self, programs: int, device: torch.device, *args: Any, reaches: Sequence[torch.Tensor] = ()) -> None:
        """Launch on a device's current stream.

        Args:
            programs: how many; 0: nothing is launched.
            device: of all tensors.
            args: the kernel's arguments: tensors on the device, numbers, None always in the same place.
            reaches: tensors that the kernel reaches by addresses among its arguments or in tables.
        """
        if not programs:
            return
        if device.index not in self._started:
            self.prepare(device, *args)
        started = self._started[device.index]
        if started is None:
            plain_launch(self.kernel, programs, args, self._constants | self._options, reaches)
            return
        active = driver.active
        if device.index not in (None, active.get_current_device()):
            with torch.cuda.device(device):
                self(programs, device, *args)
            return
        run, function, metadata = started
        stream = active.get_current_stream(device.index or 0)
        try:
            run(programs, 1, 1, stream, function, metadata, None, None, None, *args, *self._tail)
        except TypeError:  # another release's takes other arguments, and has launched nothing
            self._started[device.index] = None
            self(programs, device, *args)

    def prepare(self, device: torch.device, *args: Any) -> None:
        """Compile and load the kernel for a device.

        Args:
            device: where it will run.
            args: as for a launch; a dtype stands for a tensor of it.
        """
        if device.index in self._started:
            return
        started = None
        if not isinstance(self.kernel, InterpretedFunction):
            with torch.cuda.device_of(torch.empty(0, device=device)):
                compiled = self.kernel.warmup(*args, grid=(1,), **self._constants, **self._options)
                try:
                    started = compiled.run, compiled.function, compiled.packed_metadata  # `run` loads it
                except AttributeError:
                    started = None
        self._started[device.index] = started


def plain_launch(
    kernel: Any, programs: int, args: Sequence[Any], constants: dict[str, Any], reaches: Sequence[torch.Tensor]
) -> None:
    """Launch as Triton documents it; with `reaches` a simulated device knows what the kernel uses."""
    kernel[(programs,)](*args, **constants)


@functools.cache
def launcher(kernel: Any, num_warps: int = 4, **constants: Any) -> Launcher:
    """The launcher of a kernel with its constants, one in the process."""
    return Launcher(kernel, num_warps, tuple(constants.items()))
