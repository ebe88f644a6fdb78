"""The gradient log's memory: planned as weights start, taken entry by entry, waited for where the host is behind."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from zenflow.device import Device, Transfer
from zenflow.errors import HostEngineError
from zenflow.history import History
from zenflow.host.engine import HostEngine
from zenflow.host.log_pool import Extents, LogPool, padded
from zenflow.host.memory import HostMemory

_POLL_S = 0.2


class GradientLog:
    """Room for S entries of every bucket, and S of the largest: what draining one window frees, the next one fills."""

    def __init__(
        self, memory: HostMemory, engine: HostEngine, device: Device, history: History, update_interval: int
    ) -> None:
        """Begin without any room.

        Args:
            memory: where it comes from.
            engine: whose work gives room back.
            device: told when it waits.
            history: receives the waits.
            update_interval: S.
        """
        self._engine = engine
        self._device = device
        self._history = history
        self._update_interval = update_interval
        self._entries_bytes = 0
        self._largest_bytes = 0
        self._pool = LogPool(0, lambda nbytes: memory.empty((nbytes,), torch.uint8, "log"))
        engine.on_failure(self._pool.fail)

    def plan(self, entry_bytes: int, *, instead_of: int = 0) -> None:
        """Make room for one more bucket.

        Args:
            entry_bytes: of one step's gradient.
            instead_of: what was planned for that bucket before.
        """
        self._entries_bytes += padded(entry_bytes) - padded(instead_of)
        self._largest_bytes = max(self._largest_bytes, padded(entry_bytes))
        self._pool.resize(self._update_interval * (self._entries_bytes + self._largest_bytes))

    def capacity_for(self, entries_bytes: Sequence[int]) -> int:
        """Bytes of the log where each bucket's entry takes that many (`padded`)."""
        return self._update_interval * (sum(entries_bytes) + max(entries_bytes))

    def send(self, packed: torch.Tensor) -> tuple[Extents, list[torch.Tensor], Transfer]:
        """Send a step's gradient of a bucket to the host; blocks while there is no room for it.

        Args:
            packed: [n, rows] on the device, contiguous.

        Returns:
            The entry's place, its pieces in the gradient's dtype, and the last of its copies.

        Raises:
            MemoryError: the host has less memory.
            HostEngineError: the host engine has failed.
        """
        place = self._take(packed.nbytes)
        pieces = [view.view(packed.dtype) for view in place.views]
        parts = packed.view(-1).split([piece.numel() for piece in pieces])
        transfers = [self._device.d2h(part, piece) for part, piece in zip(parts, pieces, strict=True)]
        return place, pieces, transfers[-1]

    def promise(self, places: Sequence[Extents]) -> None:
        """Say that places will be given back without the training thread's doing."""
        for place in places:
            self._pool.promise(place)

    def give_back(self, places: Sequence[Extents]) -> None:
        """Take back entries that were applied; any thread may call it."""
        for place in places:
            self._pool.give(place)

    def _take(self, nbytes: int) -> Extents:
        if self._pool.ready(nbytes):
            return self._pool.take(nbytes)
        with self._history.open.timed(self._device, "host"):
            while True:
                try:
                    place = self._pool.take(nbytes, _POLL_S)
                except TimeoutError:
                    self._engine.check()
                    if not self._engine.alive:
                        raise HostEngineError("the host engine's thread is gone; the gradient log is full") from None
                else:
                    self._device.caught_up(self._engine.last_span)
                    return place
