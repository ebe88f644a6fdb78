"""The gradients of one step, whether they are still whole on the device or left it during backward."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from zenflow.control import StepControl, scaled_control
from zenflow.errors import UnsupportedError
from zenflow.groups import Group
from zenflow.host.tasks import Control
from zenflow.kernels.base import ColumnUpdate, column_norms, whole_norms
from zenflow.layout import DTYPE_NAMES, can_be_trained
from zenflow.ledger import mass
from zenflow.rules import Hyper
from zenflow.runtime import Runtime
from zenflow.staging import ColumnStager, Dispatcher, Staged
from zenflow.streaming import Streamer
from zenflow.weight import WeightState, wrote


class Gradient:
    """One weight's gradient in a step; knows what to do with it in each tier."""

    def __init__(self, runtime: Runtime, weight: WeightState, staged: Staged | None) -> None:
        """Take it from `.grad`; changes nothing.

        Args:
            runtime: shared by all weights.
            weight: whose it is.
            staged: what left during backward; None: `.grad` holds all of it.

        Raises:
            UnsupportedError: it is sparse, or its parameter was frozen as what cannot be trained.
        """
        self.weight = weight
        self.control: StepControl | None = None
        """Factor and skip flag for this weight."""
        self.is_updated = False
        """Whether its group was updated as a whole."""
        self._runtime = runtime
        self._staged = staged
        self._whole = _dense(weight, runtime.device.torch_device) if staged is None else None
        self._energies: torch.Tensor | None = None

    @property
    def left(self) -> bool:
        """Whether it left the device, but for the columns that stay there."""
        return self._staged is not None

    @property
    def group(self) -> Group | None:
        """With which it was packed; None where it has not left."""
        return None if self._staged is None else self._staged.group

    def leave(self, staged: Staged) -> None:
        """It has left."""
        self._staged, self._whole = staged, None

    def log(self, step: int, hyper: Hyper) -> None:
        """Log the deferred columns of a gradient that has left.

        Args:
            step: number of the step.
            hyper: the group's hyperparameters at that step.
        """
        if self._staged is not None and self.weight.deferred is not None:
            self.weight.deferred.log(self._staged.sent, step, hyper, self.control)

    @property
    def factor(self) -> torch.Tensor | None:
        """0-dim fp32: what it was multiplied with since it left; None: nothing."""
        return None if self._staged is None else self._staged.record.factor

    def whole(self) -> torch.Tensor:
        """In the parameter's shape, where it has not left."""
        assert self._whole is not None
        return self._whole

    def matrix(self) -> torch.Tensor:
        """[rows, columns] where it has not left; of a parameter that has a column view."""
        return self.weight.plan.view(self.whole())

    # --- measured --------------------------------------------------------------------------------------------------

    def energies(self) -> torch.Tensor:
        """[columns] fp32: squared L2 norm of each column, not finite where it is not; without `factor`."""
        if self._energies is None and self._staged is not None:
            self._energies = self._staged.record.energies
        elif self._energies is None:
            self._energies = self._runtime.kernels.energies(self.matrix())
            self._runtime.device.charge(self.whole().nbytes)
        return self._energies

    def energies_within(self) -> tuple[torch.Tensor, range]:
        """Its energies as a part of a tensor, with those of others perhaps."""
        if self._staged is not None and self._energies is None:
            return self._staged.record.energies_within()
        energies = self.energies()
        return energies, range(len(energies))

    def take_whole(self, energies: torch.Tensor) -> None:
        """Go on with the energies of whole columns, of which this rank holds some rows.

        Args:
            energies: [columns] fp32; of a parameter without a column view, one number.
        """
        self._energies = energies

    def norm(self) -> torch.Tensor:
        """0-dim fp32: its L2 norm, with `factor`; the same to a bit whether it has left or not, however it is split."""
        return norms([self])[0]

    @property
    def columns_tell_norm(self) -> bool:
        """Whether the norm comes from the columns' energies."""
        return self.left or self._energies is not None or bool(self.weight.plan.columns)

    def mass(self) -> torch.Tensor:
        """0-dim int64, for the ledger; without `factor`."""
        if self._staged is None:
            return mass(self.whole())
        assert self._staged.mass is not None
        return self._staged.mass

    @property
    def unscale(self) -> torch.Tensor | None:
        """0-dim fp32: the part of `factor` that is GradScaler's; None: there is none."""
        return None if self._staged is None else self._staged.record.unscale

    # --- applied ---------------------------------------------------------------------------------------------------

    def device_updates(self, hyper: Hyper) -> list[ColumnUpdate]:
        """What updates the resident and the selected columns; `updated` comes after it.

        Args:
            hyper: the group's hyperparameters.
        """
        split, plan, weight = self.weight.split, self.weight.plan, self.weight
        found = []
        if split.flat and split.resident is not None:
            found.append(ColumnUpdate(split.resident, self.whole().reshape(-1, 1), self._in_place(), hyper))
        elif split.resident is not None:
            columns = self._kept_resident() if self.left else self.matrix()[:, : plan.resident]
            found.append(ColumnUpdate(split.resident, columns, weight.matrix()[:, : plan.resident], hyper))
        if split.selected is not None and self.left:
            found.append(ColumnUpdate(split.selected, self._kept_selected(), None, hyper))
        elif split.selected is not None:
            found.append(ColumnUpdate(split.selected, self.matrix(), weight.matrix(), hyper, split.selected_index))
        return found

    def _in_place(self) -> torch.Tensor | None:
        """All weights as one column; None where the master is the weight, or there is no such view."""
        weights = self.weight.parameter.detach()
        own = self.weight.split.is_own_master
        return None if own or not weights.is_contiguous() else weights.view(-1, 1)

    def updated(self) -> None:
        """Write what the updates could not write themselves, and account for them."""
        if self._runtime.ledger is not None:
            self._account()
        if self.is_updated:
            return
        split, weight = self.weight.split, self.weight
        if split.flat and split.resident is not None and not weight.parameter.is_contiguous():
            weight.parameter.copy_(split.resident.master.view(weight.parameter.shape))
        if split.selected is not None and self.left:
            self._runtime.kernels.scatter(weight.matrix(), split.selected_index, split.selected.master)
        states = [state for state in (split.resident, split.selected) if state is not None]
        elements = sum(state.master.numel() for state in states)
        state_bytes = 8 * (1 + self._runtime.rule.moments)
        self._runtime.device.charge(elements * (state_bytes + 2 * weight.parameter.element_size()))

    def _account(self) -> None:
        split, plan = self.weight.split, self.weight.plan
        if split.flat and split.resident is not None:
            self._applied(self.whole())
        elif split.resident is not None:
            self._applied(self._kept_resident() if self.left else self.matrix()[:, : plan.resident])
        if split.selected is not None:
            index = split.selected_index
            self._applied(self._kept_selected() if self.left else self.matrix().index_select(1, index))

    def _applied(self, columns: torch.Tensor) -> None:
        assert self._runtime.ledger is not None
        skip = None if self.control is None else self.control.skip
        self._runtime.ledger.apply(self.weight.name, columns, skip)

    def _kept_resident(self) -> torch.Tensor:
        assert self._staged is not None
        assert self._staged.resident is not None
        return self._staged.resident.t()

    def _kept_selected(self) -> torch.Tensor:
        assert self._staged is not None
        assert self._staged.selected is not None
        return self._staged.selected.t()


