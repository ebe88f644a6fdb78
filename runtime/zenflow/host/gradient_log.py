"""The gradient log's memory: allocated as weights start, taken entry by entry, waited for where the host is behind."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress

import torch

from zenflow.config import ZenFlowConfig
from zenflow.device import Arrived, Device, Transfer
from zenflow.errors import HostEngineError
from zenflow.history import History
from zenflow.host.engine import HostEngine
from zenflow.host.log_pool import Extents, LogPool
from zenflow.host.memory import HostMemory
from zenflow.schedule import log_bytes
from zenflow.signals import look_for_signals


class GradientLog:
    """Room for the entries of open windows, and for one window of the largest bucket, which is being applied."""

    def __init__(
        self, memory: HostMemory, engine: HostEngine, device: Device, history: History, config: ZenFlowConfig
    ) -> None:
        self._engine = engine
        self._device = device
        self._history = history
        self._config = config
        self._entries: Sequence[tuple[int, int]] = ()  # number and bytes of an entry of each bucket
        self._buckets = 1

        def allocate(nbytes: int) -> torch.Tensor:
            largest = max((size for _, size in self._entries), default=nbytes)
            return memory.empty((nbytes,), torch.uint8, "log", largest)

        self._pool = LogPool(0, allocate, clock=device.clock, segment_bytes=device.pin_bytes, beside=memory.beside)
        engine.on_failure(self._pool.fail)

    @property
    def allocated_bytes(self) -> int:
        """Bytes that it has now, or that are being allocated."""
        return self._pool.allocated_bytes

    @property
    def spare_bytes(self) -> int:
        """Of these, what windows had that were longer than those planned and reserved."""
        return self._pool.spare_bytes

    def give_up_spare(self) -> None:
        """Give back what is to spare, but for segments that have an entry in them: somebody needs the memory."""
        self._pool.give_up_spare()

    def plan(self, entries: Sequence[tuple[int, int]], buckets: int) -> None:
        """Make room for entries of these buckets, each with its number and (padded) bytes, of `buckets` in all."""
        self._entries, self._buckets = entries, buckets
        self.follow(self._config)

    def follow(self, config: ZenFlowConfig) -> None:
        """Make room for the windows of other knobs; what is too much is kept, since it took long to pin."""
        self._config = config
        self._pool.resize(self.bytes_for(config))

    def reserve(self, config: ZenFlowConfig) -> None:
        """Get the memory for longer windows now; where that takes long, beside training.

        Raises MemoryError if the host has less; where it is got beside training, a later `send` does.
        """
        self._pool.reserve(self.bytes_for(config))

    def fill(self) -> None:
        """Get all the memory that is planned now: a hook of backward is no place to allocate it.

        Raises MemoryError as `reserve`.
        """
        self._pool.fill()

    def bytes_for(self, config: ZenFlowConfig) -> int:
        """Bytes of the log under other knobs, with the buckets that are planned."""
        return log_bytes(config, self._entries, self._buckets)

    def send(self, packed: torch.Tensor) -> tuple[Extents, list[torch.Tensor], Transfer]:
        """Send a step's gradient of a bucket, flat on the device, to the host; blocks while there is no room for it.

        Returns the entry's place, its pieces in the gradient's dtype, and the last of its copies. Raises MemoryError if
        the host has less memory, HostEngineError if its engine has failed.
        """
        place = self._take(packed.nbytes)
        pieces = [view.view(packed.dtype) for view in place.views]
        parts = [packed] if len(pieces) == 1 else packed.split([piece.numel() for piece in pieces])
        transfers: list[Transfer] = []
        try:
            for part, piece in zip(parts, pieces, strict=True):
                transfers.append(self._device.d2h(part, piece))
        except BaseException:
            for transfer in transfers:
                transfer.wait()
            self._pool.give(place)
            raise
        return place, pieces, transfers[-1]

    def write(
        self, numel: int, dtype: torch.dtype, write: Callable[[torch.Tensor], object]
    ) -> tuple[Extents, list[torch.Tensor], Transfer]:
        """As `send`, where the gradient can be written to the host's memory at once.

        `write` is called once with [numel] on the CPU, contiguous, to fill.
        """
        place = self._take(numel * dtype.itemsize)
        try:
            pieces = [view.view(dtype) for view in place.views]
            _write_into(pieces, write)
        except BaseException:
            self._pool.give(place)
            raise
        return place, pieces, Arrived(self._device.mark(), place.nbytes)

    def promise(self, places: Sequence[Extents]) -> None:
        """Say that places will be given back without the training thread's doing."""
        for place in places:
            self._pool.promise(place)

    def give_back(self, places: Sequence[Extents]) -> None:
        """Take back entries that were applied; any thread may call it."""
        for place in places:
            self._pool.give(place)

    def _take(self, nbytes: int) -> Extents:
        with suppress(TimeoutError):
            return self._pool.take(nbytes, timeout_s=0)
        self._engine.hurry()
        with self._history.open.timed(self._device, "host"):
            while True:
                try:
                    place = self._pool.take(nbytes, self._device.clock.poll_s)
                except TimeoutError:
                    look_for_signals()
                    self._engine.check()
                    if not self._engine.alive:
                        raise HostEngineError("the host engine's thread is gone; the gradient log is full") from None
                else:
                    self._device.caught_up(self._engine.last_span)
                    return place


def _write_into(pieces: Sequence[torch.Tensor], write: Callable[[torch.Tensor], object]) -> None:
    """Fill memory that may be in pieces by a function that wants it in one."""
    if len(pieces) == 1:
        write(pieces[0])
        return
    sizes = [piece.numel() for piece in pieces]
    whole = torch.empty(sum(sizes), dtype=pieces[0].dtype, device="cpu")
    write(whole)
    for part, piece in zip(whole.split(sizes), pieces, strict=True):
        piece.copy_(part)
