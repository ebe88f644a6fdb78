"""Host memory for logged gradients: what draining one window frees, filling the next one takes."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from zenflow.clock import REAL_CLOCK, Clock
from zenflow.errors import ConfigError
from zenflow.host.places import ALIGN_BYTES, Piece, Places, padded


@dataclass(frozen=True, slots=True, eq=False)
class Extents:
    """The place of one entry."""

    nbytes: int
    views: tuple[torch.Tensor, ...]
    """1-D uint8, in the entry's order, `nbytes` in all; each but the last is a multiple of the pool's `align`."""
    pieces: tuple[Piece, ...]
    """Where the pool has them."""


class LogPool:
    """Owns segments of host memory and hands out parts of them. Any thread may call it.

    If all that is taken is given back in the end, then every take of at most the capacity succeeds in the end.
    """

    def __init__(
        self,
        capacity_bytes: int,
        allocate: Callable[[int], torch.Tensor],
        *,
        align: int = ALIGN_BYTES,
        clock: Clock = REAL_CLOCK,
    ):
        """Begin without any memory. ConfigError: a negative capacity.

        Args:
            capacity_bytes: most bytes of all segments together; plan it with `padded` sizes.
            allocate: gives a new 1-D uint8 CPU tensor of that many bytes; called by the thread that takes.
            align: entries are cut only at multiples of this many bytes, at least 1.
            clock: by which takes wait.
        """
        self._allocate = allocate
        self._align = align
        self._places = Places(0, align)
        self._changed = clock.condition("room in the gradient log")
        self._error: BaseException | None = None
        self._taken: dict[Extents, bool] = {}  # and whether they were promised
        self._peak_bytes = self._reserved_bytes = 0
        self._segments: list[torch.Tensor] = []
        self._bases: list[int] = []  # ascending: their addresses
        self.resize(capacity_bytes)

    @property
    def capacity_bytes(self) -> int:
        """Most bytes of all segments together."""
        return self._places.capacity_bytes

    @property
    def allocated_bytes(self) -> int:
        """Bytes of all segments, also of one that is being allocated right now."""
        return self._places.allocated_bytes

    @property
    def taken_bytes(self) -> int:
        """Padded bytes of all that is taken."""
        return self._places.taken_bytes

    @property
    def peak_allocated_bytes(self) -> int:
        """Most bytes that the segments ever had together."""
        return self._peak_bytes

    def ready(self, nbytes: int) -> bool:
        """Whether `take` would return without waiting; raises as it does. Other threads' gives leave it true."""
        with self._changed:
            return self._choose(self._needed(nbytes)) is not None

    def take(self, nbytes: int, timeout_s: float | None = None) -> Extents:
        """Find a place for an entry; blocks until there is one.

        `timeout_s` is the longest wait in seconds; None waits for ever.

        Raises:
            ConfigError: `nbytes` is below 1, or more than the pool can ever have.
            TimeoutError: not enough was given back in time.
            BaseException: the error given to `fail`, or what `allocate` raised.
        """
        needed = self._needed(nbytes)
        with self._changed:
            choice = self._changed.wait_for(lambda: self._choose(needed), timeout_s)
            if choice is None:
                raise TimeoutError(f"no room for {needed} bytes in {timeout_s} s, {self.taken_bytes} bytes are taken")
            pieces, fresh = choice
            self._places.take(pieces, fresh)
        if fresh:
            pieces.append((self._grow(fresh, pieces), fresh))
        with self._changed:
            extents = Extents(nbytes, self._views(pieces, nbytes), tuple(pieces))
            self._taken[extents] = False
            return extents

    def promise(self, extents: Extents) -> None:
        """Say that extents come back even while their taker waits in `take`. ValueError: they are not taken."""
        with self._changed:
            self._places.promised += not self._known(extents)
            self._taken[extents] = True

    def give(self, extents: Extents) -> None:
        """Give an entry's place back. ValueError: it is not taken from this pool, or was given back before."""
        with self._changed:
            self._places.promised -= self._known(extents)
            del self._taken[extents]
            self._release(extents.pieces)

    def resize(self, capacity_bytes: int) -> None:
        """Change the capacity; segments beyond a smaller one go when all is free. ConfigError: it is negative."""
        if capacity_bytes < 0:
            raise ConfigError(f"capacity_bytes is {capacity_bytes}, allowed is an integer >= 0")
        with self._changed:
            self._places.capacity_bytes = capacity_bytes
            self._reserved_bytes = 0
            self._trim()
            self._changed.notify_all()

    def reserve(self, nbytes: int) -> None:
        """Allocate now, so that segments have as much together, and keep it until `resize`; for the taking thread."""
        with self._changed:
            self._reserved_bytes = padded(nbytes, self._align)
            self._trim()
        self._allocate_up_to(self._reserved_bytes)

    def fill(self) -> None:
        """Allocate the whole capacity now, so that no later take does; for the taking thread."""
        self._allocate_up_to(self.capacity_bytes // self._align * self._align)

    def fail(self, error: BaseException) -> None:
        """Let every waiting and later take raise an error (the first one given); `give` still works."""
        with self._changed:
            self._error = self._error or error
            self._changed.notify_all()

    def clear(self) -> None:
        """Drop all segments. ValueError: something is taken, so a copy may still write to it."""
        with self._changed:
            if self.taken_bytes:
                raise ValueError(f"{self.taken_bytes} bytes are taken, allowed is to clear a pool that is all free")
            self._drop()

    def _allocate_up_to(self, nbytes: int) -> None:
        with self._changed:
            fresh = max(0, nbytes - self.allocated_bytes)
            self._places.count_segment(fresh)
        if fresh:
            base = self._grow(fresh, [])
            with self._changed:
                self._release([(base, fresh)])

    def _needed(self, nbytes: int) -> int:
        if nbytes < 1:
            raise ConfigError(f"nbytes is {nbytes}, allowed is an integer >= 1")
        return padded(nbytes, self._align)

    def _known(self, extents: Extents) -> bool:
        if extents not in self._taken:
            raise ValueError(f"extents of {extents.nbytes} bytes are not taken from this pool, or were given back")
        return self._taken[extents]

    def _choose(self, needed: int) -> tuple[list[Piece], int] | None:
        if self._error is not None:
            raise self._error
        return self._places.choose(needed)

    def _grow(self, nbytes: int, pieces: list[Piece]) -> int:
        """Allocate a segment that is already counted, without the lock as it may take long; gives its address."""
        try:
            segment = self._allocate(nbytes)
            if segment.shape != (nbytes,) or segment.dtype != torch.uint8 or segment.device.type != "cpu":
                raise ValueError(f"allocate gave {segment.dtype} {list(segment.shape)}, allowed is uint8 [{nbytes}]")
        except BaseException:
            with self._changed:
                self._places.count_segment(-nbytes)
                self._release(pieces)
            raise
        with self._changed:
            base = self._places.add_segment(nbytes)
            self._bases.append(base)
            self._segments.append(segment)
            self._peak_bytes = max(self._peak_bytes, self.allocated_bytes)
        return base

    def _views(self, pieces: list[Piece], nbytes: int) -> tuple[torch.Tensor, ...]:
        views = []
        for address, size in pieces:
            number = bisect_right(self._bases, address) - 1
            views.append(self._segments[number].narrow(0, address - self._bases[number], min(size, nbytes)))
            nbytes -= size
        return tuple(views)

    def _trim(self) -> None:
        if not self.taken_bytes and self.allocated_bytes > max(self.capacity_bytes, self._reserved_bytes):
            self._drop()

    def _drop(self) -> None:
        self._places.drop()
        self._segments.clear()
        self._bases.clear()

    def _release(self, pieces: Sequence[Piece]) -> None:
        self._places.give(pieces)
        self._trim()
        self._changed.notify_all()