def _dense(weight: WeightState, device: torch.device) -> torch.Tensor:
    """`.grad` in strides that the column view can express."""
    parameter, gradient = weight.parameter, weight.parameter.grad
    assert gradient is not None
    if not can_be_trained(parameter, device):  # it was frozen at first
        raise UnsupportedError(
            f"parameter {weight.name} has a gradient and is {parameter.dtype} on {parameter.device}; it must be "
            f"{DTYPE_NAMES} on {device} (a frozen parameter may be anything)"
        )
    if gradient.layout != torch.strided:
        raise UnsupportedError(f"parameter {weight.name} has a sparse gradient; gradients must be dense")
    return gradient if weight.plan.transposed else gradient.contiguous()


def norms(gradients: Sequence[Gradient]) -> torch.Tensor:
    """[n] fp32: the L2 norm of each gradient, with its factor.

    Args:
        gradients: at least one.
    """
    found: dict[Gradient, torch.Tensor] = {}
    if by_columns := [gradient for gradient in gradients if gradient.columns_tell_norm]:
        of_columns = column_norms([one.energies() for one in by_columns], [one.factor for one in by_columns])
        found |= zip(by_columns, of_columns.unbind(), strict=True)
    if others := [gradient for gradient in gradients if not gradient.columns_tell_norm]:  # nothing of them leaves
        found |= zip(others, whole_norms([one.whole() for one in others]), strict=True)
    return torch.stack([found[gradient] for gradient in gradients])


