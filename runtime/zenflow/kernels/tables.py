"""Tables of kernels over whole buckets: the columns of each weight, and their places in flat buffers."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

Send = Callable[[torch.Tensor], torch.Tensor]
"""Copies a host tensor to the device in the order of the current stream, as `Device.send`."""
ALIGNED = 16
"""Elements of which sizes and starts are multiples where all accesses are of 16 bytes."""


def sign_bytes_of(rows: int) -> int:
    """Bytes of a column's signs: two bits a row, in order from the lowest; 0, 1 = positive, 2 = negative."""
    return -(-rows // 4)


@dataclass(frozen=True)
class Run:
    """Columns of one weight in a flat buffer, one behind the other."""

    columns: NDArray[np.int64]
    rows: int
    start: int

    @property
    def stop(self) -> int:
        """End of the last column, in elements of the buffer."""
        return self.start + len(self.columns) * self.rows

    def within(self, buffer: torch.Tensor) -> torch.Tensor:
        """[columns, rows], a view of the buffer."""
        return buffer[self.start : self.stop].view(len(self.columns), self.rows)


@dataclass(frozen=True)
class TablePart:
    """One weight's matrix [rows, columns] in a bucket; a packed column is `rows` elements long, without a gap."""

    rows: int
    columns: int
    places: torch.Tensor
    """[columns] int32 on the CPU: a column's slot on the host, or -1 - i for row i of the kept columns."""
    sent_start: int
    """Element of the bucket's sent buffer at which slot 0 begins."""
    kept_start: int
    """Element of the flat kept columns at which row 0 begins."""
    sign_start: int = 0
    """Byte of the bucket's signs at which those of slot 0 begin; each slot has `sign_bytes_of(rows)`."""

    @functools.cached_property
    def runs(self) -> tuple[Run, Run]:
        """The columns that are sent, and those that are kept."""
        found = []
        for places, start in ((self.places.numpy(), self.sent_start), (-1 - self.places.numpy(), self.kept_start)):
            columns = np.flatnonzero(places >= 0)
            found.append(Run(columns[np.argsort(places[columns])], self.rows, start))
        return found[0], found[1]


class BucketTables:
    """The weights of one bucket, in one dtype, and the place of each of their columns.

    Args:
        parts: one a weight, at least one.
        transposed: whether weights and gradients are stored [columns, rows]: a column is contiguous. So are vectors
            (one column).
        before: tables of the same weights, of whose columns some have other places.
    """

    def __init__(
        self,
        parts: Sequence[TablePart],
        dtype: torch.dtype,
        send: Send,
        *,
        transposed: bool = False,
        before: BucketTables | None = None,
    ) -> None:
        self.dtype, self.transposed, self.send = dtype, transposed, send
        self._tiles: dict[tuple[int, int], Tiles] = {} if before is None else before._tiles
        self.columns = tuple(part.columns for part in parts)
        widths = () if transposed else self.columns
        numbers = [number for part in parts for number in (part.rows, part.sent_start, part.kept_start)]
        self.even = not any(number % ALIGNED for number in (*numbers, *widths))
        self.parts, self.places = tuple(parts), send(torch.cat([part.places for part in parts]))
        self.native: Any = None
        """What native kernels have made of it."""

    @property
    def sent_elements(self) -> int:
        """Elements of the sent buffer up to the last column."""
        return max(part.runs[0].stop for part in self.parts)

    @property
    def sign_bytes(self) -> int:
        """Bytes of the signs of all columns that are sent."""
        return max(part.sign_start + len(part.runs[0].columns) * sign_bytes_of(part.rows) for part in self.parts)

    @functools.cached_property
    def indices(self) -> list[list[torch.Tensor]]:
        """Of each part the columns that are sent and those that are kept, on the device."""
        return [[self.send(torch.from_numpy(run.columns)) for run in part.runs] for part in self.parts]

    @functools.cached_property
    def guessed(self) -> NDArray[np.int64]:
        """[parts, 4]: rows, columns, the byte in `places` where those of the columns begin, `sign_start`."""
        first = 4 * np.cumsum([0, *self.columns])[:-1]
        return np.array(
            [(part.rows, part.columns, at, part.sign_start) for part, at in zip(self.parts, first, strict=True)],
            np.int64,
        )

    def matrix(self, part: TablePart, tensor: torch.Tensor) -> torch.Tensor:
        """A weight or gradient as [rows, columns], a view."""
        if self.transposed:
            return tensor.view(part.columns, part.rows).t()
        return tensor.view(part.rows, part.columns)

    def tiles(self, block_r: int, block_c: int) -> Tiles:
        """The tables for tiles of that many rows and columns; sent once, by one copy."""
        if (block_r, block_c) not in self._tiles:
            high = [-(-part.rows // block_r) for part in self.parts]
            wide = [-(-columns // block_c) for columns in self.columns]
            blocks = [h * w for h, w in zip(high, wide, strict=True)]
            sums = np.cumsum([0, *(h * columns for h, columns in zip(high, self.columns, strict=True))])
            numbers = [
                (part.rows, part.columns, 0, part.sent_start, part.kept_start, 0, part.sign_start, 0)
                for part in self.parts
            ]
            records = np.array(numbers, np.int64)
            records[:, 2], records[:, 5] = np.cumsum([0, *self.columns])[:-1], sums[:-1]
            sent = sent_together(self.send, [records, tiles_of(blocks), tiles_of(wide)])
            launches = [split_tiles(*of) for of in zip(sent[1:], (blocks, wide), (8, 64), strict=True)]
            self._tiles[block_r, block_c] = Tiles(sent[0], launches[0], launches[1], int(sums[-1]))
        return self._tiles[block_r, block_c]


@dataclass(frozen=True)
class Tiles:
    """Tables of a bucket that do not depend on the columns' places."""

    records: torch.Tensor
    """[parts, 8] int64: rows, columns, first column of all, sent_start, kept_start, first partial sum, sign_start."""
    eights: list[torch.Tensor]
    """For every 8 parts [programs, 2] int32: the part, and the tile in it."""
    columns: list[torch.Tensor]
    """For every 64 parts [programs, 2] int32: the part, and the block of columns in it."""
    partials: int
    """Number of partial sums of squares."""


def sent_together(send: Send, arrays: Sequence[NDArray[Any]]) -> list[torch.Tensor]:
    """Arrays on the device, each aligned to 16 bytes, by one copy."""
    starts = np.cumsum([0, *(-(-array.nbytes // 16) * 16 for array in arrays)])
    memory = np.zeros(max(16, starts[-1]), np.uint8)
    for start, array in zip(starts, arrays, strict=False):
        memory[start : start + array.nbytes] = array.reshape(-1).view(np.uint8)
    there = send(torch.from_numpy(memory))
    return [
        there[start : start + array.nbytes].view(torch.from_numpy(array).dtype).view(array.shape)
        for start, array in zip(starts.tolist(), arrays, strict=False)
    ]


def tiles_of(blocks: Sequence[int]) -> NDArray[np.int32]:
    """[sum of blocks, 2]: the part, and the block in it."""
    parts = np.repeat(np.arange(len(blocks)), blocks)
    first = np.repeat(np.cumsum([0, *blocks])[:-1], blocks)
    return np.stack([parts, np.arange(len(parts)) - first], axis=1).astype(np.int32)


def split_tiles(tiles: torch.Tensor, blocks: Sequence[int], step: int) -> list[torch.Tensor]:
    """Those of `step` parts each, views."""
    ends = np.cumsum([0, *blocks]).tolist()
    return [tiles[ends[low] : ends[min(low + step, len(blocks))]] for low in range(0, len(blocks), step)]
