"""Host memory for logged gradients: what draining one window frees, filling the next one takes.

Entries arrive in another order than those of the window before are given back, so their sizes do not match one to one.
An entry may therefore lie in several pieces; in return, memory never exceeds the planned capacity.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from zenflow.clock import REAL_CLOCK, Clock
from zenflow.errors import ConfigError

ALIGN_BYTES = 64
_FEW_PIECES = 4
_PATIENT_SHARE = 32
"""While memory is promised and less than 1/32 of all is free, a take waits for a place in few pieces.

A host that only just keeps up leaves memory full for ever, and then every take sweeps up the slivers that those before
it left: 20 pieces on average after 200 windows, and growing. Waiting for a little more keeps it near 2. It must be a
little: gradients leave during backward, so what is waited for there is a stall wherever the host has no time to spare
(1/8 and 2 pieces cost 8% of the step at the shortest window without a stall, study 009).
"""
_Piece = tuple[int, int]
"""Address, bytes."""


def padded(nbytes: int, align: int = ALIGN_BYTES) -> int:
    """The bytes that an entry of `nbytes` takes from a pool: the next multiple of `align`."""
    return -(-nbytes // align) * align


@dataclass(frozen=True, slots=True, eq=False)
class Extents:
    """The place of one entry."""

    nbytes: int
    views: tuple[torch.Tensor, ...]
    """1-D uint8, in the entry's order, `nbytes` in all; each but the last is a multiple of the pool's `align`."""
    pieces: tuple[_Piece, ...]
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
        self._changed = clock.condition("room in the gradient log")
        self._error: BaseException | None = None
        self._taken: dict[Extents, bool] = {}  # and whether they were promised
        self._promised = 0
        self._capacity_bytes = self._allocated_bytes = self._taken_bytes = self._peak_bytes = 0
        self._reserved_bytes = 0
        self._segments: list[torch.Tensor] = []
        self._bases: list[int] = []  # one address space, with gaps: only parts of one segment are neighbours
        self._free: list[tuple[int, int]] = []  # ascending: bytes, address
        self._free_bytes_at: dict[int, int] = {}
        self._free_bytes_before: dict[int, int] = {}
        self.resize(capacity_bytes)

    @property
    def capacity_bytes(self) -> int:
        """Most bytes of all segments together."""
        return self._capacity_bytes

    @property
    def allocated_bytes(self) -> int:
        """Bytes of all segments, also of one that is being allocated right now."""
        return self._allocated_bytes

    @property
    def taken_bytes(self) -> int:
        """Padded bytes of all that is taken."""
        return self._taken_bytes

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

        In this order: a free extent of that size, part of the smallest larger one, a new segment, or several of them.
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
                raise TimeoutError(f"no room for {needed} bytes in {timeout_s} s, {self._taken_bytes} bytes are taken")
            pieces, fresh = choice
            for address, size in pieces:
                if (free := self._remove(address)) > size:
                    self._add(address + size, free - size)
            self._taken_bytes += needed
            self._allocated_bytes += fresh
        if fresh:
            pieces.append((self._grow(fresh, pieces), fresh))
        with self._changed:
            extents = Extents(nbytes, self._views(pieces, nbytes), tuple(pieces))
            self._taken[extents] = False
            return extents

    def promise(self, extents: Extents) -> None:
        """Say that extents come back even while their taker waits in `take`. ValueError: they are not taken."""
        with self._changed:
            self._promised += not self._known(extents)
            self._taken[extents] = True

    def give(self, extents: Extents) -> None:
        """Give an entry's place back. ValueError: it is not taken from this pool, or was given back before."""
        with self._changed:
            self._promised -= self._known(extents)
            del self._taken[extents]
            self._release(extents.pieces)

    def resize(self, capacity_bytes: int) -> None:
        """Change the capacity; segments beyond a smaller one go when all is free. ConfigError: it is negative."""
        if capacity_bytes < 0:
            raise ConfigError(f"capacity_bytes is {capacity_bytes}, allowed is an integer >= 0")
        with self._changed:
            self._capacity_bytes = capacity_bytes
            self._reserved_bytes = 0
            self._trim()
            self._changed.notify_all()

    def reserve(self, nbytes: int) -> None:
        """Allocate now, so that segments have as much together, and keep it until `resize`; for the taking thread."""
        with self._changed:
            self._reserved_bytes = padded(nbytes, self._align)
            self._trim()
            fresh = max(0, self._reserved_bytes - self._allocated_bytes)
            self._allocated_bytes += fresh
            self._taken_bytes += fresh
        if fresh:
            base = self._grow(fresh, [])
            with self._changed:
                self._release([(base, fresh)])

    def fail(self, error: BaseException) -> None:
        """Let every waiting and later take raise an error (the first one given); `give` still works."""
        with self._changed:
            self._error = self._error or error
            self._changed.notify_all()

    def clear(self) -> None:
        """Drop all segments. ValueError: something is taken, so a copy may still write to it."""
        with self._changed:
            if self._taken_bytes:
                raise ValueError(f"{self._taken_bytes} bytes are taken, allowed is to clear a pool that is all free")
            self._drop()

    def _needed(self, nbytes: int) -> int:
        if nbytes < 1:
            raise ConfigError(f"nbytes is {nbytes}, allowed is an integer >= 1")
        return padded(nbytes, self._align)

    def _known(self, extents: Extents) -> bool:
        if extents not in self._taken:
            raise ValueError(f"extents of {extents.nbytes} bytes are not taken from this pool, or were given back")
        return self._taken[extents]

    def _choose(self, needed: int) -> tuple[list[_Piece], int] | None:
        """Parts of free extents to take, and bytes of a new segment; None as long as a take has to wait."""
        if self._error is not None:
            raise self._error
        most = max(self._capacity_bytes // self._align * self._align, self._allocated_bytes)
        if needed > most:
            raise ConfigError(f"nbytes is {needed} (padded), allowed are at most the pool's {most} bytes")
        room, unused = most - self._allocated_bytes, most - self._taken_bytes
        if unused < needed:
            return None
        pieces: list[_Piece] = []
        fresh, left, rest = 0, needed, len(self._free)  # from `rest` on, extents are taken as a whole
        while left:
            fits = bisect_left(self._free, (left, -1))
            if fits < rest:
                pieces.append((self._free[fits][1], left))
                break
            if room >= left:
                fresh = left
                break
            rest -= 1
            size, address = self._free[rest]
            pieces.append((address, size))
            left -= size
        few = len(pieces) + bool(fresh) <= _FEW_PIECES
        return (pieces, fresh) if few or not self._promised or unused * _PATIENT_SHARE >= most else None

    def _grow(self, nbytes: int, pieces: list[_Piece]) -> int:
        """Allocate a segment that is already counted, without the lock as it may take long; gives its address."""
        try:
            segment = self._allocate(nbytes)
            if segment.shape != (nbytes,) or segment.dtype != torch.uint8 or segment.device.type != "cpu":
                raise ValueError(f"allocate gave {segment.dtype} {list(segment.shape)}, allowed is uint8 [{nbytes}]")
        except BaseException:
            with self._changed:
                self._allocated_bytes -= nbytes
                self._taken_bytes -= nbytes
                self._release(pieces)
            raise
        with self._changed:
            base = self._bases[-1] + self._segments[-1].numel() + self._align if self._bases else 0
            self._bases.append(base)
            self._segments.append(segment)
            self._peak_bytes = max(self._peak_bytes, self._allocated_bytes)
        return base

    def _views(self, pieces: list[_Piece], nbytes: int) -> tuple[torch.Tensor, ...]:
        views = []
        for address, size in pieces:
            number = bisect_right(self._bases, address) - 1
            views.append(self._segments[number].narrow(0, address - self._bases[number], min(size, nbytes)))
            nbytes -= size
        return tuple(views)

    def _trim(self) -> None:
        if not self._taken_bytes and self._allocated_bytes > max(self._capacity_bytes, self._reserved_bytes):
            self._drop()

    def _drop(self) -> None:
        for part in (self._segments, self._bases, self._free, self._free_bytes_at, self._free_bytes_before):
            part.clear()
        self._allocated_bytes = 0

    def _release(self, pieces: Sequence[_Piece]) -> None:
        for address, size in pieces:
            self._taken_bytes -= size
            low, high = address, address + size
            if high in self._free_bytes_at:
                high += self._remove(high)
            if low in self._free_bytes_before:
                low -= self._remove(low - self._free_bytes_before[low])
            self._add(low, high - low)
        self._trim()
        self._changed.notify_all()

    def _add(self, address: int, size: int) -> None:
        insort(self._free, (size, address))
        self._free_bytes_at[address] = size
        self._free_bytes_before[address + size] = size

    def _remove(self, address: int) -> int:
        size = self._free_bytes_at.pop(address)
        del self._free_bytes_before[address + size]
        del self._free[bisect_left(self._free, (size, address))]
        return size
