"""The device kernels in Triton: what each launch needs to know."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from triton.runtime.interpreter import InterpretedFunction

from zenflow.kernels import triton_kernels
from zenflow.kernels.base import Kernels
from zenflow.kernels.eager import EagerKernels
from zenflow.rules import Hyper, Rule, SGDHyper
from zenflow.rules.adagrad import AdagradHyper
from zenflow.rules.adam import AdamHyper, AdamWHyper
from zenflow.rules.base import per_count, root
from zenflow.rules.lion import LionHyper
from zenflow.state import ColumnState

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_BITS = {2: torch.int16, 4: torch.int32}
_STATE_TILE, _COPY_TILE, _SUM_TILE = 1024, 4096, 2048
"""Elements of a tile: with fp32 state beside it, copied, summed."""
# Programs that a sum is cut into where its columns alone do not make as many: fixed, so that the order of summation
# depends on the shape and not on the device.
_SUM_PROGRAMS = 1024


@dataclass(frozen=True, slots=True)
class _Numbers:
    """One update's scalars as `update_columns` takes them; see there."""

    kind: str
    scalars: tuple[float, ...]
    """lr, decay, weight_decay, eps, mix1, mix2, keep."""
    l2: bool = False
    nesterov: bool = False
    per_column: tuple[Any, ...] = ()
    """What depends on a column's update count, for `per_count`."""


