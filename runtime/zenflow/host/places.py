"""Where entries of the gradient log lie, in numbers: which bytes are free, and which of them an entry takes.

Entries arrive in another order than those of the window before are given back, so their sizes do not match one to one.
An entry may therefore lie in several pieces; in return, memory never exceeds the planned capacity.
"""

from __future__ import annotations

import os
import weakref
from bisect import bisect_left, insort
from collections.abc import Callable, Sequence
from typing import Any

from zenflow.errors import ConfigError, UnsupportedError


class OwnProcess:
    """The process that made this object."""

    def __init__(self) -> None:
        self._pid = os.getpid()

    @property
    def is_this(self) -> bool:
        """Whether it is the calling process, and not a child that was forked from it."""
        return os.getpid() == self._pid

    def require(self) -> None:
        """Raise UnsupportedError in a forked child."""
        if not self.is_this:
            raise UnsupportedError(
                f"process {os.getpid()} was forked from process {self._pid}, which alone has the optimizer's state and "
                "threads: here the model's weights can be read, nothing else"
            )


def finalize(owner: object, end: Callable[..., object], *arguments: Any) -> weakref.finalize[Any, Any]:
    """As `weakref.finalize`, for what a forked child has not got and must not end: there it does nothing."""
    return weakref.finalize(owner, _unless_forked, OwnProcess(), end, arguments)


def _unless_forked(process: OwnProcess, end: Callable[..., object], arguments: tuple[Any, ...]) -> None:
    if process.is_this:
        end(*arguments)


ALIGN_BYTES = 64
Piece = tuple[int, int]  # address, bytes
_FEW_PIECES = 4
_PATIENT_SHARE = 32
"""While memory is promised and less than 1/32 of all is free, a take waits for a place in few pieces.

A host that only just keeps up leaves memory full for ever, and then every take sweeps up the slivers that those before
it left: 20 pieces on average after 200 windows, and growing. Waiting for a little more keeps it near 2. It must be a
little: gradients leave during backward, so what is waited for there is a stall wherever the host has no time to spare
(1/8 and 2 pieces cost 8% of the step at the shortest window without a stall, study 009).
"""


def padded(nbytes: int, align: int = ALIGN_BYTES) -> int:
    """The bytes that an entry of `nbytes` takes: the next multiple of `align`."""
    return -(-nbytes // align) * align


def tight(capacity_bytes: int, free_bytes: int) -> bool:
    """Whether so little is free that an entry which would lie in many pieces waits for more."""
    return free_bytes * _PATIENT_SHARE < capacity_bytes


class Places:
    """Free and taken bytes of segments that are made as they are needed; knows nothing of memory and threads."""

    def __init__(self, capacity_bytes: int, align: int = ALIGN_BYTES) -> None:
        """Begin without any segment; `capacity_bytes` is most of all together, `align` where alone entries are cut."""
        self.capacity_bytes = capacity_bytes
        self.allocated_bytes = 0  # of all segments, also of those that are being made
        self.coming_bytes = 0  # of segments that are being made for nobody in particular
        self.taken_bytes = 0
        self.older_bytes = 0
        """Of what is taken, that of entries from before the capacity fell: they do not count against it."""
        self.promised = 0  # entries that are given back without their taker's doing
        self._align = align
        self._end = 0  # one address space, with gaps: only parts of one segment are neighbours
        self._free: list[tuple[int, int]] = []  # ascending: bytes, address
        self._free_bytes_at: dict[int, int] = {}
        self._free_bytes_before: dict[int, int] = {}

    def choose(self, needed: int) -> tuple[list[Piece], int] | None:
        """Parts of free extents to take, and bytes of a new segment; None as long as a take has to wait.

        In this order: a free extent of that size, part of the smallest larger one, a new segment, or several of them.
        Raises ConfigError if `needed` (padded) is more than there can ever be.
        """
        most = self.capacity_bytes // self._align * self._align
        if needed > most:
            raise ConfigError(f"nbytes is {needed} (padded); it must be at most the pool's {most} bytes")
        room = max(0, most - self.allocated_bytes)
        free = room + self.allocated_bytes - self.coming_bytes - self.taken_bytes
        unused = min(free, most - (self.taken_bytes - self.older_bytes))
        if unused < needed:
            return None
        pieces: list[Piece] = []
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
        return (pieces, fresh) if few or not self.promised or not tight(most, unused) else None

    def take(self, pieces: Sequence[Piece], fresh: int) -> None:
        """Take what was chosen; a new segment is only counted until `add_segment`."""
        for address, size in pieces:
            if (free := self._remove(address)) > size:
                self._add(address + size, free - size)
            self.taken_bytes += size
        self.count_segment(fresh)

    def count_segment(self, nbytes: int) -> None:
        """Count a segment that is being made, all of it taken; negative where it could not be made."""
        self.allocated_bytes += nbytes
        self.taken_bytes += nbytes

    def expect(self, nbytes: int) -> None:
        """Count segments that are being made and will be free; negative where they could not be made."""
        self.allocated_bytes += nbytes
        self.coming_bytes += nbytes

    def add_segment(self, nbytes: int, *, expected: bool = False) -> int:
        """The address of a segment that was counted; one that was expected is free from now on."""
        base, self._end = self._end, self._end + nbytes + self._align
        if expected:
            self.coming_bytes -= nbytes
            self._add(base, nbytes)
        return base

    def drop_segment(self, base: int, nbytes: int) -> bool:
        """Forget a segment, if nothing of it is taken; whether it is gone."""
        if self._free_bytes_at.get(base) != nbytes:
            return False
        self._remove(base)
        self.allocated_bytes -= nbytes
        return True

    def give(self, pieces: Sequence[Piece]) -> None:
        for address, size in pieces:
            self.taken_bytes -= size
            low, high = address, address + size
            if high in self._free_bytes_at:
                high += self._remove(high)
            if low in self._free_bytes_before:
                low -= self._remove(low - self._free_bytes_before[low])
            self._add(low, high - low)

    def _add(self, address: int, size: int) -> None:
        insort(self._free, (size, address))
        self._free_bytes_at[address] = size
        self._free_bytes_before[address + size] = size

    def _remove(self, address: int) -> int:
        size = self._free_bytes_at.pop(address)
        del self._free_bytes_before[address + size]
        del self._free[bisect_left(self._free, (size, address))]
        return size
