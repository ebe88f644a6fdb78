"""What kernels over whole buckets are given: the columns of each weight, and where they go; see `BucketTables`."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from zenflow.state import ColumnState

Send = Callable[[torch.Tensor], torch.Tensor]
"""Copies a small host tensor to the device in the order of the current stream, as `Device.send`."""

ALIGNED = 16
"""Elements to whose multiples sizes and starts must fit for accesses of 16 bytes everywhere."""


@dataclass(frozen=True)
class TablePart:
    """One weight's matrix [rows, columns] in a bucket.

    A packed column is `rows` elements long, with nothing between it and the next.
    """

    rows: int
    columns: int
    places: torch.Tensor
    """[columns] int32 on the CPU: the column's slot on the host if >= 0, else -1 - i for row i of the kept columns."""
    sent_start: int
    """Element of the bucket's sent buffer at which slot 0 begins."""
    kept_start: int
    """Element of the flat kept columns at which row 0 begins."""

    @functools.cached_property
    def sent(self) -> Run:
        """The columns that are sent."""
        return Run.of(self.places.numpy(), self.sent_start, self.rows)

    @functools.cached_property
    def kept(self) -> Run:
        """The columns that stay on the device."""
        return Run.of(-1 - self.places.numpy(), self.kept_start, self.rows)


@dataclass(frozen=True)
class Run:
    """Columns of one weight in a flat buffer, by their place in it; places may be empty."""

    columns: NDArray[np.int64]
    places: NDArray[np.int64]
    count: int
    """Places up to the last column."""
    start: int
    rows: int

    @classmethod
    def of(cls, places: NDArray[np.int32], start: int, rows: int) -> Run:
        columns = np.flatnonzero(places >= 0)
        columns = columns[np.argsort(places[columns], kind="stable")]
        found = places[columns].astype(np.int64)
        return cls(columns, found, int(found[-1]) + 1 if len(found) else 0, start, rows)

    @property
    def stop(self) -> int:
        """End of the last column in the buffer, in elements."""
        return self.start + self.count * self.rows

    def within(self, buffer: torch.Tensor) -> torch.Tensor:
        """[count, rows], a view of the buffer."""
        return buffer[self.start : self.stop].view(self.count, self.rows)


class RunIndex:
    """A run's columns and places as index tensors on the device; `places` is None if no place is empty."""

    def __init__(self, run: Run, send: Send) -> None:
        self.run = run
        self.columns = send(torch.from_numpy(run.columns))
        dense = len(run.places) == run.count
        self.places = None if dense else send(torch.from_numpy(run.places))


@dataclass(frozen=True)
class Tiles:
    """Tables of a bucket that do not depend on the columns' places."""

    records: torch.Tensor
    """[parts, 8] int64: rows, columns, first column of all, sent_start, kept_start, first partial sum."""
    launches: tuple[torch.Tensor, ...]
    """For every 8 parts [programs, 2] int32: the part, and the tile in it."""
    columns: torch.Tensor
    """[programs, 2] int32: the part, and the block of columns in it."""
    column_starts: tuple[int, ...]
    """Programs in `columns` before each part, and all."""
    partials: int
    """Number of partial sums of squares."""


