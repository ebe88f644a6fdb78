"""Tables of kernels over whole buckets: the columns of each weight, and their places in flat buffers."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from zenflow.state import ColumnState

Send = Callable[[torch.Tensor], torch.Tensor]
"""Copies a host tensor to the device in the order of the current stream, as `Device.send`."""
KEPT_TILES = {False: (16, 64), True: (4, 256)}
"""Kept columns and rows of a tile, by whether the weight is stored transposed."""
COUNT_BLOCK = 256
"""Kept columns whose counts one program looks up."""
_ALIGNED = 16
"""Elements of which sizes and starts are multiples where all accesses are of 16 bytes."""


@dataclass(frozen=True)
class Run:
    """Columns of one weight in a flat buffer, in the order of their places there; a place may be empty."""

    columns: NDArray[np.int64]
    places: NDArray[np.int64]
    rows: int
    start: int

    @property
    def count(self) -> int:
        """Places up to the last column."""
        return int(self.places[-1]) + 1 if len(self.places) else 0

    @property
    def dense(self) -> bool:
        """Whether no place is empty."""
        return self.count == len(self.places)

    @property
    def stop(self) -> int:
        """End of the last column, in elements of the buffer."""
        return self.start + self.count * self.rows

    def within(self, buffer: torch.Tensor) -> torch.Tensor:
        """[count, rows], a view of the buffer."""
        return buffer[self.start : self.stop].view(self.count, self.rows)

    def index(self, send: Send) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Columns and places on the device; None: no place is empty."""
        return send(torch.from_numpy(self.columns)), None if self.dense else send(torch.from_numpy(self.places))


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

    @functools.cached_property
    def runs(self) -> tuple[Run, Run]:
        """The columns that are sent, and those that are kept."""
        found = []
        for places, start in ((self.places.numpy(), self.sent_start), (-1 - self.places.numpy(), self.kept_start)):
            columns = np.flatnonzero(places >= 0)
            columns = columns[np.argsort(places[columns])]
            found.append(Run(columns, places[columns].astype(np.int64), self.rows, start))
        return found[0], found[1]


class BucketTables:
    """The weights of one bucket, in one dtype, and the place of each of their columns.

    Args:
        parts: one a weight, at least one.
        dtype: of the weights and their gradients.
        send: to the device.
        transposed: whether weights and gradients are stored [columns, rows]: a column is contiguous. So are vectors
            (one column).
    """

    def __init__(self, parts: Sequence[TablePart], dtype: torch.dtype, send: Send, *, transposed: bool = False) -> None:
        self.dtype, self.transposed, self.send = dtype, transposed, send
        self._tiles: dict[tuple[int, int], Tiles] = {}
        self.columns = tuple(part.columns for part in parts)
        widths = () if transposed else self.columns
        numbers = [number for part in parts for number in (part.rows, part.sent_start, part.kept_start)]
        self.even = not any(number % _ALIGNED for number in (*numbers, *widths))
        self.place(parts, send(torch.cat([part.places for part in parts])))

    def place(self, parts: Sequence[TablePart], places: torch.Tensor) -> None:
        """Take other places, which are on the device already."""
        self.parts, self.places = tuple(parts), places
        self.native: Any = None
        """What native kernels have made of it."""
        self._indices: list[list[tuple[torch.Tensor, torch.Tensor | None]]] | None = None

    @property
    def sent_elements(self) -> int:
        """Elements of the sent buffer up to the last column."""
        return max(part.runs[0].stop for part in self.parts)

    @property
    def indices(self) -> list[list[tuple[torch.Tensor, torch.Tensor | None]]]:
        """Of each part `Run.index` of what is sent and of what is kept."""
        if self._indices is None:
            self._indices = [[run.index(self.send) for run in part.runs] for part in self.parts]
        return self._indices

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
            numbers = [(part.rows, part.columns, 0, part.sent_start, part.kept_start, 0, 0, 0) for part in self.parts]
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
    """[parts, 8] int64: rows, columns, first column of all, sent_start, kept_start, first partial sum."""
    eights: list[torch.Tensor]
    """For every 8 parts [programs, 2] int32: the part, and the tile in it."""
    columns: list[torch.Tensor]
    """For every 64 parts [programs, 2] int32: the part, and the block of columns in it."""
    partials: int
    """Number of partial sums of squares."""


@dataclass
class KeptState:
    """State of all kept columns."""

    master: torch.Tensor
    """Flat fp32 in the layout of the flat kept columns; each of the moments likewise."""
    moments: tuple[torch.Tensor, ...]
    count: torch.Tensor
    """[kept columns] int32, in the order of buckets, parts and rows."""


