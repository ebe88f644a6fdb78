"""Which columns matter: the top columns, and what changes when the selection does."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch


def ranked(scores: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Scores, [columns] fp32 and all finite, by falling value, and their indices, int64; ties go to the lower index."""
    values, indices = torch.sort(scores, descending=True, stable=True)
    return values, indices


def top_columns(scores: torch.Tensor, count: int) -> torch.Tensor:
    """[count] int64: indices of the greatest scores, [columns] fp32, as `ranked` has them; 0 for non-finite ones."""
    return ranked(torch.nan_to_num(scores, nan=0.0, posinf=0.0, neginf=0.0))[1][:count]


@dataclass(frozen=True, slots=True)
class SelectionChange:
    """A change of selection: pair i swaps the deferred column in `slots[i]` with the selected one in `places[i]`."""

    slots: torch.Tensor
    """[n] int64: host slots whose columns become selected."""
    places: torch.Tensor
    """[n] int64: positions of the selected state whose columns become deferred."""
    to_selected: torch.Tensor
    """[n] int64: the columns that become selected."""
    to_deferred: torch.Tensor
    """[n] int64: the columns that become deferred."""

    def within(self, slots: Sequence[tuple[int, int]]) -> SelectionChange | None:
        """The pairs with their slot in one of these ranges, each its first and the one after its last."""
        own = self.slots.numpy()
        here = np.zeros(len(own), dtype=bool)
        for low, high in slots:
            here |= (own >= low) & (own < high)
        pairs = (self.slots, self.places, self.to_selected, self.to_deferred)
        return SelectionChange(*(torch.from_numpy(one.numpy()[here]) for one in pairs)) if here.any() else None


def plan_move(selected: torch.Tensor, slot_columns: torch.Tensor, wanted: torch.Tensor) -> SelectionChange | None:
    """Pair the columns that change tier, each side in ascending order, so that every state has one free place to go.

    None where nothing changes. All tensors are int64 on the CPU: `selected` columns in state order, `slot_columns` the
    deferred one in each host slot, `wanted` the new selection in any order.
    """
    if not len(selected):
        return None
    # NumPy's, as below: a step waits for each of these, and torch's threads for cores that the host engine has.
    chosen, in_slots = selected.numpy(), slot_columns.numpy()
    is_wanted = np.zeros(max(chosen.max(), in_slots.max(initial=0)) + 1, dtype=bool)
    is_wanted[wanted.numpy()] = True
    places = np.flatnonzero(~is_wanted[chosen])
    if not len(places):
        return None
    slots = np.flatnonzero(is_wanted[in_slots])
    places = places[np.argsort(chosen[places])]
    slots = slots[np.argsort(in_slots[slots])]
    return SelectionChange(*map(torch.from_numpy, (slots, places, in_slots[slots], chosen[places])))


@dataclass(frozen=True, slots=True)
class BucketChange:
    """What a change of selection does to one bucket that has slots of it. All tensors are int64 on the CPU."""

    pairs: torch.Tensor
    """[m]: which of the change's pairs have their slot here."""
    slots: torch.Tensor
    """[m]: these slots."""
    rows: torch.Tensor
    """[m]: the same, counted from the bucket's first."""
    staying: torch.Tensor
    """[bucket's slots - m], ascending: those whose column stays."""
    staying_rows: torch.Tensor  # the same, counted from the bucket's first
    staying_columns: torch.Tensor  # their columns
    columns: torch.Tensor
    """[bucket's slots]: the column in each of them afterwards."""


def change_of_buckets(
    change: SelectionChange, slot_columns: torch.Tensor, buckets: Sequence[range]
) -> list[BucketChange | None]:
    """Tell what a change does to each bucket, given its slots; None where none of these changes.

    `slot_columns` is [n_def] int64 on the CPU, the column in each slot before it.
    """
    slots, before = change.slots.numpy(), slot_columns.numpy()
    after = before.copy()
    after[slots] = change.to_deferred.numpy()
    found: list[BucketChange | None] = []
    for bucket in buckets:
        pairs = np.flatnonzero((slots >= bucket.start) & (slots < bucket.stop))
        rows = slots[pairs] - bucket.start
        stays = np.ones(len(bucket), dtype=bool)
        stays[rows] = False
        staying_rows = np.flatnonzero(stays)
        staying = staying_rows + bucket.start
        parts = (pairs, slots[pairs], rows, staying, staying_rows, before[staying], after[bucket.start : bucket.stop])
        found.append(BucketChange(*map(torch.from_numpy, parts)) if len(pairs) else None)
    return found


@dataclass(frozen=True, slots=True)
class BucketMove:
    """A bucket's part of a change, with the columns on the device."""

    change: BucketChange
    staying_columns: torch.Tensor  # [staying] int64
    columns: torch.Tensor  # [bucket's slots] int64


@dataclass(frozen=True, slots=True)
class Move:
    """A change of selection, with what kernels need of it on the device."""

    change: SelectionChange
    places: torch.Tensor  # [n] int64, as the change has them
    to_selected: torch.Tensor  # [n] int64, likewise
    selected: torch.Tensor
    """[n_sel] int64: the selected columns afterwards, in state order."""
    buckets: Sequence[BucketMove | None]
    """For each bucket in turn; None where none of its slots changes."""
