"""What device kernels do with the columns of one weight."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch

from zenflow.rules import Hyper, Rule
from zenflow.state import ColumnState

ENERGY_ROWS = 64
"""Rows whose squares are summed before they join those of others (csrc/energies.hpp has it too)."""


def finite_or_zero(energies: torch.Tensor) -> torch.Tensor:
    """Importance for energies, in any shape: 0 where they are not finite."""
    return torch.nan_to_num(energies, nan=0.0, posinf=0.0, neginf=0.0)


@dataclass(frozen=True, slots=True)
class ColumnUpdate:
    """What one `Kernels.update` is about; the fields are its arguments."""

    state: ColumnState
    gradient: torch.Tensor
    weights: torch.Tensor | None
    hyper: Hyper
    columns: torch.Tensor | None = None


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

    @abstractmethod
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
        for one in updates:
            self.update(
                rule, one.state, one.gradient, one.weights, one.hyper, columns=one.columns, factor=factor, skip=skip
            )
