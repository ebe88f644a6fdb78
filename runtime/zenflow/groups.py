"""Groups of weights whose gradients are packed by one launch: those of one bucket, or one weight of several."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from typing import Protocol

import torch
from torch import nn

from zenflow.buckets import Bucket, Part
from zenflow.control import StepControl
from zenflow.deferred import DeferredTier
from zenflow.kernels.base import PackedColumns, PackedUpdates
from zenflow.kernels.tables import BucketTables, TablePart
from zenflow.layout import WeightPlan
from zenflow.rules import Hyper
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
        runtime: shared by all weights.
        weights: that have a host tier, all in one bucket or a single one.
        dtype: of the gradients.
    """

    def __init__(self, runtime: Runtime, weights: Sequence[SplitWeight], dtype: torch.dtype) -> None:
        self._runtime = runtime
        parts, sent, kept = [], 0, 0
        self.buckets: dict[Bucket, tuple[int, list[tuple[Part, int]]]] = {}
        """Where each bucket's columns begin among those that are sent; its parts, with their elements."""
        plans = [weight.plan for weight in weights]
        for weight, plan in zip(weights, plans, strict=True):
            assert weight.deferred is not None
            places = _places(plan, weight.deferred, weight.selected_columns)
            parts.append(TablePart(plan.rows, plan.columns, places, sent, kept))
            for part in weight.deferred.parts:
                _, of_bucket = self.buckets.setdefault(part.bucket, (sent, []))
                of_bucket.append((part, len(part.slots) * plan.rows))
                sent += of_bucket[-1][1]
            kept += (plan.resident + plan.selected) * plan.rows
        self.sent_elements = sent
        self.tables = BucketTables(parts, dtype, runtime.device.send, transposed=plans[0].transposed)
        self._kept_elements = kept
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
    def updates(self) -> PackedUpdates | None:
        """Of all kept columns; None: there are none."""
        parts = []
        for number, weight in enumerate(self.weights):
            split, resident, selected = weight.split, self.resident[number], self.selected[number]
            if resident is not None and split.resident is not None:
                index = torch.arange(len(resident), device=resident.device)
                parts.append(PackedColumns(number, split.resident, resident, index))
            if selected is not None and split.selected is not None:
                parts.append(PackedColumns(number, split.selected, selected, split.selected_index))
        return self._runtime.kernels.packed_updates(self._runtime.rule, parts) if parts else None

    def update(self, hypers: Sequence[Hyper], control: StepControl | None) -> None:
        """Update all kept columns with the gradients that were packed last, and write the weights.

        Args:
            hypers: of each weight.
            control: factor and skip flag, the same for all.
        """
        if self.updates is not None:
            factor, skip = (None, None) if control is None else (control.factor, control.skip)
            self.updates.run([weight.matrix() for weight in self.weights], hypers, factor=factor, skip=skip)
            element_bytes = 8 * (1 + self._runtime.rule.moments) + 2 * self.kept.element_size()
            self._runtime.device.charge(self.kept.numel() * element_bytes)


class Groups:
    """Keeps groups until other weights come together, or a column changes tier.

    Args:
        runtime: shared by all weights.
    """

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._known: dict[tuple[object, ...], Group] = {}

    def forget(self) -> None:
        """Every bucket may be another one from now on."""
        self._known.clear()

    def of(self, weights: Sequence[SplitWeight], dtype: torch.dtype) -> Group:
        """Tables for weights that have a host tier, all in one bucket or a single one."""
        key = dtype, *((id(weight), first_bucket(weight).moves) for weight in weights)
        if key not in self._known:
            if len(self._known) > _MOST:
                self.forget()
            self._known[key] = Group(self._runtime, list(weights), dtype)
        return self._known[key]


_MOST = 1 << 10


def first_bucket(weight: SplitWeight) -> Bucket:
    """That of a weight's first columns; it has a host tier."""
    assert weight.deferred is not None
    return weight.deferred.parts[0].bucket


def _places(plan: WeightPlan, tier: DeferredTier, selected: torch.Tensor) -> torch.Tensor:
    places = torch.empty(plan.columns, dtype=torch.int32, device="cpu")
    places[: plan.resident] = -1 - torch.arange(plan.resident, dtype=torch.int32, device="cpu")
    places[selected] = -1 - plan.resident - torch.arange(plan.selected, dtype=torch.int32, device="cpu")
    places[tier.slot_columns] = torch.arange(plan.deferred, dtype=torch.int32, device="cpu")
    return places
