"""Records what a training run allocates on an emulated device: every tensor, when it comes and when it goes.

On the emulated accelerator device and host memory are both the machine's, so what the runtime asks for as host memory
is left out. Importance is left out too: in eager PyTorch it makes fp32 copies of a gradient, which the Triton kernel
does not.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from zenflow.device import HostSpan, Mark, Transfer
from zenflow.host.memory import HostMemory
from zenflow.kernels.base import Kernels
from zftune.emulation import EmulatedAccelerator


class Recorder(TorchDispatchMode):
    """Events (key, bytes, stream), 0 bytes where the key is freed: of the thread that entered it, or told."""

    def __init__(self) -> None:
        super().__init__()
        self.events: list[tuple[int, int, str]] = []
        self._known: set[int] = set()
        self._lock = threading.RLock()  # a collection inside may free memory
        self._keys = 0
        self._paused = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor):
                self.add(leaf, "compute")
        return result

    def add(self, tensor: torch.Tensor, stream: str) -> None:
        """Note a tensor's memory, if it is new."""
        if not self._paused:
            self._note(tensor, stream)

    def on_host(self, tensor: torch.Tensor) -> torch.Tensor:
        """Say that a tensor is host memory: nothing is noted of it, or of its views."""
        self._note(tensor, None)
        return tensor

    def _note(self, tensor: torch.Tensor, stream: str | None) -> None:
        storage = tensor.untyped_storage()
        if tensor.device.type != "cpu" or not storage.nbytes() or torch._C._is_cow_tensor(tensor):
            return  # a lazy copy has no memory until somebody writes
        with self._lock:
            address = storage._cdata
            if address in self._known:
                return
            self._known.add(address)
            self._keys += 1
            key = self._keys
            if stream is not None:
                self.events.append((key, storage.nbytes(), stream))
        weakref.finalize(storage, self._gone, key, address, stream).atexit = False

    def _gone(self, key: int, address: int, stream: str | None) -> None:
        with self._lock:
            self._known.discard(address)
            if stream is not None:
                self.events.append((key, 0, stream))

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Note nothing."""
        self._paused += 1
        try:
            yield
        finally:
            self._paused -= 1


class RecordedAccelerator(EmulatedAccelerator):
    """The emulated accelerator, telling a recorder which tensors lie on which side."""

    recorder: Recorder

    def host_empty(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        with self.recorder.paused():
            tensor = super().host_empty(shape, dtype)
        return self.recorder.on_host(tensor)

    def h2d(self, source: torch.Tensor, after: HostSpan, asked: Mark) -> tuple[Transfer, torch.Tensor]:
        transfer, tensor = super().h2d(source, after, asked)  # in whichever thread
        self.recorder.add(tensor, "h2d")
        return transfer, tensor


def leave_out_host(memory: HostMemory, recorder: Recorder) -> None:
    """Let the recorder pass over state, log and staging."""
    empty = memory.empty

    def unseen(*args: Any, **kwargs: Any) -> torch.Tensor:
        with recorder.paused():
            tensor = empty(*args, **kwargs)
        return recorder.on_host(tensor)

    memory.empty = unseen  # type: ignore[method-assign]


def leave_out_importance(kernels: Kernels, recorder: Recorder) -> None:
    """Let the recorder pass over the temporary copies of eager importance."""
    energies = kernels.energies

    def quiet(matrix: torch.Tensor) -> torch.Tensor:
        with recorder.paused():
            found = energies(matrix)
        recorder.add(found, "compute")
        return found

    kernels.energies = quiet  # type: ignore[method-assign]
