"""Launches of the runtime's kernels for one matrix, of which one column in twenty is kept."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from gpu.bench import Bench

from zenflow.kernels import Kernels
from zenflow.kernels.base import DevicePart, DeviceWeight
from zenflow.kernels.tables import BucketTables, TablePart
from zenflow.rules import RULES
from zenflow.state import ColumnState

_KEPT_SHARE = 20


def launches_of(bench: Bench, kernels: Kernels, matrix: torch.Tensor) -> dict[str, tuple[Callable[[], Any], int]]:
    """By name, what launches a kernel and the bytes that it has to move.

    matrix: [rows, columns] on the device.
    """
    rows, width = matrix.shape
    places = torch.arange(width, dtype=torch.int32)
    kept = places % _KEPT_SHARE == 0
    places[~kept] = torch.arange(int((~kept).sum()), dtype=torch.int32)
    places[kept] = -1 - torch.arange(int(kept.sum()), dtype=torch.int32)
    tables = BucketTables([TablePart(rows, width, places, 0, 0)], matrix.dtype, bench.put)
    stay = int(kept.sum())
    sent, packed = matrix.new_empty((width - stay) * rows), matrix.new_empty((stay, rows))
    energies = matrix.new_empty(width, dtype=torch.float32)
    selected = bench.put(kept.nonzero().squeeze(1))
    rule = RULES["adamw"]
    hyper = rule.hyper({"lr": 1e-4, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0})
    whole = DevicePart(ColumnState(matrix.float().reshape(1, -1), 2), None, None)
    some = DevicePart(ColumnState(packed.float(), 2), selected, packed)
    updates = [
        kernels.device_updates(
            rule, [DeviceWeight([part], 0, matrix.dtype, width, torch.Tensor.detach, transposed=False)], bench.put
        )
        for part in (whole, some)
    ]
    flat = packed.view(-1)
    # Bytes of an element: read, and packed or written; fp32 state is read and written.
    return {
        "pack and sum": (
            lambda: kernels.pack_bucket(tables, [matrix], sent, flat, energies),
            2 * matrix.nbytes,
        ),
        "show": (lambda: kernels.show_bucket(tables, [matrix], sent), 2 * sent.nbytes),
        "update all": (lambda: updates[0].run([matrix], [matrix], [hyper]), 14 * matrix.nbytes),
        "update the selected columns": (lambda: updates[1].run([matrix], [None], [hyper]), 14 * packed.nbytes),
    }