def joined_energies(gradients: Sequence[Gradient]) -> torch.Tensor:
    """[columns of all] fp32: the energies of gradients behind each other, in new memory.

    Args:
        gradients: at least one.
    """
    parts: list[tuple[torch.Tensor, range]] = []
    for gradient in gradients:
        energies, columns = gradient.energies_within()
        if parts and parts[-1][0] is energies and parts[-1][1].stop == columns.start:  # of one group
            parts[-1] = energies, range(parts[-1][1].start, columns.stop)
        else:
            parts.append((energies, columns))
    return torch.cat([energies[columns.start : columns.stop] for energies, columns in parts])


def set_controls(runtime: Runtime, live: Sequence[Gradient], control: StepControl | None) -> None:
    """Give each gradient its control, and send those to the host that it will ask for.

    Args:
        runtime: whose link is used.
        live: of one step.
        control: the step's.
    """
    shared: dict[int, StepControl | None] = {}
    for gradient in live:
        if id(gradient.factor) not in shared:
            shared[id(gradient.factor)] = scaled_control(control, gradient.factor)
        gradient.control = shared[id(gradient.factor)]
    asked = [gradient.control for gradient in live if gradient.weight.plan.deferred and gradient.control is not None]
    distinct = list({id(one): one for one in asked}.values())
    if distinct:
        values, transfer = runtime.fetch(torch.stack([one.packed() for one in distinct]))
        for one, row in zip(distinct, values, strict=True):
            one.host = Control(row, transfer)
        runtime.traffic.index_bytes += values.nbytes


def update_on_device(runtime: Runtime, live: Sequence[Gradient], hypers: Sequence[Hyper]) -> None:
    """Update the resident and the selected columns of all weights, and write their weights.

    Args:
        runtime: whose kernels do it.
        live: of one step.
        hypers: of each parameter group.
    """
    together: dict[int, tuple[StepControl | None, list[ColumnUpdate]]] = {}
    for gradient in _update_groups(live, hypers):
        updates = gradient.device_updates(hypers[gradient.weight.group])
        if len(gradient.weight.neighbours) > 1:  # views of one memory may overlap, and then the order counts
            _update(runtime, gradient.control, updates)
        else:
            together.setdefault(id(gradient.control), (gradient.control, []))[1].extend(updates)
    for control, updates in together.values():
        _update(runtime, control, updates)
    for gradient in live:
        gradient.updated()
    wrote([gradient.weight for gradient in live if gradient.weight.split.on_device])


def _update_groups(live: Sequence[Gradient], hypers: Sequence[Hyper]) -> list[Gradient]:
    """Update the weights of groups that are there as a whole, with one control; which gradients are left over."""
    by_group: dict[Group, list[Gradient]] = {}
    for gradient in live:
        if gradient.group is not None and len(gradient.weight.neighbours) == 1:
            by_group.setdefault(gradient.group, []).append(gradient)
    done: set[Gradient] = set()
    for group, gradients in by_group.items():
        if len(gradients) == len(group.weights) and len({id(gradient.control) for gradient in gradients}) == 1:
            group.update([hypers[weight.group] for weight in group.weights], gradients[0].control)
            done.update(gradients)
    for gradient in done:
        gradient.is_updated = True
    return [gradient for gradient in live if gradient not in done]


