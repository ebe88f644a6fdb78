"""The device kernels in Triton: what each launch needs to know."""

from __future__ import annotations

import subprocess
import sysconfig
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from triton.runtime.interpreter import InterpretedFunction

from zenflow.errors import UnsupportedError
from zenflow.kernels import triton_kernels
from zenflow.kernels.base import ColumnUpdate, EagerKernels, Kernels, finite_or_zero
from zenflow.kernels.bucket_launch import BucketKernels, RuleNumbers, rule_numbers
from zenflow.rules import Hyper, Rule
from zenflow.rules.base import per_count

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_BITS = {2: torch.int16, 4: torch.int32}
_STATE_TILE, _COPY_TILE, _SUM_TILE = 1024, 4096, 2048
"""Elements of a tile: with fp32 state beside it, copied, summed."""
# Programs that a sum is cut into where its columns alone do not make as many: fixed, so that the order of summation
# depends on the shape and not on the device.
_SUM_PROGRAMS = 1024


@dataclass(frozen=True, slots=True)
class _Counts:
    """What depends on the update counts of one update's columns: [n] or [n, 1], views of what all updates have."""

    updated: torch.Tensor | None = None
    """int32, the counts with this update; None where the rule does not count."""
    rate: torch.Tensor | None = None
    inverse_root: torch.Tensor | None = None


