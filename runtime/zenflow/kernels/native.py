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

from zenflow.kernels.base import DeviceUpdates, DeviceWeight, EagerKernels, Kernels, address_of, addresses_of
from zenflow.kernels.tables import BucketTables, Send
from zenflow.rules import RULES, Hyper, Rule

if TYPE_CHECKING:
    from zenflow import _native

_DTYPES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}
_EAGER = EagerKernels()  # for what is not in `_DTYPES`


class NativeKernels(Kernels):
    """One native call for each method.

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

    def device_updates(self, rule: Rule, weights: Sequence[DeviceWeight], send: Send) -> DeviceUpdates:
        known = all(weight.dtype in _DTYPES and weight.gradients_alike() for weight in weights)
        if RULES.get(rule.name) is not rule or not known:
            return super().device_updates(rule, weights, send)
        return _NativeUpdates(self, self._native, rule, weights)

    def pack_bucket(
        self,
        tables: BucketTables,
        gradients: Sequence[torch.Tensor | None],
        sent: torch.Tensor,
        kept: torch.Tensor,
        energies: torch.Tensor,
        signs: torch.Tensor | None = None,
    ) -> None:
        if signs is not None:
            super().pack_bucket(tables, gradients, sent, kept, energies, signs)
            return
        of_sent, of_kept, of_energies = ((one.data_ptr(), one.numel()) for one in (sent, kept, energies))
        self._bucket(tables).pack(addresses_of(gradients), of_sent, of_kept, of_energies, self.threads)

    def show_bucket(self, tables: BucketTables, weights: Sequence[torch.Tensor | None], rows: torch.Tensor) -> None:
        self._bucket(tables).show(addresses_of(weights), (rows.data_ptr(), rows.numel()), self.threads)

    def _bucket(self, tables: BucketTables) -> _native.Bucket:
        """Made once for each table."""
        if tables.native is None:
            parts = []
            for part in tables.parts:
                sent, kept = (run.columns.tolist() for run in part.runs)
                parts.append((part.rows, part.columns, sent, kept, part.sent_start, part.kept_start))
            tables.native = self._native.Bucket(_DTYPES[tables.dtype], tables.transposed, parts)
        made: _native.Bucket = tables.native
        return made


class _NativeUpdates(DeviceUpdates):
    """One native call; made anew where a weight has other strides."""

    def __init__(self, kernels: NativeKernels, native: ModuleType, rule: Rule, weights: Sequence[DeviceWeight]) -> None:
        super().__init__(kernels, rule, weights)
        self._native = native
        self._threads_of = kernels
        self._made: _native.DeviceUpdates | None = None
        self._strides: list[tuple[int, ...] | None] = []
        self._gaps: set[int] = set()  # weights whose one row is not in one piece

    def run(
        self,
        parameters: Sequence[torch.Tensor | None],
        gradients: Sequence[torch.Tensor | None],
        hypers: Sequence[Hyper],
        *,
        factor: torch.Tensor | None = None,
        skip: torch.Tensor | None = None,
    ) -> None:
        if not self._same_dtypes(gradients):
            super().run(parameters, gradients, hypers, factor=factor, skip=skip)
            return
        strides = [None if one is None else one.stride() for one in parameters]
        if self._made is None or strides != self._strides:
            self._made, self._strides = self._make(parameters), strides
        self._made.run(
            addresses_of([None if number in self._gaps else one for number, one in enumerate(parameters)]),
            addresses_of(gradients),
            [(hyper.numbers, hyper.decay) for hyper in hypers],
            1.0 if factor is None else float(factor),
            skip is not None and bool(skip),
            self._threads_of.threads,
        )
        for number in self._gaps:
            parameter, weight = parameters[number], self._weights[number]
            assert parameter is not None
            self._write(weight, weight.parts[0], parameter)

    def _make(self, parameters: Sequence[torch.Tensor | None]) -> _native.DeviceUpdates:
        parts = []
        self._gaps.clear()
        for number, (weight, parameter) in enumerate(zip(self._weights, parameters, strict=True)):
            if parameter is not None and not parameter.is_contiguous() and weight.parts[0].columns is None:
                self._gaps.add(number)
            for part in weight.parts:
                state = part.state
                strides, columns, limit = (1, 1), None, 1
                if part.columns is not None and parameter is not None:
                    matrix = weight.view(parameter.detach())
                    strides = 1 if matrix.shape[0] == 1 else matrix.stride(0), matrix.stride(1)
                    columns, limit = part.columns.data_ptr(), matrix.shape[1]
                packed = 0 if part.packed is None else address_of(part.packed)
                addresses = [moment.data_ptr() for moment in state.moments], state.count.data_ptr(), packed
                of_weight = *strides, columns, limit, _DTYPES[weight.dtype]
                parts.append(
                    (number, weight.group, *state.master.shape, state.master.data_ptr(), *addresses, *of_weight)
                )
        made: _native.DeviceUpdates = self._native.DeviceUpdates(self._rule.name, parts)
        return made


@functools.cache
def _end_helpers_at_exit(native: ModuleType) -> None:
    atexit.register(native.end_helpers)


def _matrix(matrix: torch.Tensor) -> tuple[int, str, int, int]:
    """Address, dtype and strides of [rows, columns]."""
    row_stride, column_stride = matrix.stride()
    if matrix.shape[0] == 1:
        row_stride = 1  # of one row it means nothing, and 1 is what is fast
    return matrix.data_ptr(), _DTYPES[matrix.dtype], row_stride, column_stride


def _index(columns: torch.Tensor) -> torch.Tensor:
    return columns.to(torch.int64).contiguous()
