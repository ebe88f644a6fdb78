"""One parameter and its three tiers: resident and selected columns on the device, deferred ones on the host."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

from zenflow.control import StepControl
from zenflow.deferred import DeferredTier
from zenflow.device import Transfer
from zenflow.errors import UnsupportedError
from zenflow.layout import WeightPlan
from zenflow.rules import Hyper
from zenflow.runtime import Runtime
from zenflow.selection import Move, plan_move, top_columns
from zenflow.state import ColumnState, reread

_UNKNOWN_VERSION = -1


@dataclass(slots=True)
class _Proposal:
    """A selection that was computed on the device and is on its way to the host."""

    columns: torch.Tensor
    """[n_sel] int32 in host memory."""
    transfer: Transfer


class WeightState:
    """Everything that the runtime knows of one parameter; the only owner of its state."""

    def __init__(
        self,
        parameter: nn.Parameter,
        name: str,
        plan: WeightPlan,
        group: int,
        runtime: Runtime,
        initial: Sequence[float],
    ) -> None:
        self.parameter = parameter
        self.name = name
        self.plan = plan
        self.group = group
        """Index of the parameter group whose hyperparameters apply."""
        self.started = False
        """Whether the masters were read, which happens at the first gradient."""
        self.deferred: DeferredTier | None = None
        self.in_flight = 0
        """Bucket jobs that are not visible yet."""
        self._runtime = runtime
        self._initial = initial  # of each moment
        self._resident: ColumnState | None = None
        self._selected: ColumnState | None = None
        self._selected_columns = torch.empty(0, dtype=torch.int64, device="cpu")
        self._selected_index = self._selected_columns  # the same on the device
        self._proposal: _Proposal | None = None
        self._version = _UNKNOWN_VERSION
        self.neighbours: list[WeightState] = [self]
        """All weights that share this one's memory, this one included: they share its version counter too."""

    @property
    def selects(self) -> bool:
        """Whether there is anything to choose between."""
        return 0 < self.plan.selected < self.plan.offloaded

    @property
    def pending(self) -> bool:
        """Whether a selection takes effect at the next close."""
        return self._proposal is not None

    @property
    def _whole(self) -> bool:
        """Whether the parameter is wholly resident; its state then is one row."""
        return self.plan.resident == self.plan.columns

    def _matrix(self) -> torch.Tensor:
        return self.plan.view(self.parameter.detach())

    # --- start -----------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Read the masters; at the first gradient, after `propose` where something is to be selected."""
        if self._whole:
            self._resident = ColumnState(self._flat_master(), self._runtime.rule.moments, self._initial)
        else:
            self._start_columns(self._matrix())
        self._runtime.device.charge(2 * self.parameter.nbytes)
        self.started = True
        self._note_version()

    def _flat_master(self) -> torch.Tensor:
        weights = self.parameter.detach()
        if weights.dtype == torch.float32 and weights.is_contiguous():
            return weights.view(1, -1)  # the parameter is its own master
        return weights.reshape(1, -1).to(torch.float32, copy=True)

    def _start_columns(self, matrix: torch.Tensor) -> None:
        plan, runtime = self.plan, self._runtime
        if plan.resident:
            self._resident = self._device_state(matrix[:, : plan.resident].t())
        offloaded = torch.arange(plan.resident, plan.columns, device="cpu")
        if plan.selected:
            self._selected_columns = self._take_proposal() if self.pending else offloaded
            self._selected_index = runtime.send_index(self._selected_columns)
            self._selected = self._device_state(runtime.kernels.pack(matrix, self._selected_index))
        if plan.deferred:
            columns = offloaded[~torch.isin(offloaded, self._selected_columns)]
            self.deferred = DeferredTier(self.name, plan, self.parameter.dtype, columns, runtime, self._initial)
            self.deferred.read_masters(matrix, keep=False)

    def _device_state(self, columns: torch.Tensor) -> ColumnState:
        masters = columns.to(torch.float32, copy=True).contiguous()
        return ColumnState(masters, self._runtime.rule.moments, self._initial)

    # --- weights written by others ---------------------------------------------------------------------------------

    def take_outside_writes(self) -> None:
        """Read masters again where somebody else wrote to the parameter since we did.

        Raises:
            UnsupportedError: host updates of it are in flight, which were computed from the old values.
        """
        if not self.started or self.parameter._version == self._version:
            return
        self.refuse_in_flight()
        if self._whole:
            self._reread(self._resident, self.parameter.detach().reshape(1, -1))
        else:
            columns = self._matrix().t()
            self._reread(self._resident, columns[: self.plan.resident])
            if self._selected is not None:
                self._reread(self._selected, self._runtime.kernels.pack(self._matrix(), self._selected_index))
            if self.deferred is not None:
                self.deferred.read_masters(self._matrix(), keep=True)
        self._note_version()

    def refuse_outside_writes(self) -> None:
        """Before the result of a host update is written.

        Raises:
            UnsupportedError: somebody else wrote to the parameter while that update was in flight.
        """
        if self.parameter._version != self._version:
            self.refuse_in_flight()

    def refuse_in_flight(self) -> None:
        """Before masters are read from weights that somebody else wrote to.

        Raises:
            UnsupportedError: host updates are in flight, which were computed from the old values.
        """
        if self.in_flight:
            raise UnsupportedError(
                f"parameter {self.name} was written to while host updates of it were in flight; "
                "call optimizer.flush() before you write to weights"
            )

    def _reread(self, state: ColumnState | None, columns: torch.Tensor) -> None:
        if state is not None and not self._is_own_master(state):
            state.master.copy_(reread(state.master, columns))

    def forget_version(self) -> None:
        """Read the masters again at the next step, whether or not the version counter has moved."""
        self._version = _UNKNOWN_VERSION

    def _note_version(self) -> None:
        for weight in self.neighbours:
            weight._version = weight.parameter._version

    def _is_own_master(self, state: ColumnState) -> bool:
        return state.master.data_ptr() == self.parameter.data_ptr()

    # --- selection -------------------------------------------------------------------------------------------------

    def propose(self, scores: torch.Tensor, skip: torch.Tensor | None) -> None:
        """Select by a gradient's importance; takes effect at the next close (in `start` the first time).

        Args:
            scores: [columns] fp32.
            skip: 0-dim bool; where true the selection stays as it is.
        """
        plan = self.plan
        columns = top_columns(scores[plan.resident :], plan.selected) + plan.resident
        if skip is not None and self.started:
            columns = torch.where(skip, self._selected_index, columns)
        self._proposal = _Proposal(*self._runtime.fetch(columns.int()))
        self._runtime.traffic.index_bytes += self._proposal.columns.nbytes

    def selected_energy(self, scores: torch.Tensor) -> torch.Tensor:
        """[2] fp32: energy in the selected and in all offloaded columns."""
        offloaded = scores[self.plan.resident :].sum()
        return torch.stack([scores.index_select(0, self._selected_index).sum(), offloaded])

    def resolve_pending(self) -> Move | None:
        """Take the pending selection, waiting for it; None where it changes nothing."""
        assert self.deferred is not None
        return plan_move(self._selected_columns, self.deferred.slot_columns, self._take_proposal())

    def _take_proposal(self) -> torch.Tensor:
        assert self._proposal is not None
        proposal, self._proposal = self._proposal, None
        self._runtime.device.block_on(proposal.transfer)
        return proposal.columns.long()

    # --- a step ----------------------------------------------------------------------------------------------------

    def gradient(self) -> torch.Tensor:
        """The parameter's gradient, in strides that the column view can express.

        Raises:
            UnsupportedError: it is sparse.
        """
        gradient = self.parameter.grad
        assert gradient is not None
        if gradient.layout != torch.strided:
            raise UnsupportedError(f"parameter {self.name} has a sparse gradient, allowed are dense ones")
        return gradient if self.plan.transposed else gradient.contiguous()

    def update_on_device(self, gradient: torch.Tensor, hyper: Hyper, control: StepControl | None) -> None:
        """Update the resident and the selected columns and write their weights.

        Args:
            gradient: in the parameter's shape.
            hyper: the group's hyperparameters.
            control: factor and skip flag.
        """
        updated = 0
        if self._resident is not None and self._whole:
            self._update(self._resident, gradient.reshape(-1, 1), self._whole_weights(), hyper, control)
            if self._whole_weights() is None and not self._is_own_master(self._resident):
                self.parameter.copy_(self._resident.master.view(self.parameter.shape))
            updated = self.parameter.numel()
        elif self._resident is not None:
            resident = slice(0, self.plan.resident)
            columns, weights = self.plan.view(gradient)[:, resident], self._matrix()[:, resident]
            self._update(self._resident, columns, weights, hyper, control)
            updated = self._resident.master.numel()
        if self._selected is not None:
            columns, weights = self.plan.view(gradient), self._matrix()
            self._update(self._selected, columns, weights, hyper, control, self._selected_index)
            updated += self._selected.master.numel()
        state_bytes = 8 * (1 + self._runtime.rule.moments)
        self._runtime.device.charge(updated * (state_bytes + 2 * self.parameter.element_size()))
        self._note_version()

    def _whole_weights(self) -> torch.Tensor | None:
        """The weights of a wholly resident parameter as one column; None where there is no such view or no need."""
        weights = self.parameter.detach()
        assert self._resident is not None
        return None if self._is_own_master(self._resident) or not weights.is_contiguous() else weights.view(-1, 1)

    def _update(
        self,
        state: ColumnState,
        gradient: torch.Tensor,
        weights: torch.Tensor | None,
        hyper: Hyper,
        control: StepControl | None,
        columns: torch.Tensor | None = None,
    ) -> None:
        factor, skip = (None, None) if control is None else (control.factor, control.skip)
        self._runtime.kernels.update(
            self._runtime.rule, state, gradient, weights, hyper, columns=columns, factor=factor, skip=skip
        )
        self._wrote()

    def _wrote(self) -> None:
        # Kernels of ours do not count their writes, and autograd must know of them.
        torch.autograd.graph.increment_version(self.parameter)

    def scatter(self, columns: torch.Tensor, rows: torch.Tensor) -> None:
        """Write columns into the weights, rounded to their dtype.

        Args:
            columns: [n] int64 on the device.
            rows: [n, rows] in any floating dtype.
        """
        self._runtime.kernels.scatter(self._matrix(), columns, rows)
        self._wrote()
        self._note_version()

    # --- a change of selection -------------------------------------------------------------------------------------

    def give_up_selected(self, move: Move) -> None:
        """Hand the state of the columns that become deferred to the host; after `DeferredTier.submit_leave`."""
        assert self.deferred is not None
        assert self._selected is not None
        self.deferred.submit_join(move, self._selected.pack(self._runtime.send_index(move.places)))

    def take_selected(self, move: Move, state: torch.Tensor) -> None:
        """Take over the state of the columns that become selected, and make their weights visible.

        Args:
            move: the columns.
            state: [n, packed_columns] int32 on the device.
        """
        assert self.deferred is not None
        assert self._selected is not None
        places = self._runtime.send_index(move.places)
        self._selected.unpack(places, state)
        self.scatter(self._runtime.send_index(move.to_selected), self._selected.master.index_select(0, places))
        self._selected_columns[move.places] = move.to_selected
        self._selected_index = self._runtime.send_index(self._selected_columns)
        self.deferred.rename(move)