class BucketTables:
    """The weights of one bucket, in one dtype, and the place of each of their columns.

    Args:
        parts: one a weight.
        dtype: of the weights and their gradients.
        transposed: whether weights and gradients are stored [columns, rows]: a column is contiguous.
        send: to the device.
    """

    def __init__(self, parts: Sequence[TablePart], dtype: torch.dtype, send: Send, *, transposed: bool = False) -> None:
        self.dtype, self.transposed, self._send = dtype, transposed, send
        self._tiles: dict[tuple[int, int], Tiles] = {}
        self._take(parts, send(_places(parts)))

    def _take(self, parts: Sequence[TablePart], places: torch.Tensor) -> None:
        self.parts = tuple(parts)
        self.places = places
        self._indices: list[tuple[RunIndex, RunIndex]] | None = None

    @property
    def device(self) -> torch.device:
        """Where the tables are."""
        return self.places.device

    @functools.cached_property
    def columns(self) -> tuple[int, ...]:
        """Number of columns of each part."""
        return tuple(part.columns for part in self.parts)

    @functools.cached_property
    def even(self) -> bool:
        """Whether all sizes and starts allow accesses of 16 bytes; the buffers' own addresses have to, too."""
        numbers = [n for part in self.parts for n in (part.rows, part.sent_start, part.kept_start)]
        widths = () if self.transposed else self.columns  # else a column is contiguous, whatever their number
        return not any(number % ALIGNED for number in (*numbers, *widths))

    @property
    def sent_elements(self) -> int:
        """Elements of the sent buffer that are used."""
        return max((part.sent.stop for part in self.parts), default=0)

    @property
    def indices(self) -> list[tuple[RunIndex, RunIndex]]:
        """Of each part what is sent and what is kept."""
        if self._indices is None:
            self._indices = [(RunIndex(part.sent, self._send), RunIndex(part.kept, self._send)) for part in self.parts]
        return self._indices

    def matrix(self, part: TablePart, tensor: torch.Tensor) -> torch.Tensor:
        """A weight or gradient as [rows, columns], a view."""
        if self.transposed:
            return tensor.view(part.columns, part.rows).t()
        return tensor.view(part.rows, part.columns)

    def tiles(self, block_r: int, block_c: int) -> Tiles:
        """The tables for tiles of that many rows and columns, sent once."""
        made = self._tiles.get((block_r, block_c))
        if made is None:
            made = self._tiles[block_r, block_c] = self._cut(block_r, block_c)
        return made

    def with_places(self, places: Sequence[torch.Tensor]) -> BucketTables:
        """The same bucket with its columns in other places; one copy to the device."""
        (made,) = with_places([self], [places], self._send)
        return made

    def _cut(self, block_r: int, block_c: int) -> Tiles:
        high = [-(-part.rows // block_r) for part in self.parts]
        wide = [-(-part.columns // block_c) for part in self.parts]
        columns = np.cumsum([0, *self.columns])
        sums = np.cumsum([0, *(h * part.columns for h, part in zip(high, self.parts, strict=True))])
        records = np.zeros((len(self.parts), 8), np.int64)
        for which, part in enumerate(self.parts):
            starts = columns[which], part.sent_start, part.kept_start, sums[which]
            records[which, :6] = part.rows, part.columns, *starts
        blocks = [h * w for h, w in zip(high, wide, strict=True)]
        ends = np.cumsum([0, *blocks])
        sent, tiles, column_tiles = sent_together(self._send, [records, tiles_of(blocks), tiles_of(wide)])
        eights = range(0, len(blocks), 8)
        launches = tuple(tiles[ends[low] : ends[min(low + 8, len(blocks))]] for low in eights)
        return Tiles(sent, launches, column_tiles, tuple(np.cumsum([0, *wide]).tolist()), int(sums[-1]))


def with_places(
    tables: Sequence[BucketTables], places: Sequence[Sequence[torch.Tensor]], send: Send, *others: NDArray[Any]
) -> list[Any]:
    """Buckets with their columns in other places, and other arrays on the device, by one copy for all of them.

    Args:
        tables: at least one; they stay as they are, for kernels that are queued.
        places: of each bucket's parts.
        send: to the device.
        others: whatever else has to be there.
    """
    parts = [
        [replace(part, places=new) for part, new in zip(one.parts, of_one, strict=True)]
        for one, of_one in zip(tables, places, strict=True)
    ]
    sent = sent_together(send, [*(_places(of_one).numpy() for of_one in parts), *others])
    made = []
    for old, of_one, here in zip(tables, parts, sent, strict=False):
        new = object.__new__(BucketTables)
        new.__dict__.update(old.__dict__)  # what does not depend on places is shared
        new._take(of_one, here)
        made.append(new)
    return [*made, *sent[len(made) :]]


@dataclass
class KeptState:
    """State of all kept columns: streams in the layout of the flat kept columns, counts by kept column."""

    master: torch.Tensor
    """Flat fp32."""
    moments: tuple[torch.Tensor, ...]
    """Likewise."""
    count: torch.Tensor
    """[kept columns] int32, in the order of buckets, parts and rows."""


KEPT_TILES = {False: (16, 64), True: (4, 256)}
"""Kept columns and rows of a tile, by whether the weight is stored transposed."""
COUNT_BLOCK = 256
"""Kept columns of a tile of `counts`."""


@dataclass(frozen=True)
class _KeptFixed:
    sizes: tuple[int, ...]
    """Kept columns of each part, to the last place."""
    records: torch.Tensor
    """[parts, 8] int64: rows, columns, kept columns, kept_start, the first kept column, group."""
    tiles: Mapping[bool, torch.Tensor]
    """By whether weights are transposed [programs, 2] int32: the part, and the tile in it."""
    counts: torch.Tensor
    """[programs, 2] int32: the part, and the block of kept columns in it."""
    scratch: torch.Tensor
    """[3, kept columns] fp32: what follows from the counts in an update."""
    present: torch.Tensor
    one: torch.Tensor
    never: torch.Tensor


class KeptTables:
    """The kept columns of many buckets in one dtype, which one update changes.

    Args:
        buckets: whose parts share the flat kept columns.
        groups: of each part of all buckets, the number of its parameter group.
        send: to the device.
    """

    def __init__(self, buckets: Sequence[BucketTables], groups: Sequence[int], send: Send) -> None:
        assert len({bucket.dtype for bucket in buckets}) == 1
        self.groups, self.send = tuple(groups), send
        self.numbers: Any = None  # of the last update's hyperparameters, on the device
        self.addresses: tuple[list[int], torch.Tensor] | None = None  # of the weights, here and on the device
        self._take(buckets)
        (self.columns,) = sent_together(send, [_kept_columns(self.parts)])
        self.fixed = self._cut()

    def _take(self, buckets: Sequence[BucketTables]) -> None:
        self.buckets = tuple(buckets)
        self.parts = [part for bucket in buckets for part in bucket.parts]

    def with_places(self, places: Mapping[int, Sequence[torch.Tensor]]) -> KeptTables:
        """The same with the columns of some buckets in other places; one copy to the device.

        Args:
            places: by number of the bucket, of its parts.
        """
        new = object.__new__(KeptTables)
        new.__dict__.update(self.__dict__)
        changed = dict.fromkeys(places)
        parts = [
            part if bucket not in changed else replace(part, places=places[bucket][which])
            for bucket, tables in enumerate(self.buckets)
            for which, part in enumerate(tables.parts)
        ]
        old = [self.buckets[bucket] for bucket in changed]
        *made, new.columns = with_places(old, list(places.values()), self.send, _kept_columns(parts))
        replaced = dict(zip(changed, made, strict=True))
        new._take([replaced.get(bucket, tables) for bucket, tables in enumerate(self.buckets)])
        if new.sizes() != self.fixed.sizes:
            new.fixed = new._cut()
        return new

    def sizes(self) -> tuple[int, ...]:
        """Kept columns of each part, to the last place."""
        return tuple(part.kept.count for part in self.parts)

    def states(self, state: KeptState) -> Iterable[ColumnState]:
        """The state of each part's kept columns, views."""
        counts = state.count.split(self.sizes())
        for part, count in zip(self.parts, counts, strict=True):
            yield ColumnState.over([part.kept.within(one) for one in (state.master, *state.moments)], count)

    def even(self, *, transposed: bool) -> bool:
        """Whether the rows and starts of those that are stored so allow accesses of 16 bytes."""
        parts = (part for bucket in self.buckets if bucket.transposed is transposed for part in bucket.parts)
        return not any(part.rows % ALIGNED or part.kept_start % ALIGNED for part in parts)

    def _cut(self) -> _KeptFixed:
        sizes = self.sizes()
        records = np.zeros((len(sizes), 8), np.int64)
        before = np.cumsum([0, *sizes])
        for which, (part, n) in enumerate(zip(self.parts, sizes, strict=True)):
            records[which, :6] = part.rows, part.columns, n, part.kept_start, before[which], self.groups[which]
        flags = [bucket.transposed for bucket in self.buckets for _ in bucket.parts]
        tiles = []
        for flag, (block_n, block_r) in KEPT_TILES.items():
            # One even where there are no rows: the counts are stored with the first.
            blocks = (-(-n // block_n) * max(1, -(-part.rows // block_r)) for n, part in zip(sizes, self.parts, strict=True))
            tiles.append(tiles_of([number if flag is is_so else 0 for number, is_so in zip(blocks, flags, strict=True)]))
        counts = tiles_of([-(-n // COUNT_BLOCK) for n in sizes])
        present = np.ones(len(sizes), np.uint8)
        constants = np.ones(1, np.float32), np.zeros(1, np.bool_)
        sent = sent_together(self.send, [records, *tiles, counts, present, *constants])
        by_layout = dict(zip(KEPT_TILES, sent[1:3], strict=True))
        scratch = torch.empty((3, int(before[-1])), dtype=torch.float32, device=sent[0].device)
        return _KeptFixed(sizes, sent[0], by_layout, sent[3], scratch, *sent[4:])


def sent_together(send: Send, arrays: Sequence[NDArray[Any]]) -> list[torch.Tensor]:
    """Arrays on the device, each aligned to 16 bytes, by one copy."""
    parts, starts, at = [], [], 0
    for array in arrays:
        parts.append(np.ascontiguousarray(array).view(np.uint8).reshape(-1))
        starts.append(at)
        parts.append(np.zeros(-array.nbytes % 16, np.uint8))
        at += array.nbytes + len(parts[-1])
    memory = send(torch.from_numpy(np.concatenate(parts)))
    return [
        memory[start : start + array.nbytes].view(torch.from_numpy(array[:0]).dtype).view(array.shape)
        for start, array in zip(starts, arrays, strict=True)
    ]


def tiles_of(blocks: Sequence[int]) -> NDArray[np.int32]:
    """[sum of blocks, 2]: the part, and the block in it."""
    part = np.repeat(np.arange(len(blocks)), blocks)
    first = np.repeat(np.cumsum([0, *blocks])[:-1], blocks)
    return np.stack([part, np.arange(len(part)) - first], axis=1).astype(np.int32)


def _places(parts: Sequence[TablePart]) -> torch.Tensor:
    return torch.cat([part.places for part in parts]) if parts else torch.empty(0, dtype=torch.int32, device="cpu")


def _kept_columns(parts: Sequence[TablePart]) -> NDArray[np.int32]:
    """The column of each kept place; -1 where there is none."""
    columns = [np.full(part.kept.count, -1, np.int32) for part in parts]
    for column, part in zip(columns, parts, strict=True):
        column[part.kept.places] = part.kept.columns
    return np.concatenate(columns) if columns else np.empty(0, np.int32)