class TritonKernels(Kernels):
    """One launch for each method, two for an importance whose rows are cut into parts."""

    name = "triton"

    def __init__(self) -> None:
        self._eager = EagerKernels()  # for what is empty, and for other dtypes

    def runs_on(self, device: torch.device) -> bool:
        return device.type != "cpu" or isinstance(triton_kernels.update_columns, InterpretedFunction)

    def importance(self, matrix: torch.Tensor) -> torch.Tensor:
        return self._column_sums(matrix, finite=True)  # in the same launch

    def energies(self, matrix: torch.Tensor) -> torch.Tensor:
        return self._column_sums(matrix, finite=False)

    def _column_sums(self, matrix: torch.Tensor, *, finite: bool) -> torch.Tensor:
        rows, columns = matrix.shape
        if matrix.numel() == 0 or matrix.dtype not in _DTYPES:
            return self._eager.importance(matrix) if finite else self._eager.energies(matrix)
        block_n, block_r = _tile(_SUM_TILE, columns, rows, _rows_first(matrix))
        wanted = max(1, _SUM_PROGRAMS // _ceil(columns, block_n))
        parts = min(wanted, _ceil(rows, 4 * block_r))
        sums = torch.empty((parts, columns), dtype=torch.float32, device=matrix.device)
        _sum_columns(matrix, sums, squared=True, finite=finite and parts == 1)
        if parts == 1:
            return sums[0]
        scores = torch.empty((1, columns), dtype=torch.float32, device=matrix.device)
        _sum_columns(sums, scores, squared=False, finite=finite)
        return scores[0]

    def pack(self, matrix: torch.Tensor, columns: torch.Tensor, into: torch.Tensor | None = None) -> torch.Tensor:
        n, rows = len(columns), matrix.shape[0]
        if n * rows == 0 or matrix.dtype not in _DTYPES:
            return self._eager.pack(matrix, columns, into=into)
        packed = matrix.new_empty((n, rows)) if into is None else into
        bits = _BITS[matrix.element_size()]
        block_n, block_r = _tile(_COPY_TILE, n, rows, _rows_first(matrix))
        with torch.cuda.device_of(matrix):
            triton_kernels.pack_columns[(_ceil(n, block_n) * _ceil(rows, block_r),)](
                matrix.view(bits),
                columns.contiguous(),
                packed.view(bits),
                n,
                rows,
                *matrix.stride(),
                ROWS_FIRST=_rows_first(matrix),
                BLOCK_N=block_n,
                BLOCK_R=block_r,
            )
        return packed

    def scatter(self, matrix: torch.Tensor, columns: torch.Tensor, rows: torch.Tensor) -> None:
        convert = rows.dtype != matrix.dtype
        known = matrix.dtype in _DTYPES and (not convert or rows.dtype == torch.float32)
        if rows.numel() == 0 or not known:
            self._eager.scatter(matrix, columns, rows)
            return
        n, length = rows.shape
        block_n, block_r = _tile(_COPY_TILE, n, length, _rows_first(matrix))
        with torch.cuda.device_of(matrix):
            triton_kernels.scatter_columns[(_ceil(n, block_n) * _ceil(length, block_r),)](
                _raw(matrix),
                columns.contiguous(),
                _raw(rows.contiguous()),
                n,
                length,
                *matrix.stride(),
                CONVERT=convert,
                BF16=matrix.dtype == torch.bfloat16,
                ROWS_FIRST=_rows_first(matrix),
                BLOCK_N=block_n,
                BLOCK_R=block_r,
            )

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
        numbers = _numbers(hyper)
        known = all(tensor is None or tensor.dtype in _DTYPES for tensor in (gradient, weights))
        if numbers is None or state.master.numel() == 0 or not known:
            self._eager.update(rule, state, gradient, weights, hyper, columns=columns, factor=factor, skip=skip)
            return
        with torch.cuda.device_of(gradient):
            _update(numbers, rule.counts(hyper), state, gradient, weights, columns, factor, skip)


def _update(
    numbers: _Numbers,
    counts: bool,
    state: ColumnState,
    gradient: torch.Tensor,
    weights: torch.Tensor | None,
    columns: torch.Tensor | None,
    factor: torch.Tensor | None,
    skip: torch.Tensor | None,
) -> None:
    n, rows = state.master.shape
    block_n, block_r = _tile(_STATE_TILE, n, rows, _rows_first(gradient))
    # By the rules' own means: the fp64 powers are then the eager ones on every device.
    updated = state.count + 1 if counts else None
    scalars = () if updated is None else per_count(updated, *numbers.per_column)
    rate, inverse_root = (*scalars, None, None)[:2]
    first, second = (*(state.moments if counts else ()), None, None)[:2]
    triton_kernels.update_columns[(_ceil(n, block_n) * _ceil(rows, block_r),)](
        _raw(gradient),
        None if weights is None else _raw(weights),
        None if columns is None else columns.contiguous(),
        state.master,
        first,
        second,
        state.count if counts else None,
        updated,
        rate,
        inverse_root,
        factor,
        skip,
        n,
        rows,
        *gradient.stride(),
        *(gradient if weights is None else weights).stride(),
        *numbers.scalars,
        RULE=numbers.kind,
        L2=numbers.l2,
        NESTEROV=numbers.nesterov,
        GRADIENT_BF16=gradient.dtype == torch.bfloat16,
        WEIGHTS_BF16=weights is not None and weights.dtype == torch.bfloat16,
        GRADIENT_ROWS_FIRST=_rows_first(gradient),
        WEIGHTS_ROWS_FIRST=weights is not None and _rows_first(weights),
        BLOCK_N=block_n,
        BLOCK_R=block_r,
        enable_fp_fusion=False,
    )


def _sum_columns(matrix: torch.Tensor, sums: torch.Tensor, *, squared: bool, finite: bool) -> None:
    rows, columns = matrix.shape
    parts = sums.shape[0]
    block_n, block_r = _tile(_SUM_TILE, columns, rows, _rows_first(matrix))
    with torch.cuda.device_of(matrix):
        triton_kernels.column_sums[(_ceil(columns, block_n), parts)](
            _raw(matrix),
            sums,
            rows,
            columns,
            _ceil(_ceil(rows, parts), block_r) * block_r,
            *matrix.stride(),
            SQUARED=squared,
            FINITE=finite,
            BF16=matrix.dtype == torch.bfloat16,
            ROWS_FIRST=_rows_first(matrix),
            BLOCK_N=block_n,
            BLOCK_R=block_r,
            enable_fp_fusion=False,
        )


def _numbers(hyper: Hyper) -> _Numbers | None:
    """What the kernel takes for a rule's hyperparameters; None for a rule that it does not know."""
    lr = hyper.lr
    if isinstance(hyper, (AdamWHyper, AdamHyper)):
        beta1, beta2 = hyper.beta1, hyper.beta2
        return _Numbers(
            "adam",
            (0.0, hyper.decay, hyper.weight_decay, hyper.eps, 1 - beta1, 1 - beta2, beta2),
            l2=isinstance(hyper, AdamHyper) and hyper.weight_decay != 0,
            per_column=(lambda c: lr / (1 - beta1**c), lambda c: 1 / root(1 - beta2**c)),
        )
    if isinstance(hyper, AdagradHyper):
        lr_decay = hyper.lr_decay
        return _Numbers(
            "adagrad",
            (0.0, 1.0, hyper.weight_decay, hyper.eps, 0.0, 0.0, 0.0),
            l2=hyper.weight_decay != 0,
            per_column=(lambda c: lr / (1 + (c - 1) * lr_decay),),
        )
    if isinstance(hyper, LionHyper):
        return _Numbers("lion", (lr, hyper.decay, 0.0, 0.0, 1 - hyper.beta1, 1 - hyper.beta2, 0.0))
    if isinstance(hyper, SGDHyper):
        return _Numbers(
            "sgd",
            (lr, 1.0, hyper.weight_decay, 0.0, 1 - hyper.dampening, 0.0, hyper.momentum),
            l2=hyper.weight_decay != 0,
            nesterov=hyper.nesterov,
        )
    return None


def _raw(tensor: torch.Tensor) -> torch.Tensor:
    """bf16 as its bits, which is how the kernels take it."""
    return tensor.view(torch.int16) if tensor.dtype == torch.bfloat16 else tensor


def _rows_first(matrix: torch.Tensor) -> bool:
    """Whether a column lies closer together in memory than a row."""
    return matrix.stride(0) < matrix.stride(1) or matrix.shape[1] == 1


def _tile(elements: int, n: int, rows: int, rows_first: bool) -> tuple[int, int]:
    """Columns and rows of a tile, powers of two: long along rows where these are contiguous, else nearly square."""
    along = 256 if rows_first else 1 << (elements.bit_length() - 1) // 2
    block_n = min(_power_of_two(n), elements // min(_power_of_two(rows), along))
    return block_n, min(_power_of_two(rows), elements // block_n)


def _power_of_two(number: int) -> int:
    """The smallest power of two that is not below a number of at least 1."""
    return 1 << (number - 1).bit_length()


def _ceil(number: int, divisor: int) -> int:
    return -(-number // divisor)
