"""Where the state of a weight's columns lies, and how it gets from there to somewhere else, bit for bit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from zenflow.runtime import Runtime
from zenflow.state import ColumnState

# Bytes of state that cross the link at a time, so that a large weight does not need as much again on the way.
_CHUNK_BYTES = 1 << 26


@dataclass(frozen=True, slots=True)
class Tier:
    """Columns of one weight whose state lies in one place."""

    columns: torch.Tensor
    """[n] int64 on the CPU: column i of them is row i of the state."""
    state: ColumnState
    on_host: bool


def move_state(runtime: Runtime, sources: Sequence[Tier], target: Tier) -> None:
    """Fill a tier with the state of its columns; blocks until it is there.

    Args:
        runtime: whose device and link are used.
        sources: hold each of the target's columns once; may hold others.
        target: receives the state.
    """
    for source in sources:
        places, found = _matches(target.columns, source.columns)
        chunk = max(1, _CHUNK_BYTES // (4 * target.state.packed_columns))
        for into, out_of in zip(places.split(chunk), found.split(chunk), strict=True):
            if len(into):
                _move(runtime, source, out_of, target, into)


def _matches(wanted: torch.Tensor, held: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Positions in `wanted` of the columns that are held, and their positions in `held`."""
    length = 1 + max(int(part.max()) if len(part) else 0 for part in (wanted, held))
    positions = torch.full((length,), -1, device="cpu")
    positions[held] = torch.arange(len(held), device="cpu")
    found = positions[wanted]
    places = (found >= 0).nonzero().squeeze(1)
    return places, found[places]


def _move(runtime: Runtime, source: Tier, out_of: torch.Tensor, target: Tier, into: torch.Tensor) -> None:
    packed = source.state.pack(out_of if source.on_host else runtime.send_index(out_of))
    if source.on_host and not target.on_host:
        packed = runtime.device.send(packed)
    elif target.on_host and not source.on_host:
        packed, transfer = runtime.fetch(packed, runtime.memory.transient(packed.shape, packed.dtype))
        runtime.device.block_on(transfer)
    if source.on_host != target.on_host:
        runtime.traffic.migrated_bytes += packed.nbytes
    target.state.unpack(into if target.on_host else runtime.send_index(into), packed)
