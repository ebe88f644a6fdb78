"""What device kernels do with the columns of one weight: the interface, and the same in plain PyTorch."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch

from zenflow.kernels.tables import BucketTables, KeptState, KeptTables
from zenflow.rules import Hyper, Rule
from zenflow.state import ColumnState

ENERGY_ROWS = 64
"""Rows whose squares are summed before they join those of others (csrc/energies.hpp has it too)."""


_CONST = hasattr(torch.Tensor, "const_data_ptr")


def address_of(tensor: torch.Tensor | None) -> int:
    """Address of a tensor's first element, 0 for None. Unlike `data_ptr`, it leaves memory shared that is so lazily."""
    if tensor is None:
        return 0
    if _CONST:
        address: int = tensor.const_data_ptr()  # type: ignore[attr-defined]
    else:
        address = torch._C._data_address(tensor)  # type: ignore[attr-defined]
        address += int(tensor.storage_offset()) * tensor.element_size()
    return address or 16  # an empty tensor has no memory, and is there


def finite_or_zero(energies: torch.Tensor) -> torch.Tensor:
    """Turn energies, in any shape, into importance, in place: 0 where they are not finite."""
    return energies.nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)


def sums(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """What each of many tensors adds up to; off the CPU in one launch for all of them.

    Args:
        parts: at least one, of one dimension, fp32, without numbers below 0.

    Returns:
        [parts] fp32.
    """
    if parts[0].device.type == "cpu":  # in the order that torch has for one sum
        return torch.stack([part.sum() for part in parts])
    return torch.stack(torch._foreach_norm(list(parts), 1))  # what is not negative is its own absolute value


def column_norms(energies: Sequence[torch.Tensor], factors: Sequence[torch.Tensor | None]) -> torch.Tensor:
    """The L2 norms of many matrices; off the CPU in a few launches for all of them.

    Args:
        energies: at least one; of each matrix [columns] fp32, the squared L2 norm of each column.
        factors: what each matrix was multiplied with since, 0-dim fp32; None: nothing.

    Returns:
        [matrices] fp32, not finite where the matrix is not.
    """
    if energies[0].device.type == "cpu":  # one root is not always torch's of many
        found = torch.stack([one.sum().sqrt() for one in energies])
    else:
        found = sums(energies).sqrt()
    if all(factor is None for factor in factors):
        return found
    one = torch.ones((), dtype=torch.float32, device=found.device)
    return found * torch.stack([one if factor is None else factor for factor in factors]).abs()


def whole_norms(tensors: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
    """The L2 norms of tensors in any shape and dtype, each 0-dim fp32; off the CPU in one launch for those alike."""
    if tensors[0].device.type == "cpu":
        return [torch.linalg.vector_norm(one.float()) for one in tensors]
    return torch._foreach_norm(list(tensors), 2, torch.float32)


@dataclass(frozen=True, slots=True)
class ColumnUpdate:
    """What one `Kernels.update` is about; the fields are its arguments."""

    state: ColumnState
    gradient: torch.Tensor
    weights: torch.Tensor | None
    hyper: Hyper
    columns: torch.Tensor | None = None


@dataclass(frozen=True, slots=True)
class PackedColumns:
    """Columns of one weight whose gradients are kept packed."""

    weight: int
    """Number of the weight."""
    state: ColumnState
    gradient: torch.Tensor
    """[n, rows], in memory that stays."""
    columns: torch.Tensor
    """[n] int64 on the device."""


class PackedUpdates:
    """Updates that differ from step to step in little but the gradients' values.

    Args:
        kernels: do it.
        rule: the update rule.
        parts: no two of them have the same column.
    """

    def __init__(self, kernels: Kernels, rule: Rule, parts: Sequence[PackedColumns]) -> None:
        self._kernels = kernels
        self._rule = rule
        self._parts = parts

    def run(
        self,
        weights: Sequence[torch.Tensor],
        hypers: Sequence[Hyper],
        *,
        factor: torch.Tensor | None,
        skip: torch.Tensor | None,
    ) -> None:
        """Update all columns, and write them into the weights.

        Args:
            weights: each [rows, columns].
            hypers: of each weight.
            factor: as for `Kernels.update`, the same for all.
            skip: likewise.
        """
        updates = [ColumnUpdate(one.state, one.gradient.t(), None, hypers[one.weight]) for one in self._parts]
        self._kernels.update_many(self._rule, updates, factor=factor, skip=skip)
        for one in self._parts:
            self._kernels.scatter(weights[one.weight], one.columns, one.state.master)


class Kernels(ABC):
    """The runtime's arithmetic on a device: queued in the order of its current stream, nothing waits or is read back.

    A matrix is [rows, columns] in fp32, bf16 or fp16, in any strides that do not overlap: a weight stored transposed
    or a slice of one too. Columns are numbered by [n] int64 (or int32), each at most once, all of them in range.
    """

    name: ClassVar[str]

    def runs_on(self, device: torch.device) -> bool:
        """Whether they can work on a device's memory."""
        return True

    @abstractmethod
    def energies(self, matrix: torch.Tensor) -> torch.Tensor:
        """Per-column squared L2 norm, summed in fp32.

        On the CPU the order of the sums is defined, so that every implementation gives the same bits, in any strides:
        blocks of `ENERGY_ROWS` rows, each from its first row to its last, then the blocks' sums from first to last.

        Args:
            matrix: [rows, columns], a gradient.

        Returns:
            [columns], fp32; not finite where the column is not, or where its sum is beyond fp32.
        """

    def importance(self, matrix: torch.Tensor) -> torch.Tensor:
        """The same, but 0 where it is not finite.

        Args:
            matrix: [rows, columns], a gradient.

        Returns:
            [columns], fp32.
        """
        return finite_or_zero(self.energies(matrix))

    @abstractmethod
    def pack(self, matrix: torch.Tensor, columns: torch.Tensor, into: torch.Tensor | None = None) -> torch.Tensor:
        """Copy columns out of a matrix, bit for bit.

        Args:
            matrix: [rows, columns].
            columns: [n].
            into: where to, as it is returned; None: new memory.

        Returns:
            [n, rows] in the matrix' dtype, contiguous: each column in one piece.
        """

    @abstractmethod
    def scatter(self, matrix: torch.Tensor, columns: torch.Tensor, rows: torch.Tensor) -> None:
        """Write columns into a matrix, rounded to its dtype, to nearest even.

        Args:
            matrix: [rows, columns], changed in place.
            columns: [n].
            rows: [n, rows], fp32 or the matrix' dtype.
        """

    def update(
        self,
        rule: Rule,
        state: ColumnState,
        gradient: torch.Tensor,
        weights: torch.Tensor | None,
        hyper: Hyper,
        *,
        columns: torch.Tensor | None = None,
        factor: torch.Tensor | None = None,
        skip: torch.Tensor | None = None,
    ) -> None:
        """Update the state of columns by a rule and write their weights, rounded to nearest even.

        Args:
            rule: the update rule.
            state: of n columns with `rows` elements each, contiguous, changed in place.
            gradient: [rows, columns].
            weights: [rows, columns], changed in place; None where the master is the weight.
            hyper: hyperparameters of the step, of the rule's own type.
            columns: [n], the column of each row of `state`; None: column i of the matrices is row i of the state, and
                they have n columns.
            factor: 0-dim fp32 on the device, multiplies the gradient; None: 1.
            skip: 0-dim bool on the device; where it is true the state stays as it is and the weights are written from
                it all the same.
        """
        self.update_many(rule, [ColumnUpdate(state, gradient, weights, hyper, columns)], factor=factor, skip=skip)

    @abstractmethod
    def update_many(
        self,
        rule: Rule,
        updates: Sequence[ColumnUpdate],
        *,
        factor: torch.Tensor | None = None,
        skip: torch.Tensor | None = None,
    ) -> None:
        """The updates of one step, in any order and at the same time: no two of them touch the same memory.

        Args:
            rule: the update rule.
            updates: of each weight its tiers.
            factor: as for `update`, the same for all.
            skip: likewise.
        """

    def packed_updates(self, rule: Rule, parts: Sequence[PackedColumns]) -> PackedUpdates:
        """Get updates ready that every step repeats.

        Args:
            rule: the update rule.
            parts: what is updated, of weights in one dtype, with gradients in one; at least one.
        """
        return PackedUpdates(self, rule, parts)

    def pack_bucket(
        self,
        tables: BucketTables,
        gradients: Sequence[torch.Tensor | None],
        sent: torch.Tensor,
        kept: torch.Tensor,
        energies: torch.Tensor,
    ) -> None:
        """Copy the columns of a bucket's gradients to their places, bit for bit, and sum their squares.

        Args:
            tables: of the bucket.
            gradients: of each part, in the weight's own shape and the bucket's dtype, contiguous; None: nothing of it
                is written.
            sent: flat, in the bucket's dtype, `tables.sent_elements` at least.
            kept: flat, in the bucket's dtype: the kept columns.
            energies: flat fp32, of all parts' columns; on the CPU those of `energies` bit for bit, but for Triton's
                interpreter.
        """
        of_parts = zip(tables.parts, gradients, tables.indices, energies.split(tables.columns), strict=True)
        for part, gradient, indices, sums in of_parts:
            if gradient is None:
                continue
            matrix = tables.matrix(part, gradient)
            for run, (columns, places), buffer in zip(part.runs, indices, (sent, kept), strict=True):
                if places is None:
                    self.pack(matrix, columns, into=run.within(buffer))
                else:
                    run.within(buffer).index_copy_(0, places, self.pack(matrix, columns))
            sums.copy_(self.energies(matrix))

    def show_bucket(self, tables: BucketTables, weights: Sequence[torch.Tensor | None], rows: torch.Tensor) -> None:
        """Write the columns that were sent, and have been updated, into the weights.

        Args:
            tables: of the bucket.
            weights: of each part, in the bucket's dtype, contiguous; None: it is left as it is. Nothing else writes to
                them at the same time, not even to other columns.
            rows: flat, in the bucket's dtype and in the layout of what was sent.
        """
        for part, weight, indices in zip(tables.parts, weights, tables.indices, strict=True):
            if weight is not None:
                self._show(tables.matrix(part, weight), indices[0], part.runs[0].within(rows))

    def update_kept(
        self,
        rule: Rule,
        tables: KeptTables,
        weights: Sequence[torch.Tensor | None],
        gradients: torch.Tensor,
        state: KeptState,
        hypers: Sequence[Hyper],
        *,
        longest: int,
        factor: torch.Tensor | None = None,
        skip: torch.Tensor | None = None,
        present: Sequence[bool] | None = None,
    ) -> None:
        """Update all kept columns, and write them into the weights as `update` does.

        Args:
            rule: the update rule.
            tables: of the weights' buckets.
            weights: of each part of all buckets, contiguous; None: the weight is not written.
            gradients: flat, in the buckets' dtype: the kept columns.
            state: changed in place; it may become anything in places without a column.
            hypers: by number of the parameter group, all of the rule's own type.
            longest: no update count is larger after this update.
            factor: as for `update`, the same for all.
            skip: likewise.
            present: of each part, whether it has a gradient; without one it stays as it is. None: all have.
        """
        runs = [run for bucket in tables.buckets for run in zip(bucket.parts, bucket.indices, strict=True)]
        views = [bucket.matrix for bucket in tables.buckets for _ in bucket.parts]
        everything = zip(runs, views, weights, tables.groups, tables.states(state), strict=True)
        some = [one for at, one in enumerate(everything) if present is None or present[at]]
        updates = [
            ColumnUpdate(of_part, part.runs[1].within(gradients).t(), None, hypers[group])
            for (part, _), _, _, group, of_part in some
        ]
        self.update_many(rule, updates, factor=factor, skip=skip)
        for (part, indices), view, weight, _, of_part in some:
            if weight is not None:
                self._show(view(part, weight), indices[1], of_part.master)

    def _show(self, matrix: torch.Tensor, index: tuple[torch.Tensor, torch.Tensor | None], rows: torch.Tensor) -> None:
        columns, places = index
        if len(columns):
            self.scatter(matrix, columns, rows if places is None else rows.index_select(0, places))

    def warm(
        self,
        rule: Rule,
        buckets: Sequence[BucketTables],
        kept: Sequence[tuple[KeptTables, KeptState]],
        hypers: Sequence[Hyper],
    ) -> None:
        """Compile, load and send all that steps need which does not change: launches that write nothing.

        Args:
            rule: the update rule.
            buckets: all of them.
            kept: their kept columns, of each dtype.
            hypers: as for `update_kept`.
        """
        for tables in buckets:
            nothing: list[None] = [None] * len(tables.parts)
            empty = torch.empty(0, dtype=tables.dtype, device=tables.places.device)
            energies = torch.empty(sum(tables.columns), dtype=torch.float32, device=empty.device)
            self.pack_bucket(tables, nothing, empty, empty, energies)
            self.show_bucket(tables, nothing, empty)
        for of_dtype, state in kept:
            empty = torch.empty(0, dtype=of_dtype.buckets[0].dtype, device=of_dtype.columns.device)
            never = [False] * len(of_dtype.groups)
            self.update_kept(rule, of_dtype, [None] * len(never), empty, state, hypers, longest=1, present=never)


def _down(rows: torch.Tensor) -> torch.Tensor:
    """The sum over the first dimension, from first to last; `torch.sum` has an order of its own."""
    total = torch.zeros_like(rows[0]) if len(rows) else rows.sum(dim=0)
    for row in rows:
        total += row
    return total


class EagerKernels(Kernels):
    """One PyTorch operation after the other."""

    name = "eager"

    def energies(self, matrix: torch.Tensor) -> torch.Tensor:
        squares = matrix.float().square()
        if matrix.device.type != "cpu":  # where no order is promised: row after row would be as many launches
            return squares.sum(dim=0)
        whole = matrix.shape[0] // ENERGY_ROWS * ENERGY_ROWS
        blocks = _down(squares[:whole].unflatten(0, (-1, ENERGY_ROWS)).transpose(0, 1))
        return _down(torch.cat([blocks, _down(squares[whole:])[None]]))

    def pack(self, matrix: torch.Tensor, columns: torch.Tensor, into: torch.Tensor | None = None) -> torch.Tensor:
        packed = matrix.t().index_select(0, columns)
        return packed if into is None else into.copy_(packed)

    def scatter(self, matrix: torch.Tensor, columns: torch.Tensor, rows: torch.Tensor) -> None:
        matrix.index_copy_(1, columns.long(), rows.t().to(matrix.dtype))

    def update_many(
        self,
        rule: Rule,
        updates: Sequence[ColumnUpdate],
        *,
        factor: torch.Tensor | None = None,
        skip: torch.Tensor | None = None,
    ) -> None:
        for one in updates:
            gradient = one.gradient.t()
            rows = (gradient if one.columns is None else gradient.index_select(0, one.columns)).float()
            one.state.update(rule, rows if factor is None else rows.mul(factor), one.hyper, skip=skip)
            if one.weights is not None and one.columns is None:
                one.weights.copy_(one.state.master.t())
            elif one.weights is not None and one.columns is not None:
                self.scatter(one.weights, one.columns, one.state.master)