def _update(runtime: Runtime, control: StepControl | None, updates: Sequence[ColumnUpdate]) -> None:
    factor, skip = (None, None) if control is None else (control.factor, control.skip)
    runtime.kernels.update_many(runtime.rule, updates, factor=factor, skip=skip)


class Gradients:
    """Where the gradients of all weights are between two steps; owns the hooks that send them away."""

    def __init__(self, runtime: Runtime, *, stream: bool, least_firings: int) -> None:
        """Begin without weights.

        Args:
            runtime: shared by all weights.
            stream: send gradients away during backward.
            least_firings: backward passes before a step.
        """
        self._runtime = runtime
        self._stream = stream
        self._dispatcher = Dispatcher(runtime)
        self.streamed = False
        """Whether any gradient of the last step left during backward, the last weight's first."""
        self._streamer = Streamer(least_firings, self._leave, runtime.device.current_stream)

    def _leave(self, gradients: Sequence[tuple[ColumnStager, torch.Tensor]]) -> list[Staged]:
        return self._dispatcher([(stager.weight, gradient) for stager, gradient in gradients])

    def watch(self, groups: Iterable[Mapping[str, Any]], weights: Iterable[WeightState]) -> None:
        """Count how often backward gives each parameter a gradient, from now on.

        Args:
            groups: the optimizer's parameter groups.
            weights: those that have started already.
        """
        if self._stream:
            self._streamer.watch(parameter for group in groups for parameter in group["params"])
            self.stream(weight for weight in weights if weight.started)

    def expected(self, weight: WeightState) -> int:
        """Backward passes that its next step is expected to have."""
        return self._streamer.expected(weight.parameter)

    def expect(self, weight: WeightState, firings: int) -> None:
        """Go on with what a saved run had learnt, before it is watched."""
        self._streamer.expect(weight.parameter, firings)

    def stream(self, weights: Iterable[WeightState]) -> None:
        """Send the gradients of weights that have started away, from the next ones on; the log has room from now on.

        Raises:
            MemoryError: the host has less memory.
        """
        weights = list(weights)
        if not weights:
            return
        self._runtime.log.fill()
        for weight in weights if self._stream else ():
            if weight.deferred is None:
                self._streamer.leave_alone(weight.parameter)
            else:
                self._streamer.watch([weight.parameter])
                self._streamer.stream(weight.parameter, ColumnStager(self._runtime, weight))
        self._dispatcher.groups.forget()
        self._streamer.regroup()

    def collect(self, weights: Iterable[WeightState]) -> list[Gradient]:
        """What there is in `.grad`, and what has left it; changes nothing.

        Raises:
            UnsupportedError: one is sparse, or was taken by an earlier step.
        """
        self._streamer.require_current()
        found = [
            Gradient(self._runtime, weight, self._streamer.staged(weight.parameter))
            for weight in weights
            if weight.parameter.grad is not None
        ]
        self.streamed = any(one.left for one in found)
        return found

    def dispatch(self, live: Iterable[Gradient]) -> None:
        """Send what has not left during backward, of weights that have a host tier.

        Raises:
            MemoryError: the host has less memory.
            HostEngineError: the host engine has failed.
        """
        whole = [one for one in live if not one.left and one.weight.deferred is not None]
        for one, staged in zip(whole, self._dispatcher([(one.weight, one.whole()) for one in whole]), strict=True):
            one.leave(staged)

    def hand_over(self) -> None:
        """Leave what was collected to a step."""
        self._streamer.hand_over()

    def end_step(self, weights: Iterable[WeightState]) -> None:
        """Let one step's gradients wait for the link from now on: copies may run on until the next backward.

        In the first step, which has all gradients in full, no more waits than arrives at a time.
        """
        trained = (weight for weight in weights if weight.parameter.requires_grad)
        nbytes = sum(w.plan.deferred * w.plan.rows * w.parameter.element_size() for w in trained)
        self._runtime.room.nbytes = nbytes

    def restore(self) -> None:
        """Bring everything that has left back into `.grad`, before columns change tier between two steps."""
        self._streamer.restore()

    def remove(self) -> None:
        """Take the hooks away; gradients that have left are lost."""
        self._streamer.remove()
