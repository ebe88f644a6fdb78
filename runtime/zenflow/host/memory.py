"""The host memory of the deferred columns: who allocates it, and how much there is of it."""

from __future__ import annotations

import math
import threading
from collections import Counter
from collections.abc import Sequence
from typing import Literal

import torch

from zenflow.device import Device
from zenflow.host.backend import Backend
from zenflow.host.of_process import finalize

Use = Literal["state", "log", "staging", "migration"]
USES: tuple[Use, ...] = ("state", "log", "staging", "migration")


class _Count:
    """Bytes by use; apart from `HostMemory`, which must not be kept alive by the memory that is counted."""

    def __init__(self) -> None:
        self._lock = threading.RLock()  # a collection inside may free memory
        self._bytes: Counter[str] = Counter()
        self.peak_bytes = 0

    def add(self, use: Use, nbytes: int) -> None:
        with self._lock:
            self._bytes[use] += nbytes
            self.peak_bytes = max(self.peak_bytes, self._bytes.total())

    def by_use(self) -> dict[str, int]:
        with self._lock:
            return {use: self._bytes[use] for use in USES}

    def until_freed(self, owner: object, use: Use, nbytes: int) -> None:
        self.add(use, nbytes)
        finalize(owner, self.add, use, -nbytes).atexit = False


class HostMemory:
    """Allocates host memory and counts it until it is freed. Memory may be freed by any thread."""

    def __init__(self, backend: Backend, device: Device) -> None:
        self._backend = backend
        self._device = device
        self._count = _Count()

    @property
    def bytes_by_use(self) -> dict[str, int]:
        """Bytes that are allocated now, by use."""
        return self._count.by_use()

    @property
    def peak_bytes(self) -> int:
        """The most that was allocated at a time."""
        return self._count.peak_bytes

    def empty(
        self, shape: Sequence[int], dtype: torch.dtype, use: Use, interval_bytes: int | None = None
    ) -> torch.Tensor:
        """Memory that stays for long; zeroed, and reachable for the copy streams where they need it.

        No forked child has it, where the native engine allocates it.

        Args:
            shape: of the tensor.
            dtype: of the tensor.
            use: what it is counted as. "state" is not reached by copies.
            interval_bytes: what the host works on as a unit; None: all of it.

        Raises:
            MemoryError: there is not as much.
            HostEngineError: the host engine has failed.
        """
        nbytes = math.prod(shape) * dtype.itemsize
        if nbytes == 0:
            return torch.empty(tuple(shape), dtype=dtype, device="cpu")
        array = self._backend.allocate(nbytes, interval_bytes or nbytes)
        if use != "state":
            self._device.pin(array)
        self._count.until_freed(array, use, nbytes)
        return torch.from_numpy(array).view(dtype).view(tuple(shape))

    def transient(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Memory for columns that move, given back soon; torch's, so that a forked child has it and may free it."""
        tensor = self._device.host_empty(shape, dtype)
        storage = tensor.untyped_storage()
        self._count.until_freed(storage, "migration", storage.nbytes())
        return tensor
