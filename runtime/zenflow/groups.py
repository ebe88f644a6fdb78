"""Groups of weights whose gradients are packed by one launch: those of one bucket, or one weight of several."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch
from torch import nn

from zenflow.buckets import Bucket, Part
from zenflow.deferred import DeferredTier
from zenflow.kernels.base import DevicePart
from zenflow.kernels.tables import BucketTables, TablePart, sign_bytes_of
from zenflow.layout import WeightPlan
from zenflow.runtime import Runtime
from zenflow.split_state import SplitState


class SplitWeight(Protocol):
    """What is asked of a weight, which may be split anew between two gradients."""

    @property
    def name(self) -> str:
        """The parameter's."""

    @property
    def parameter(self) -> nn.Parameter:
        """The parameter itself."""

    @property
    def group(self) -> int:
        """Number of its parameter group."""

    @property
    def plan(self) -> WeightPlan:
        """Its split."""

    @property
    def deferred(self) -> DeferredTier | None:
        """Its host tier, once it has one."""

    @property
    def selected_index(self) -> torch.Tensor:
        """[plan.selected] int64 on the device: the selected columns in state order."""

    @property
    def selected_columns(self) -> torch.Tensor:
        """The same on the CPU."""

    @property
    def split(self) -> SplitState:
        """Where its state lies."""

    def matrix(self) -> torch.Tensor:
        """The weights as [rows, columns]."""


class Group:
    """The tables and the kept columns of some weights; made anew where a column changes tier.

    Args:
        weights: alike in layout, all in one bucket, or a single one, or without a host tier.
        before: the tables of the same weights before columns changed tier.
    """

    def __init__(
        self, runtime: Runtime, weights: Sequence[SplitWeight], dtype: torch.dtype, before: BucketTables | None = None
    ) -> None:
        self._runtime = runtime
        parts, sent, kept, signs = [], 0, 0, 0
        self.buckets: dict[Bucket, tuple[int, list[tuple[Part, int]]]] = {}
        """Where each bucket's columns begin among those that are sent; its parts, with their elements."""
        plans = [weight.plan for weight in weights]
        for weight, plan in zip(weights, plans, strict=True):
            places = _places(plan, weight.deferred, weight.selected_columns)
            parts.append(TablePart(plan.rows, plan.columns, places, sent, kept, signs))
            signs += plan.deferred * sign_bytes_of(plan.rows)
            for part in () if weight.deferred is None else weight.deferred.parts:
                _, of_bucket = self.buckets.setdefault(part.bucket, (sent, []))
                of_bucket.append((part, len(part.slots) * plan.rows))
                sent += of_bucket[-1][1]
            kept += (plan.resident + plan.selected) * plan.rows
        self.parts = [0 if weight.deferred is None else len(weight.deferred.parts) for weight in weights]
        """Of each weight, how many of the buckets it has."""
        self.nbytes = sum(plan.rows * plan.columns for plan in plans) * dtype.itemsize
        """Of the gradients."""
        self.sent_elements = sent
        transposed = plans[0].transposed
        self.tables = BucketTables(parts, dtype, runtime.device.send, transposed=transposed, before=before)
        self._kept_elements = kept
        self.moves = moves_of(weights)
        """Of the columns, before it was made."""
        self.weights = weights
        ends = itertools.accumulate(plan.columns for plan in plans)
        self.columns = [range(end - plan.columns, end) for end, plan in zip(ends, plans, strict=True)]
        """Of each weight, among the columns of all."""

    @functools.cached_property
    def kept(self) -> torch.Tensor:
        """Flat: of each weight its resident columns, then the selected ones in state order."""
        tables = self.tables
        return torch.empty(self._kept_elements, dtype=tables.dtype, device=tables.places.device)

    @functools.cached_property
    def resident(self) -> list[torch.Tensor | None]:
        """[plan.resident, rows] of each weight, views; None: it has none."""
        pairs = zip(self.tables.parts, self.weights, strict=True)
        return [self._kept(part, 0, weight.plan.resident) for part, weight in pairs]

    @functools.cached_property
    def selected(self) -> list[torch.Tensor | None]:
        """[plan.selected, rows], likewise."""
        pairs = zip(self.tables.parts, self.weights, strict=True)
        return [self._kept(part, weight.plan.resident, weight.plan.selected) for part, weight in pairs]

    def _kept(self, part: TablePart, first: int, count: int) -> torch.Tensor | None:
        if not count:
            return None
        start = part.kept_start + first * part.rows
        return self.kept[start : start + count * part.rows].view(count, part.rows)

    @functools.cached_property
    def device_parts(self) -> list[list[DevicePart]]:
        """Of each weight."""
        found = []
        for weight, resident, selected in zip(self.weights, self.resident, self.selected, strict=True):
            split, parts = weight.split, []
            if resident is not None and split.resident is not None:
                parts.append(DevicePart(split.resident, torch.arange(len(resident), device=resident.device), resident))
            if selected is not None and split.selected is not None:
                parts.append(DevicePart(split.selected, split.selected_index, selected))
            found.append(parts)
        return found


class Groups:
    """Keeps groups until other weights come together, or a column changes tier."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._known: dict[tuple[object, ...], Group] = {}

    def forget(self) -> None:
        """Every bucket may be another one from now on."""
        self._known.clear()

    def of(self, weights: Sequence[SplitWeight], dtype: torch.dtype) -> Group:
        """Tables for weights that are all in one bucket, or a single one, or have no host tier."""
        key = dtype, *map(id, weights)
        group = self._known.get(key)
        if group is None or group.moves != moves_of(weights):
            if len(self._known) > _MOST:
                self.forget()
            group = Group(self._runtime, list(weights), dtype, None if group is None else group.tables)
            self._known[key] = group
        return group


_MOST = 1 << 10


def first_bucket(weight: SplitWeight) -> Bucket | None:
    """That of a weight's first columns; None: it has no host tier."""
    return None if weight.deferred is None else weight.deferred.parts[0].bucket


def moves_of(weights: Sequence[SplitWeight]) -> list[int]:
    """How often columns of each weight's bucket have changed tier."""
    return [0 if weight.deferred is None else weight.deferred.parts[0].bucket.moves for weight in weights]


def _places(plan: WeightPlan, tier: DeferredTier | None, selected: torch.Tensor) -> torch.Tensor:
    places = np.empty(plan.columns, np.int32)
    places[: plan.resident] = np.arange(-1, -1 - plan.resident, -1)
    places[selected.numpy()] = np.arange(-1 - plan.resident, -1 - plan.resident - plan.selected, -1)
    if tier is not None:
        places[tier.slot_columns.numpy()] = np.arange(plan.deferred)
    return torch.from_numpy(places)
