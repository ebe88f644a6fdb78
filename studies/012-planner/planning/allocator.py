"""The rounding of torch's CUDA caching allocator, replayed over a list of allocations; no code of the planner is used.

Blocks are multiples of 512 bytes. Up to 1 MiB they come from segments of 2 MiB, below 10 MiB from segments of 20 MiB,
else from a segment of their own size rounded up to 2 MiB. The best fitting free block of the same stream is split where
more than 1 MiB (of small ones: 512 bytes) would be left; neighbours that are free become one. No segment is given back.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable
from dataclasses import dataclass, field

MIB = 1 << 20


@dataclass(slots=True, eq=False)
class _Block:
    address: int
    size: int
    pool: tuple[str, bool]
    free: bool
    before: _Block | None = None
    after: _Block | None = None


@dataclass(slots=True)
class CachingAllocator:
    """Reserved and allocated bytes of one device."""

    reserved: int = 0
    allocated: int = 0
    peak_reserved: int = 0
    peak_allocated: int = 0
    _free: dict[tuple[str, bool], list[tuple[int, int]]] = field(default_factory=dict)
    _at: dict[int, _Block] = field(default_factory=dict)
    _next: int = 0

    def malloc(self, nbytes: int, stream: str = "compute") -> _Block:
        """Take a block."""
        size = max(512, -(-nbytes // 512) * 512)
        small = size <= MIB
        pool = (stream, small)
        block = self._fitting(pool, size) or self._segment(pool, size)
        block.free = False
        if block.size - size >= 512 if small else block.size - size > MIB:
            self._split(block, size)
        self.allocated += block.size
        self.peak_allocated = max(self.peak_allocated, self.allocated)
        return block

    def free(self, block: _Block) -> None:
        """Give it back."""
        self.allocated -= block.size
        block.free = True
        if block.before is not None and block.before.free:
            block = self._joined(block.before, block)
        if block.after is not None and block.after.free:
            block = self._joined(block, block.after)
        self._remember(block)

    def _joined(self, first: _Block, second: _Block) -> _Block:
        self._forget(first)
        self._forget(second)
        first.size += second.size
        first.after = second.after
        if second.after is not None:
            second.after.before = first
        return first

    def _fitting(self, pool: tuple[str, bool], size: int) -> _Block | None:
        blocks = self._free.setdefault(pool, [])
        place = bisect_left(blocks, (size, -1))
        if place == len(blocks):
            return None
        return self._at.pop(blocks.pop(place)[1])

    def _segment(self, pool: tuple[str, bool], size: int) -> _Block:
        whole = 2 * MIB if pool[1] else 20 * MIB if size < 10 * MIB else -(-size // (2 * MIB)) * 2 * MIB
        self.reserved += whole
        self.peak_reserved = max(self.peak_reserved, self.reserved)
        block = _Block(self._next, whole, pool, True)
        self._next += whole + 512
        return block

    def _split(self, block: _Block, size: int) -> None:
        rest = _Block(block.address + size, block.size - size, block.pool, True, block, block.after)
        if block.after is not None:
            block.after.before = rest
        block.size, block.after = size, rest
        self._remember(rest)

    def _remember(self, block: _Block) -> None:
        insort(self._free.setdefault(block.pool, []), (block.size, block.address))
        self._at[block.address] = block

    def _forget(self, block: _Block) -> None:
        if self._at.pop(block.address, None) is not None:
            blocks = self._free[block.pool]
            del blocks[bisect_left(blocks, (block.size, block.address))]


def replay(events: Iterable[tuple[int, int, str]]) -> CachingAllocator:
    """Allocate and free as recorded: (key, bytes, stream), bytes 0 where the key is freed."""
    allocator = CachingAllocator()
    blocks: dict[int, _Block] = {}
    for key, nbytes, stream in events:
        if nbytes:
            blocks[key] = allocator.malloc(nbytes, stream)
        elif key in blocks:
            allocator.free(blocks.pop(key))
    return allocator
