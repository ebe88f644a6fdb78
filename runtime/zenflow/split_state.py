"""Where the fp32 state of one parameter lies, on the device for resident and selected columns, else on the host.

And how it gets from there to somewhere else, bit for bit.
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from zenflow.deferred import DeferredTier
from zenflow.kernels.base import DevicePart
from zenflow.layout import WeightPlan
from zenflow.runtime import Runtime
from zenflow.selection import Move, SelectionChange
from zenflow.state import ColumnState, reread

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
        sources: hold each of the target's columns once; may hold others.
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


class SplitState:
    """The three tiers of one parameter, of which any may be missing; owns their states, but no schedule.

    Where this rank has no row of the parameter, nothing but the choice of columns is kept, which is that of all ranks.

    Moments and counts are those of a beginning until `fill`; masters come from `read_masters` or `fill`.

    Args:
        flat: keep the state of a wholly resident parameter as one row with one count.
        selected: [plan.selected] int64 on the CPU, the selected columns.
        deferred: [plan.deferred] int64 on the CPU, the column in each host slot.
    """

    def __init__(
        self,
        parameter: nn.Parameter,
        name: str,
        plan: WeightPlan,
        runtime: Runtime,
        initial: Sequence[float],
        *,
        flat: bool,
        selected: torch.Tensor,
        deferred: torch.Tensor,
    ) -> None:
        self.flat = flat
        self.resident: ColumnState | None = None
        self.selected: ColumnState | None = None
        self.deferred: DeferredTier | None = None
        self.selected_columns = selected
        self.selected_index = runtime.send_index(selected)
        """`selected_columns` on the device."""
        self.slot_columns = deferred
        """[plan.deferred] int64 on the CPU: the column in each host slot, which other ranks may have alone."""
        self._parameter = parameter
        self._plan = plan
        self._runtime = runtime
        self._initial = initial
        self.is_own_master = False
        """Whether the parameter's own memory is its master: fp32, and wholly resident."""
        self.flat_parts: list[DevicePart] = []
        """Its only part, where it is flat."""
        if flat:
            self.resident = ColumnState(self._flat_master(), runtime.rule.moments, initial)
            self.flat_parts = [DevicePart(self.resident, None, None)]
        elif plan.resident and plan.rows:
            self.resident = self._device_state(plan.resident)
        if plan.selected and plan.rows:
            self.selected = self._device_state(plan.selected)
        if plan.deferred and plan.rows:
            self.deferred = DeferredTier(name, plan, parameter.dtype, deferred, runtime, initial)
        self.on_device = self.resident is not None or self.selected is not None
        """Whether any column's state is on the device."""

    def _flat_master(self) -> torch.Tensor:
        weights = self._parameter.detach()
        self.is_own_master = weights.dtype == torch.float32 and weights.is_contiguous()
        if self.is_own_master:
            return weights.view(1, -1)
        return weights.reshape(1, -1).to(torch.float32, copy=True)

    def _device_state(self, columns: int) -> ColumnState:
        masters = torch.empty((columns, self._plan.rows), dtype=torch.float32, device=self._parameter.device)
        return ColumnState(masters, self._runtime.rule.moments, self._initial)

    def _matrix(self) -> torch.Tensor:
        return self._plan.view(self._parameter.detach())

    def is_replaced(self) -> bool:
        """Whether the parameter, which was its own master, has other memory now."""
        resident = self.resident
        return self.is_own_master and resident is not None and resident.master.data_ptr() != self._parameter.data_ptr()

    # --- masters ---------------------------------------------------------------------------------------------------

    def read_masters(self, values: torch.Tensor) -> None:
        """Begin with masters.

        Args:
            values: in the parameter's shape: the weights, or what they were rounded from.
        """
        if self.flat:
            if self.resident is not None and not self.is_own_master:
                self.resident.master.copy_(values.reshape(1, -1))
            return
        matrix = self._plan.view(values)
        if self.resident is not None:
            self.resident.master.copy_(matrix[:, : self._plan.resident].t())
        if self.selected is not None:
            self.selected.master.copy_(self._runtime.kernels.pack(matrix, self.selected_index))
        if self.deferred is not None:
            self.deferred.read_masters(matrix, keep=False)

    def reread_masters(self, unsettled: Container[int]) -> None:
        """Take the masters from weights that somebody wrote to, but for those that round to their weight."""
        if self.flat and self.resident is not None:
            if self.is_replaced():  # the memory that it had may be somebody else's now
                self.resident.master = self._flat_master()
                self.flat_parts = [DevicePart(self.resident, None, None)]
            self._reread(self.resident, self._parameter.detach().reshape(1, -1))
            return
        self._reread(self.resident, self._matrix().t()[: self._plan.resident])
        if self.selected is not None:
            self._reread(self.selected, self._runtime.kernels.pack(self._matrix(), self.selected_index))
        if self.deferred is not None:
            self.deferred.read_masters(self._matrix(), keep=True, besides=unsettled)

    def _reread(self, state: ColumnState | None, columns: torch.Tensor) -> None:
        if state is not None and not self.is_own_master:
            state.master.copy_(reread(state.master, columns))

    def exchange(self, move: Move) -> None:
        """Choose other columns; their state has moved."""
        assert self.deferred is not None
        self._choose(move.change)
        self.selected_index = move.selected.clone()  # in memory of its own: the move's is that of all weights
        self.deferred.rename(move)

    def choose(self, change: SelectionChange) -> None:
        """Choose other columns, of which there is no state here."""
        self._choose(change)
        self.selected_index = self._runtime.send_index(self.selected_columns)
        self.slot_columns.numpy()[change.slots.numpy()] = change.to_deferred.numpy()

    def _choose(self, change: SelectionChange) -> None:
        self.selected_columns.numpy()[change.places.numpy()] = change.to_selected.numpy()

    # --- other splits ----------------------------------------------------------------------------------------------

    def tiers(self) -> list[Tier]:
        """Where the state of every column lies. A parameter without a column view counts as one column."""
        if self.flat:
            columns = torch.arange(max(1, self._plan.columns), device="cpu")
            return [Tier(columns, self._flat_columns(), on_host=False)]
        found = []
        if self.resident is not None:
            found.append(Tier(torch.arange(self._plan.resident, device="cpu"), self.resident, on_host=False))
        if self.selected is not None:
            found.append(Tier(self.selected_columns, self.selected, on_host=False))
        if self.deferred is not None:
            found.append(Tier(self.deferred.slot_columns, self.deferred.state, on_host=True))
        return found

    def _flat_columns(self) -> ColumnState:
        """The one row as columns that share its memory, but for the counts."""
        state, plan = self.resident, self._plan
        assert state is not None
        if not plan.columns:
            return state
        streams = [plan.view(row.view(self._parameter.shape)).t() for row in (state.master, *state.moments)]
        return ColumnState.over(streams, state.count.repeat(plan.columns))

    def same_counts(self) -> bool:
        """Whether all columns were updated equally often, so that one count can stand for all; waits for the device."""
        counts = [tier.state.count.cpu() for tier in self.tiers()]
        return not counts or torch.cat(counts).unique().numel() == 1

    def fill(self, sources: Sequence[Tier]) -> None:
        """Take over the state of all columns from where it lies; blocks until it is here."""
        for tier in self.tiers():
            move_state(self._runtime, sources, tier)
            if self.flat and self.resident is not None:
                self.resident.count.copy_(tier.state.count[:1])
        for part in () if self.deferred is None else self.deferred.parts:
            part.sample = part.reading = None
