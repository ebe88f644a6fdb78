"""The host memory of the deferred columns: who allocates it, and how much there is of it."""

from __future__ import annotations

import logging
import math
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Literal, TypeVar

import torch

from zenflow.device import Device
from zenflow.errors import HostEngineError
from zenflow.host.backend import Backend
from zenflow.host.places import OwnProcess, finalize

_T = TypeVar("_T")
_logger = logging.getLogger("zenflow")

_THREADS = 2
"""One may be at a long log while another gets what a step waits for."""

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


class _Busy:
    """When threads were getting memory beside training, and how much of it they pinned."""

    def __init__(self, device: Device) -> None:
        self._clock = device.clock
        self._lock = threading.Lock()
        self._working = 0
        self._since_s = self._step_s = self._told_s = 0.0
        self._bytes = 0

    def pinned(self, nbytes: int) -> None:
        with self._lock:
            self._bytes += nbytes

    def working(self, change: Literal[1, -1]) -> None:
        with self._lock:
            self._count_time()
            self._working += change

    def end_step(self) -> float:
        with self._lock:
            self._count_time()
            seconds, self._step_s = self._step_s, 0.0
            self._told_s += seconds
            if self._bytes and not self._working:
                _logger.info("pinned %.2f GB of host memory in %.2f s beside training", self._bytes / 1e9, self._told_s)
                self._bytes, self._told_s = 0, 0.0
            return seconds

    def _count_time(self) -> None:
        now_s = self._clock.now()
        self._step_s += now_s - self._since_s if self._working else 0.0
        self._since_s = now_s


class HostMemory:
    """Allocates host memory and counts it until it is freed. Any thread may call it, and free memory."""

    def __init__(self, backend: Backend, device: Device) -> None:
        self._backend = backend
        self._device = device
        self._count = _Count()
        self._busy = _Busy(device)
        self._process = OwnProcess()
        self._threads: ThreadPoolExecutor | None = None
        self._closed = False

    @property
    def bytes_by_use(self) -> dict[str, int]:
        return self._count.by_use()

    @property
    def peak_bytes(self) -> int:
        return self._count.peak_bytes

    def empty(
        self, shape: Sequence[int], dtype: torch.dtype, use: Use, interval_bytes: int | None = None
    ) -> torch.Tensor:
        """Memory that stays for long; zeroed, and, but for "state", reachable for the copy streams.

        No forked child has it, where the native engine allocates it. `interval_bytes` is what the host works on as a
        unit; None: all of it. Raises MemoryError if there is not as much, HostEngineError if the engine has failed or
        is closed.
        """
        if self._closed:
            raise HostEngineError("the host engine is closed, and gets no more memory")
        nbytes = math.prod(shape) * dtype.itemsize
        if nbytes == 0:
            return torch.empty(tuple(shape), dtype=dtype, device="cpu")
        array = self._backend.allocate(nbytes, interval_bytes or nbytes)
        if use != "state" and self._device.pin_bytes is not None:
            self._device.pin(array)
            self._busy.pinned(nbytes)
        self._count.until_freed(array, use, nbytes)
        return torch.from_numpy(array).view(dtype).view(tuple(shape))

    def beside(self, work: Callable[[], _T]) -> Future[_T]:
        """Get memory in another thread where it has to be pinned, which may take seconds; else at once.

        `work` calls `empty`. Done at once, it raises here what it raises, else where its result is asked for.
        """
        if self._device.pin_bytes is None:
            done: Future[_T] = Future()
            done.set_result(work())
            return done
        if self._threads is None:
            self._threads = ThreadPoolExecutor(_THREADS, "zenflow-pin", self._device.enter_thread)
        self._busy.working(1)  # also until a thread has time for it: the step that ends meanwhile is not like others
        return self._threads.submit(self._timed, work)

    def _timed(self, work: Callable[[], _T]) -> _T:
        try:
            return work()
        finally:
            self._busy.working(-1)

    def end_step(self) -> float:
        """Seconds of this step in which memory was got beside it; a line of the log when all of that is there."""
        return self._busy.end_step()

    def close(self) -> None:
        """Get nothing more; waits for nobody."""
        self._closed = True
        if self._threads is not None and self._process.is_this:
            self._threads.shutdown(wait=False, cancel_futures=True)

    def transient(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Memory for columns that move, given back soon; torch's, so that a forked child has it and may free it."""
        tensor = self._device.host_empty(shape, dtype)
        storage = tensor.untyped_storage()
        self._count.until_freed(storage, "migration", storage.nbytes())
        return tensor
