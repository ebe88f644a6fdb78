"""The device kernels in plain PyTorch: for devices without Triton, and what the Triton kernels are compared with."""

from __future__ import annotations

import torch

from zenflow.kernels.base import ENERGY_ROWS, Kernels
from zenflow.rules import Hyper, Rule
from zenflow.state import ColumnState


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
        whole = matrix.shape[0] // ENERGY_ROWS * ENERGY_ROWS
        blocks = _down(squares[:whole].unflatten(0, (-1, ENERGY_ROWS)).transpose(0, 1))
        return _down(torch.cat([blocks, _down(squares[whole:])[None]]))

    def pack(self, matrix: torch.Tensor, columns: torch.Tensor, into: torch.Tensor | None = None) -> torch.Tensor:
        packed = matrix.t().index_select(0, columns)
        return packed if into is None else into.copy_(packed)

    def scatter(self, matrix: torch.Tensor, columns: torch.Tensor, rows: torch.Tensor) -> None:
        matrix.index_copy_(1, columns.long(), rows.t().to(matrix.dtype))

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
        rows = gradient.t() if columns is None else gradient.t().index_select(0, columns)
        rows = rows.float() if factor is None else rows.float().mul(factor)
        state.update(rule, rows, hyper, skip=skip)
        if weights is not None and columns is None:
            weights.copy_(state.master.t())
        elif weights is not None and columns is not None:
            self.scatter(weights, columns, state.master)
