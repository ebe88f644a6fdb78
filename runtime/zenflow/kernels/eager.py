"""The device kernels in plain PyTorch: for devices without Triton, and what the Triton kernels are compared with."""

from __future__ import annotations

import torch

from zenflow.kernels.base import Kernels
from zenflow.rules import Hyper, Rule
from zenflow.state import ColumnState


class EagerKernels(Kernels):
    """One PyTorch operation after the other."""

    name = "eager"

    def energies(self, matrix: torch.Tensor) -> torch.Tensor:
        return matrix.float().square().sum(dim=0)

    def pack(self, matrix: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
        return matrix.t().index_select(0, columns)

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
