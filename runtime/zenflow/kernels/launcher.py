"""Launches of Triton kernels that cost the calling thread a sixth of `kernel[grid]`.

`kernel[grid]` looks at every argument anew to find the compiled kernel. Here one is compiled once, and started by its
own `run`, which is no public interface of Triton: if it is not as expected, launches go through `kernel[grid]`.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from triton.runtime import driver
from triton.runtime.interpreter import InterpretedFunction


class Launcher:
    """One kernel with its constants. No argument may be specialized: what the first call compiles serves all.

    Args:
        kernel: from `triton.jit`.
        num_warps: of a program.
        constants: all its constexprs, in the order of its parameters, which follow all others.
    """

    def __init__(self, kernel: Any, num_warps: int, constants: dict[str, Any]) -> None:
        self.kernel = kernel
        self._constants = constants
        self._options = {"num_warps": num_warps, "enable_fp_fusion": False}
        self._started: dict[int | None, tuple[Any, Any, Any] | None] = {}  # by device; None: by `kernel[grid]`

    def __call__(self, programs: int, device: torch.device, *args: Any, reaches: Sequence[Any] = ()) -> None:
        """Launch on a device's current stream, which is that of the device's training.

        Args:
            programs: how many; with 0 nothing is launched.
            device: of all tensors.
            args: the kernel's arguments: tensors on the device, numbers, None; always of the same dtypes.
            reaches: tensors (or None) that the kernel reaches by addresses among its arguments.
        """
        if not programs:
            return
        if device.index not in self._started:
            with torch.cuda.device_of(_tensor(args)):
                self._started[device.index] = self._compiled(args)
        started = self._started[device.index]
        if started is None:
            with torch.cuda.device_of(_tensor(args)):
                plain_launch(self.kernel, programs, args, self._constants | self._options, reaches)
            return
        active = driver.active
        if device.index not in (None, active.get_current_device()):
            with torch.cuda.device(device):
                self(programs, device, *args, reaches=reaches)
            return
        run, function, metadata = started
        stream = active.get_current_stream(device.index or 0)
        try:
            run(programs, 1, 1, stream, function, metadata, None, None, None, *args, *self._constants.values())
        except TypeError:  # another release's takes other arguments, and has launched nothing
            self._started[device.index] = None
            self(programs, device, *args, reaches=reaches)

    def _compiled(self, args: Sequence[Any]) -> tuple[Any, Any, Any] | None:
        if isinstance(self.kernel, InterpretedFunction):
            return None
        compiled = self.kernel.warmup(*args, grid=(1,), **self._constants, **self._options)
        try:
            return compiled.run, compiled.function, compiled.packed_metadata  # `run` loads it
        except AttributeError:
            return None


def _tensor(args: Sequence[Any]) -> torch.Tensor:
    return next(one for one in args if isinstance(one, torch.Tensor))


def plain_launch(
    kernel: Any, programs: int, args: Sequence[Any], options: dict[str, Any], _reaches: Sequence[Any]
) -> None:
    """Launch as Triton documents it; from `_reaches` a simulated device learns what the kernel uses."""
    kernel[(programs,)](*args, **options)


@functools.cache
def launcher(kernel: Any, num_warps: int = 4, **constants: Any) -> Launcher:
    """The launcher of a kernel with its constants, one in the process."""
    return Launcher(kernel, num_warps, constants)