class KeptTables:
    """The kept columns of many buckets in one dtype, which one update changes.

    Args:
        buckets: whose parts share the flat kept columns.
        groups: of each part of all buckets, the number of its parameter group.
        send: to the device.
    """

    def __init__(self, buckets: Sequence[BucketTables], groups: Sequence[int], send: Send) -> None:
        assert len({bucket.dtype for bucket in buckets}) == 1
        self.buckets, self.groups, self.send = tuple(buckets), tuple(groups), send
        self.numbers: Any = None  # of the last update's hyperparameters, on the device
        self.addresses: tuple[list[int], torch.Tensor] | None = None  # of the weights, here and on the device
        (self.columns,) = sent_together(send, [_kept_columns(self.parts)])
        self._cut()

    @property
    def parts(self) -> list[TablePart]:
        """Those of all buckets."""
        return [part for bucket in self.buckets for part in bucket.parts]

    def with_places(self, places: Mapping[int, Sequence[torch.Tensor]]) -> KeptTables:
        """The same with columns in other places, by one copy to the device; these stay, for kernels that are queued.

        Args:
            places: by number of the bucket, of each of its parts. These buckets' tables are then new ones, too.
        """
        made = copy.copy(self)
        buckets = list(self.buckets)
        for number, of_parts in places.items():
            buckets[number] = copy.copy(buckets[number])
            pairs = zip(self.buckets[number].parts, of_parts, strict=True)
            buckets[number].parts = tuple(replace(part, places=one) for part, one in pairs)
        made.buckets = tuple(buckets)
        arrays = [torch.cat(list(of_parts)).numpy() for of_parts in places.values()]
        *sent, made.columns = sent_together(self.send, [*arrays, _kept_columns(made.parts)])
        for number, there in zip(places, sent, strict=True):
            buckets[number].place(buckets[number].parts, there)
        if [part.runs[1].count for part in made.parts] != self.sizes:
            made._cut()
        return made

    def states(self, state: KeptState) -> Iterable[ColumnState]:
        """The state of each part's kept columns, views."""
        for part, count in zip(self.parts, state.count.split(self.sizes), strict=True):
            yield ColumnState.over([part.runs[1].within(one) for one in (state.master, *state.moments)], count)

    def _cut(self) -> None:
        """Make the tables that depend on the number of kept columns alone."""
        self.sizes = [part.runs[1].count for part in self.parts]
        parts = list(zip(self.parts, self.sizes, np.cumsum([0, *self.sizes]).tolist(), self.groups, strict=False))
        numbers = [(p.rows, p.columns, n, p.kept_start, first, group, 0, 0) for p, n, first, group in parts]
        flags = [bucket.transposed for bucket in self.buckets for _ in bucket.parts]
        tiles, self.even = [], dict.fromkeys(KEPT_TILES, True)  # by whether weights are stored transposed
        for part, flag in zip(self.parts, flags, strict=True):
            self.even[flag] &= not (part.rows % _ALIGNED or part.kept_start % _ALIGNED)
        for flag, (block_n, block_r) in KEPT_TILES.items():
            # One even where there are no rows: counts are stored with the first.
            blocks = [-(-n // block_n) * max(1, -(-part.rows // block_r)) for part, n, _, _ in parts]
            tiles.append(tiles_of([number * (flag is own) for number, own in zip(blocks, flags, strict=True)]))
        counts = tiles_of([-(-n // COUNT_BLOCK) for n in self.sizes])
        rest = counts, np.ones(len(parts), np.uint8), np.ones(1, np.float32), np.zeros(1, np.bool_)
        self.records, *by_layout, self.count_tiles, self.all_present, self.one, self.never = sent_together(
            self.send, [np.array(numbers, np.int64), *tiles, *rest]
        )
        self.tiles = dict(zip(KEPT_TILES, by_layout, strict=True))
        # Of each kept column what follows from its count in an update: the new count, rate and inverse root.
        scratch = torch.empty((3, sum(self.sizes)), dtype=torch.float32, device=self.records.device)
        self.of_counts = scratch[0].view(torch.int32), scratch[1], scratch[2]


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


def _kept_columns(parts: Sequence[TablePart]) -> NDArray[np.int32]:
    """The column in each kept place; -1 where there is none."""
    found = []
    for run in (part.runs[1] for part in parts):
        found.append(np.full(run.count, -1, np.int32))
        found[-1][run.places] = run.columns
    return np.concatenate(found)