class TritonKernels(BucketKernels):
    """One launch for each method, and one of torch for an importance whose rows are cut into parts.

    The updates of a step take a dozen more, for what depends on their counts.
    """

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
        block_n, block_r = _tile(_SUM_TILE, matrix)
        wanted = max(1, _SUM_PROGRAMS // _ceil(columns, block_n))
        parts = min(wanted, _ceil(rows, 4 * block_r))
        sums = torch.empty((parts, columns), dtype=torch.float32, device=matrix.device)
        _sum_columns(matrix, sums, finite=finite and parts == 1)
        if parts == 1:
            return sums[0]
        scores = sums.sum(dim=0)  # few numbers, which Triton would need five times as long to launch
        return finite_or_zero(scores) if finite else scores

    def pack(self, matrix: torch.Tensor, columns: torch.Tensor, into: torch.Tensor | None = None) -> torch.Tensor:
        n, rows = columns.shape[0], matrix.shape[0]
        if n * rows == 0 or matrix.dtype not in _DTYPES:
            return self._eager.pack(matrix, columns, into=into)
        packed = matrix.new_empty((n, rows)) if into is None else into
        bits = _BITS[matrix.element_size()]
        block_n, block_r = _tile(_COPY_TILE, matrix)
        with torch.cuda.device_of(matrix):
            triton_kernels.pack_columns[(_ceil(n, block_n) * _ceil(rows, block_r),)](
                matrix.view(bits),
                columns.contiguous(),
                packed.view(bits),
                n,
                rows,
                *_strides(matrix),
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
        block_n, block_r = _tile(_COPY_TILE, matrix)
        with torch.cuda.device_of(matrix):
            triton_kernels.scatter_columns[(_ceil(n, block_n) * _ceil(length, block_r),)](
                _raw(matrix),
                columns.contiguous(),
                _raw(rows.contiguous()),
                n,
                length,
                *_strides(matrix),
                CONVERT=convert,
                BF16=matrix.dtype == torch.bfloat16,
                ROWS_FIRST=_rows_first(matrix),
                BLOCK_N=block_n,
                BLOCK_R=block_r,
            )

    def update_many(
        self,
        rule: Rule,
        updates: Sequence[ColumnUpdate],
        *,
        factor: torch.Tensor | None = None,
        skip: torch.Tensor | None = None,
    ) -> None:
        together: dict[Hyper, tuple[RuleNumbers, list[ColumnUpdate]]] = {}
        others = []
        for one in updates:
            numbers = rule_numbers(one.hyper) if _known(one) else None
            if numbers is None:
                others.append(one)
            else:
                together.setdefault(one.hyper, (numbers, []))[1].append(one)
        self._eager.update_many(rule, others, factor=factor, skip=skip)
        for numbers, alike in together.values():
            with torch.cuda.device_of(alike[0].gradient):
                counts = _counts(numbers, alike) if rule.counts(alike[0].hyper) else [_Counts()] * len(alike)
                for one, of_one in zip(alike, counts, strict=True):
                    _update(numbers, one, of_one, factor, skip)


def _known(one: ColumnUpdate) -> bool:
    """Whether it has anything to update, in dtypes that the kernel takes."""
    return one.state.master.numel() > 0 and all(
        tensor is None or tensor.dtype in _DTYPES for tensor in (one.gradient, one.weights)
    )


def _counts(numbers: RuleNumbers, updates: Sequence[ColumnUpdate]) -> list[_Counts]:
    """The counts of all updates and what follows from them, made at once: it takes a dozen launches."""
    sizes = [len(one.state.count) for one in updates]
    updated = torch.cat([one.state.count for one in updates]) + 1
    # By the rules' own means: the fp64 powers are then the eager ones on every device.
    scalars = per_count(updated, *numbers.per_column)
    return [_Counts(*parts) for parts in zip(*(whole.split(sizes) for whole in (updated, *scalars)), strict=True)]


def require_launch(kernels: Kernels, device: torch.device) -> None:
    """Launch the smallest kernel on a device: that Triton can be imported does not say that it can be used.

    Before its first kernel it builds a C module for Python, with a C compiler and Python's headers.

    Args:
        kernels: whose launch is tried.
        device: where.

    Raises:
        UnsupportedError: the kernel could not be built or launched, or did not do what it should; with the reason.
    """
    try:
        matrix = torch.tensor([[1.0, 2.0]], dtype=torch.float32, device=device)
        packed = kernels.pack(matrix, torch.tensor([1], device=device)).tolist()
    except Exception as error:  # Triton, the compiler, the loader and the driver raise what they like
        raise UnsupportedError(f"{kernels.name} cannot launch a kernel on {device}: {_why(error)}") from error
    if packed != [[2.0]]:
        raise UnsupportedError(f"{kernels.name}'s first kernel on {device} gave {packed} instead of [[2.0]]")


def _why(error: Exception) -> str:
    """The reason of a failed launch in one line."""
    if isinstance(error, subprocess.CalledProcessError):  # the compiler itself has told the terminal more
        scheme = sysconfig.get_default_scheme()
        headers = Path(sysconfig.get_path("include", "posix_prefix" if scheme == "posix_local" else scheme))
        missing = "" if (headers / "Python.h").exists() else f", and Python.h is not in {headers}"
        return f"{Path(error.cmd[0]).name} failed to build a C module for Python{missing}"
    first = (str(error).strip() or type(error).__name__).partition("\n")[0]
    return first.rstrip(".")


def _update(
    numbers: RuleNumbers, one: ColumnUpdate, counts: _Counts, factor: torch.Tensor | None, skip: torch.Tensor | None
) -> None:
    state, gradient, weights = one.state, one.gradient, one.weights
    n, rows = state.master.shape
    block_n, block_r = _tile(_STATE_TILE, gradient)
    first, second = (*(() if counts.updated is None else state.moments), None, None)[:2]
    triton_kernels.update_columns[(_ceil(n, block_n) * _ceil(rows, block_r),)](
        _raw(gradient),
        None if weights is None else _raw(weights),
        None if one.columns is None else one.columns.contiguous(),
        state.master,
        first,
        second,
        None if counts.updated is None else state.count,
        counts.updated,
        counts.rate,
        counts.inverse_root,
        factor,
        skip,
        n,
        rows,
        *_strides(gradient),
        *_strides(gradient if weights is None else weights),
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


def _sum_columns(matrix: torch.Tensor, sums: torch.Tensor, *, finite: bool) -> None:
    rows, columns = matrix.shape
    parts = sums.shape[0]
    block_n, block_r = _tile(_SUM_TILE, matrix)
    with torch.cuda.device_of(matrix):
        triton_kernels.column_sums[(_ceil(columns, block_n), parts)](
            _raw(matrix),
            sums,
            rows,
            columns,
            _ceil(_ceil(rows, parts), block_r) * block_r,
            *_strides(matrix),
            FINITE=finite,
            BF16=matrix.dtype == torch.bfloat16,
            ROWS_FIRST=_rows_first(matrix),
            BLOCK_N=block_n,
            BLOCK_R=block_r,
            enable_fp_fusion=False,
        )


def _raw(tensor: torch.Tensor) -> torch.Tensor:
    """bf16 as its bits, which is how the kernels take it."""
    return tensor.view(torch.int16) if tensor.dtype == torch.bfloat16 else tensor


def _rows_first(matrix: torch.Tensor) -> bool:
    """Whether a column lies closer together in memory than a row."""
    return matrix.stride(0) < matrix.stride(1) or matrix.shape[1] == 1


def _strides(matrix: torch.Tensor) -> tuple[int, int]:
    """Its strides; 0 for that of a single column, for the compiler sees that 0 is aligned and the column is not."""
    row, column = matrix.stride()
    return row, 0 if matrix.shape[1] == 1 else column


def _tile(elements: int, matrix: torch.Tensor) -> tuple[int, int]:
    """Columns and rows of a tile of a matrix: long along rows where these are contiguous, else nearly square.

    Powers of two that are the same for every size: the kernels leave out what is not there, and each other tile would
    be one more variant to compile.
    """
    if matrix.shape[1] == 1:  # a whole parameter in one column
        return 1, elements
    along = 256 if _rows_first(matrix) else 1 << (elements.bit_length() - 1) // 2
    return elements // along, along


def _ceil(number: int, divisor: int) -> int:
    return -(-number // divisor)
