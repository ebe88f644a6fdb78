"""Host memory for logged gradients: what draining one window frees, filling the next one takes."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from zenflow.clock import REAL_CLOCK, Clock
from zenflow.errors import ConfigError
from zenflow.host.places import ALIGN_BYTES, Piece, Places, padded


def _at_once(work: Callable[[], None]) -> None:
    work()


@dataclass(frozen=True, slots=True, eq=False)
class Extents:
    """The place of one entry."""

    nbytes: int
    views: tuple[torch.Tensor, ...]
    """1-D uint8, in the entry's order, `nbytes` in all; each but the last is a multiple of the pool's `align`."""
    pieces: tuple[Piece, ...]  # where the pool has them


class LogPool:
    """Owns segments of host memory and hands out parts of them. Any thread may call it.

    If all that is taken is given back in the end, then every take of at most the capacity succeeds in the end. Memory
    beyond the capacity is kept, though not handed out, until `give_up_spare`: it may have taken long to get.
    """

    def __init__(
        self,
        capacity_bytes: int,
        allocate: Callable[[int], torch.Tensor],
        *,
        align: int = ALIGN_BYTES,
        clock: Clock = REAL_CLOCK,
        segment_bytes: int | None = None,
        beside: Callable[[Callable[[], None]], object] = _at_once,
    ):
        """Begin without any memory. ConfigError: a negative capacity.

        `capacity_bytes`, to be planned with `padded` sizes, is most that is handed out; entries are cut only at
        multiples of `align` bytes, at least 1. `allocate` gives a new 1-D uint8 CPU tensor of so many bytes,
        `segment_bytes` at most (a multiple of `align`; None: there is no limit). `beside` calls what `fill` and
        `reserve` have to do, perhaps in another thread; takes wait for it then.
        """
        self._allocate = allocate
        self._align = align
        self._segment_bytes = segment_bytes
        self._beside = beside
        self._places = Places(0, align)
        self._changed = clock.condition("room in the gradient log")
        self._error: BaseException | None = None
        self._taken: dict[Extents, bool] = {}  # and whether they were promised
        self._older: set[Extents] = set()  # taken before the capacity fell
        self.peak_allocated_bytes = self._reserved_bytes = 0
        self._segments: list[torch.Tensor] = []
        self._bases: list[int] = []  # ascending: their addresses
        self.resize(capacity_bytes)

    @property
    def capacity_bytes(self) -> int:
        return self._places.capacity_bytes

    @property
    def allocated_bytes(self) -> int:
        """Bytes of all segments, also of those that are being allocated right now."""
        return self._places.allocated_bytes

    @property
    def spare_bytes(self) -> int:
        """Of these, what is there already and neither planned nor reserved."""
        wanted = max(padded(self.capacity_bytes, self._align), self._reserved_bytes)
        return max(0, self.allocated_bytes - self._places.coming_bytes - wanted)

    @property
    def taken_bytes(self) -> int:
        """Padded bytes of all that is taken."""
        return self._places.taken_bytes

    def take(self, nbytes: int, timeout_s: float | None = None) -> Extents:
        """Find a place for an entry; blocks until there is one, at most `timeout_s` seconds (None: for ever).

        Raises ConfigError if `nbytes` is below 1 or more than the pool can ever have, TimeoutError if not enough was
        given back in time, or the error given to `fail`, or what `allocate` raised.
        """
        needed = self._needed(nbytes)
        with self._changed:
            choice = self._changed.wait_for(lambda: self._choose(needed), timeout_s)
            if choice is None:
                raise TimeoutError(f"no room for {needed} bytes in {timeout_s} s, {self.taken_bytes} bytes are taken")
            pieces, fresh = choice
            self._places.take(pieces, fresh)
            if not fresh:
                return self._extents(nbytes, pieces)
        self._grow(fresh, pieces)
        with self._changed:
            return self._extents(nbytes, pieces)

    def _extents(self, nbytes: int, pieces: list[Piece]) -> Extents:
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
            if extents in self._older:
                self._older.remove(extents)
                self._places.older_bytes -= padded(extents.nbytes, self._align)
            self._release(extents.pieces)

    def resize(self, capacity_bytes: int) -> None:
        """Change the capacity; segments beyond a smaller one stay. ConfigError: it is negative.

        What is taken when the capacity falls does not count against it until it is given back.
        """
        if capacity_bytes < 0:
            raise ConfigError.of("capacity_bytes", capacity_bytes, "an integer >= 0")
        with self._changed:
            if capacity_bytes < self._places.capacity_bytes:
                self._older = set(self._taken)
                self._places.older_bytes = sum(padded(extents.nbytes, self._align) for extents in self._older)
            self._places.capacity_bytes = capacity_bytes
            self._reserved_bytes = 0
            self._changed.notify_all()

    def reserve(self, nbytes: int) -> None:
        """Allocate now, so that segments have as much together, for a capacity to come."""
        with self._changed:
            self._reserved_bytes = padded(nbytes, self._align)
        self._allocate_up_to(self._reserved_bytes)

    def fill(self) -> None:
        """Allocate the whole capacity now, so that no later take does."""
        self._allocate_up_to(self.capacity_bytes // self._align * self._align)

    def give_up_spare(self) -> int:
        """Drop segments in which nothing is taken, as far as they are to spare; how many bytes that were."""
        with self._changed:
            before = self.allocated_bytes
            for number in reversed(range(len(self._segments))):
                base, nbytes = self._bases[number], len(self._segments[number])
                if nbytes <= self.spare_bytes and self._places.drop_segment(base, nbytes):
                    del self._bases[number], self._segments[number]
            return before - self.allocated_bytes

    def fail(self, error: BaseException) -> None:
        """Let every waiting and later take raise an error (the first one given); `give` still works."""
        with self._changed:
            self._error = self._error or error
            self._changed.notify_all()

    def _allocate_up_to(self, nbytes: int) -> None:
        with self._changed:
            fresh = max(0, nbytes - self.allocated_bytes)
            self._places.expect(fresh)
        if fresh:
            self._beside(partial(self._allocate_expected, fresh))

    def _allocate_expected(self, nbytes: int) -> None:
        """Allocate what is expected. Where that fails nothing is expected any more: a take that needs it tries anew."""
        try:
            while nbytes:
                size = min(nbytes, self._segment_bytes or nbytes)
                self._add_segment(size, expected=True)
                nbytes -= size
        finally:
            with self._changed:
                self._places.expect(-nbytes)
                self._changed.notify_all()

    def _needed(self, nbytes: int) -> int:
        if nbytes < 1:
            raise ConfigError.of("nbytes", nbytes, "an integer >= 1")
        return padded(nbytes, self._align)

    def _known(self, extents: Extents) -> bool:
        if extents not in self._taken:
            raise ValueError(f"extents of {extents.nbytes} bytes are not taken from this pool, or were given back")
        return self._taken[extents]

    def _choose(self, needed: int) -> tuple[list[Piece], int] | None:
        if self._error is not None:
            raise self._error
        return self._places.choose(needed)

    def _grow(self, nbytes: int, pieces: list[Piece]) -> None:
        """Allocate what is already counted, and add it to an entry's pieces, which are freed where that fails."""
        try:
            while nbytes:
                size = min(nbytes, self._segment_bytes or nbytes)
                pieces.append((self._add_segment(size), size))
                nbytes -= size
        except BaseException:
            with self._changed:
                self._places.count_segment(-nbytes)
                self._release(pieces)
            raise

    def _add_segment(self, nbytes: int, *, expected: bool = False) -> int:
        """Allocate a segment that is counted, without the lock as it may take long; gives its address."""
        segment = self._allocate(nbytes)
        if segment.shape != (nbytes,) or segment.dtype != torch.uint8 or segment.device.type != "cpu":
            raise ValueError(f"allocate gave {segment.dtype} {list(segment.shape)}; it must give uint8 [{nbytes}]")
        with self._changed:
            base = self._places.add_segment(nbytes, expected=expected)
            self._bases.append(base)
            self._segments.append(segment)
            self.peak_allocated_bytes = max(self.peak_allocated_bytes, self.allocated_bytes)
            self._changed.notify_all()
        return base

    def _views(self, pieces: list[Piece], nbytes: int) -> tuple[torch.Tensor, ...]:
        views = []
        for address, size in pieces:
            number = bisect_right(self._bases, address) - 1
            views.append(self._segments[number].narrow(0, address - self._bases[number], min(size, nbytes)))
            nbytes -= size
        return tuple(views)

    def _release(self, pieces: Sequence[Piece]) -> None:
        self._places.give(pieces)
        self._changed.notify_all()
