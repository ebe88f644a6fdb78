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

from zenflow.kernels.base import ColumnUpdate, EagerKernels, Kernels, PackedColumns, PackedUpdates, address_of
from zenflow.kernels.tables import BucketTables
from zenflow.rules import RULES, Hyper, Rule

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
    def threads(self) -> int:
        """Of a call."""
        return self._given_threads or torch.get_num_threads()

    def runs_on(self, device: torch.device) -> bool:
        return device.type == "cpu"

    def energies(self, matrix: torch.Tensor) -> torch.Tensor:
        if matrix.dtype not in _DTYPES:
            return _EAGER.energies(matrix)
        rows, columns = matrix.shape
        energies = torch.empty(columns, dtype=torch.float32, device=matrix.device)
        self._native.column_energies(_matrix(matrix), rows, columns, energies.data_ptr(), self.threads)
        return energies

    def pack(self, matrix: torch.Tensor, columns: torch.Tensor, into: torch.Tensor | None = None) -> torch.Tensor:
        if matrix.dtype not in _DTYPES:
            return _EAGER.pack(matrix, columns, into=into)
        n, (rows, limit) = len(columns), matrix.shape
        index = _index(columns)
        packed = matrix.new_empty((n, rows)) if into is None else into
        self._native.pack_columns(_matrix(matrix), index.data_ptr(), n, rows, limit, packed.data_ptr(), self.threads)
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
            self.threads,
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
        self._native.update_columns(native, self.threads)

    def packed_updates(self, rule: Rule, parts: Sequence[PackedColumns]) -> PackedUpdates:
        known = RULES.get(rule.name) is rule and parts[0].gradient.dtype in _DTYPES
        return _NativeUpdates(self, self._native, rule, parts) if known else super().packed_updates(rule, parts)

    def pack_bucket(
        self,
        tables: BucketTables,
        gradients: Sequence[torch.Tensor | None],
        sent: torch.Tensor,
        kept: torch.Tensor,
        energies: torch.Tensor,
    ) -> None:
        if (bucket := self._bucket(tables)) is None:
            super().pack_bucket(tables, gradients, sent, kept, energies)
            return
        addresses = [address_of(one) for one in gradients]
        bucket.pack(addresses, sent.data_ptr(), kept.data_ptr(), energies.data_ptr(), self.threads)

    def show_bucket(self, tables: BucketTables, weights: Sequence[torch.Tensor | None], rows: torch.Tensor) -> None:
        if (bucket := self._bucket(tables)) is None:
            super().show_bucket(tables, weights, rows)
            return
        bucket.show([address_of(one) for one in weights], rows.data_ptr(), self.threads)

    def _bucket(self, tables: BucketTables) -> _native.Bucket | None:
        """Made once for each table; None: a place is empty."""
        if tables.native is None and all(run.dense for part in tables.parts for run in part.runs):
            parts = []
            for part in tables.parts:
                sent, kept = (run.columns.tolist() for run in part.runs)
                parts.append((part.rows, part.columns, sent, kept, part.sent_start, part.kept_start))
            tables.native = self._native.Bucket(_DTYPES[tables.dtype], tables.transposed, parts)
        made: _native.Bucket | None = tables.native
        return made

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


class _NativeUpdates(PackedUpdates):
    """One native call; made anew where a weight has other strides."""

    def __init__(self, kernels: NativeKernels, native: ModuleType, rule: Rule, parts: Sequence[PackedColumns]) -> None:
        super().__init__(kernels, rule, parts)
        self._native = native
        self._threads_of = kernels
        self._made: _native.PackedUpdates | None = None
        self._strides: list[tuple[int, ...]] = []

    def run(
        self,
        weights: Sequence[torch.Tensor],
        hypers: Sequence[Hyper],
        *,
        factor: torch.Tensor | None,
        skip: torch.Tensor | None,
    ) -> None:
        strides = [one.stride() for one in weights]
        if self._made is None or strides != self._strides:
            self._made, self._strides = self._make(weights), strides
        numbers: dict[int, tuple[tuple[float, ...], float]] = {}
        for hyper in hypers:
            if id(hyper) not in numbers:
                numbers[id(hyper)] = hyper.numbers, hyper.decay
        self._made.run(
            [address_of(one) for one in weights],
            [numbers[id(hyper)] for hyper in hypers],
            1.0 if factor is None else float(factor),
            skip is not None and bool(skip),
            self._threads_of.threads,
        )

    def _make(self, weights: Sequence[torch.Tensor]) -> _native.PackedUpdates:
        parts = []
        for one in self._parts:
            state, matrix = one.state, weights[one.weight]
            addresses = state.master.data_ptr(), [moment.data_ptr() for moment in state.moments], state.count.data_ptr()
            strides = 1 if matrix.shape[0] == 1 else matrix.stride(0), matrix.stride(1)
            of_columns = one.gradient.data_ptr(), *strides, one.columns.data_ptr(), matrix.shape[1]
            parts.append((one.weight, *state.master.shape, *addresses, *of_columns))
        dtypes = _DTYPES[self._parts[0].gradient.dtype], _DTYPES[weights[0].dtype]
        made: _native.PackedUpdates = self._native.PackedUpdates(self._rule.name, *dtypes, parts)
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
