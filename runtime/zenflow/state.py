"""fp32 state of columns: master, moments and update count, one row per column, wherever the column lives."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from zenflow.rules import Hyper, Rule

# Elements that the eager rule works on at a time, so that its operands stay in a core's cache.
CHUNK_ELEMENTS = 1 << 16


class ColumnState:
    """State of n columns of `rows` elements each; the only owner of these numbers.

    `master` and each of `moments` are [n, rows] fp32, `count` is [n] int32.

    Args:
        initial: what each moment starts with; None: zeros.
    """

    __slots__ = ("count", "master", "moments")

    def __init__(self, master: torch.Tensor, moments: int, initial: Sequence[float] | None = None) -> None:
        assert initial is None or len(initial) == moments
        self.master = master
        self.moments = tuple(torch.zeros_like(master) for _ in range(moments))
        for moment, value in zip(self.moments, initial or (), strict=False):
            if value:  # memory that stays zero is not even touched
                moment.fill_(value)
        self.count = torch.zeros(master.shape[0], dtype=torch.int32, device=master.device)

    @classmethod
    def empty(cls, columns: int, rows: int, moments: int, device: torch.device) -> ColumnState:
        """State of that many columns whose numbers are still to be filled in."""
        streams = [torch.empty((columns, rows), dtype=torch.float32, device=device) for _ in range(1 + moments)]
        return cls.over(streams, torch.empty(columns, dtype=torch.int32, device=device))

    @classmethod
    def over(cls, streams: Sequence[torch.Tensor], count: torch.Tensor) -> ColumnState:
        """State in memory that somebody else allocated: master and moments [n, rows], count [n]."""
        state = object.__new__(cls)
        state.master, *moments = streams
        state.moments = tuple(moments)
        state.count = count
        return state

    @property
    def nbytes(self) -> int:
        """Bytes that this state occupies."""
        return sum(tensor.nbytes for tensor in (self.master, *self.moments, self.count))

    @property
    def packed_columns(self) -> int:
        """Width of a packed row: every fp32 stream, then the count."""
        return self.master.shape[1] * (1 + len(self.moments)) + 1

    def pack(self, index: torch.Tensor) -> torch.Tensor:
        """Copy some columns' state into one block of raw 32-bit words that can cross the link.

        Args:
            index: [m] int64, rows of this state.

        Returns:
            [m, packed_columns] int32, on this state's device.
        """
        streams = [stream.index_select(0, index).view(torch.int32) for stream in (self.master, *self.moments)]
        return torch.cat([*streams, self.count.index_select(0, index).unsqueeze(1)], dim=1)

    def unpack(self, index: torch.Tensor, packed: torch.Tensor) -> None:
        """Take over the state of columns that `pack` copied elsewhere.

        Args:
            index: [m] int64, rows of this state.
            packed: [m, packed_columns] int32.
        """
        rows = self.master.shape[1]
        for position, stream in enumerate((self.master, *self.moments)):
            stream.index_copy_(0, index, packed[:, position * rows : (position + 1) * rows].view(torch.float32))
        self.count.index_copy_(0, index, packed[:, -1].contiguous())

    def update(
        self,
        rule: Rule,
        gradient: torch.Tensor,
        hyper: Hyper,
        *,
        decay: float | None = None,
        skip: torch.Tensor | None = None,
    ) -> None:
        """One update of all columns.

        Args:
            gradient: [n, rows] fp32.
            decay: factor on the weights where it is not `hyper.decay`.
            skip: 0-dim bool; where it is true nothing changes. Stays on its device.
        """
        tensors = (self.master, *self.moments, self.count)
        before = None if skip is None else [tensor.clone() for tensor in tensors]
        rule.update(self.master, self.moments, self.count, gradient, hyper, hyper.decay if decay is None else decay)
        if skip is not None and before is not None:
            for tensor, old in zip(tensors, before, strict=True):
                torch.where(skip, old, tensor, out=tensor)

    def slice(self, low: int, high: int) -> ColumnState:
        """Columns low .. high - 1 as a state that shares this one's memory."""
        part = object.__new__(ColumnState)
        part.master = self.master[low:high]
        part.moments = tuple(moment[low:high] for moment in self.moments)
        part.count = self.count[low:high]
        return part

    def select(self, index: torch.Tensor) -> ColumnState:
        """A copy of some columns' state."""
        part = object.__new__(ColumnState)
        part.master = self.master.index_select(0, index)
        part.moments = tuple(moment.index_select(0, index) for moment in self.moments)
        part.count = self.count.index_select(0, index)
        return part

    def restore(self, index: torch.Tensor, part: ColumnState) -> None:
        """Write back what `select` copied."""
        self.master.index_copy_(0, index, part.master)
        for mine, other in zip(self.moments, part.moments, strict=True):
            mine.index_copy_(0, index, other)
        self.count.index_copy_(0, index, part.count)

    def each_chunk(self, work: Callable[[ColumnState, int, int], None]) -> None:
        """Call `work(part, low, high)` on cache-sized ranges of columns, in order."""
        columns, rows = self.master.shape
        size = max(1, CHUNK_ELEMENTS // max(1, rows))
        for low in range(0, columns, size):
            high = min(low + size, columns)
            work(self.slice(low, high), low, high)


def reread(master: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Masters from weights that somebody wrote to: in fp32, but the old master where it rounds to its weight."""
    return torch.where(master.to(weights.dtype) == weights, master, weights.float())


def followed(master: torch.Tensor, before: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Masters of weights that somebody has changed: moved as far as these, where they were not their rounding."""
    moved = torch.where(master.to(before.dtype) == before, weights.float(), master + (weights.float() - before.float()))
    return torch.where(before == weights, master, moved)
