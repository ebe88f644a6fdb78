"""The device kernels in the native module (csrc/matrix.hpp): for weights in the host's own memory.

One pass over memory where PyTorch takes a dozen, on as many threads as PyTorch has for its operations, or is said.
"""

from __future__ import annotations

import atexit
import functools
from collections.abc import Sequence
from types import ModuleType
from typing import TYPE_CHECKING

import torch

from zenflow.kernels.base import ColumnUpdate, EagerKernels, Kernels
from zenflow.rules import RULES, Rule

if TYPE_CHECKING:
    from zenflow import _native

_DTYPES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}
_EAGER = EagerKernels()  # for what is not in `_DTYPES`


class NativeKernels(Kernels):
    """One native call for each method, and one for all the updates of a step.

    The threads beside the caller are the process', whatever the number of optimizers: as torch's own, they are as many
    as the cores are worth, and the caller never waits for one that has not come. They sleep between calls, end with the
    interpreter, and a forked child starts its own.

    Args:
        native: the native module.
        threads: of a call; None: as many as PyTorch has then.
    """

    name = "native"

    def __init__(self, native: ModuleType, threads: int | None = None) -> None:
        self._native = native
        self._given_threads = threads
        _end_helpers_at_exit(native)

    @property
    def _threads(self) -> int:
        return self._given_threads or torch.get_num_threads()

    def runs_on(self, device: torch.device) -> bool:
        return device.type == "cpu"

    def energies(self, matrix: torch.Tensor) -> torch.Tensor:
        if matrix.dtype not in _DTYPES:
            return _EAGER.energies(matrix)
        rows, columns = matrix.shape
        energies = torch.empty(columns, dtype=torch.float32, device=matrix.device)
        self._native.column_energies(_matrix(matrix), rows, columns, energies.data_ptr(), self._threads)
        return energies

    def pack(self, matrix: torch.Tensor, columns: torch.Tensor, into: torch.Tensor | None = None) -> torch.Tensor:
        if matrix.dtype not in _DTYPES:
            return _EAGER.pack(matrix, columns, into=into)
        n, (rows, limit) = len(columns), matrix.shape
        index = _index(columns)
        packed = matrix.new_empty((n, rows)) if into is None else into
        self._native.pack_columns(_matrix(matrix), index.data_ptr(), n, rows, limit, packed.data_ptr(), self._threads)
        return packed

    def scatter(self, matrix: torch.Tensor, columns: torch.Tensor, rows: torch.Tensor) -> None:
        known = matrix.dtype in _DTYPES and rows.dtype in (matrix.dtype, torch.float32)
        if not known or rows.shape != (len(columns), matrix.shape[0]):
            _EAGER.scatter(matrix, columns, rows)
            return
        index, source = _index(columns), rows.contiguous()
        self._native.scatter_columns(
            _matrix(matrix),
            index.data_ptr(),
            *rows.shape,
            matrix.shape[1],
            source.data_ptr(),
            _DTYPES[source.dtype],
            self._threads,
        )

    def update_many(
        self,
        rule: Rule,
        updates: Sequence[ColumnUpdate],
        *,
        factor: torch.Tensor | None = None,
        skip: torch.Tensor | None = None,
    ) -> None:
        known = [one for one in updates if _known(rule, one)]
        if len(known) < len(updates):
            others = [one for one in updates if not _known(rule, one)]
            _EAGER.update_many(rule, others, factor=factor, skip=skip)
        indices = [None if one.columns is None else _index(one.columns) for one in known]  # must live until the end
        number, skipped = (1.0 if factor is None else float(factor)), skip is not None and bool(skip)
        numbers: dict[int, tuple[tuple[float, ...], float]] = {}
        native: list[_native.ColumnUpdate] = []
        for one, index in zip(known, indices, strict=True):
            if id(one.hyper) not in numbers:
                numbers[id(one.hyper)] = one.hyper.numbers, one.hyper.decay
            native.append(self._update(rule, one, index, number, numbers[id(one.hyper)], skipped))
        self._native.update_columns(native, self._threads)

    def _update(
        self,
        rule: Rule,
        one: ColumnUpdate,
        index: torch.Tensor | None,
        factor: float,
        hyper: tuple[tuple[float, ...], float],
        skip: bool,
    ) -> _native.ColumnUpdate:
        state = one.state
        made: _native.ColumnUpdate = self._native.ColumnUpdate(
            rule.name,
            *state.master.shape,
            state.master.data_ptr(),
            [moment.data_ptr() for moment in state.moments],
            state.count.data_ptr(),
            _matrix(one.gradient),
            None if one.weights is None else _matrix(one.weights),
            None if index is None else index.data_ptr(),
            one.gradient.shape[1],
            factor,
            hyper,
            skip,
        )
        return made


@functools.cache
def _end_helpers_at_exit(native: ModuleType) -> None:
    atexit.register(native.end_helpers)


def _known(rule: Rule, one: ColumnUpdate) -> bool:
    """Whether it is as `Kernels.update` wants it, and in what the native code knows."""
    state, gradient, weights, columns = one.state, one.gradient, one.weights, one.columns
    rows, limit = gradient.shape
    return (
        RULES.get(rule.name) is rule
        and gradient.dtype in _DTYPES
        and (weights is None or (weights.dtype in _DTYPES and weights.shape == gradient.shape))
        and state.master.shape == ((limit if columns is None else len(columns)), rows)
        and state.master.is_contiguous()
    )


def _matrix(matrix: torch.Tensor) -> tuple[int, str, int, int]:
    """Address, dtype and strides of [rows, columns]."""
    row_stride, column_stride = matrix.stride()
    if matrix.shape[0] == 1:
        row_stride = 1  # of one row it means nothing, and 1 is what is fast
    return matrix.data_ptr(), _DTYPES[matrix.dtype], row_stride, column_stride


def _index(columns: torch.Tensor) -> torch.Tensor:
    return columns.to(torch.int64).contiguous()
