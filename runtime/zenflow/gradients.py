"""The gradients of one step, whether they are still whole on the device or left it during backward."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from zenflow.control import StepControl, scaled_control
from zenflow.errors import UnsupportedError
from zenflow.groups import Group, Groups
from zenflow.host.tasks import Control
from zenflow.kernels.base import DevicePart, DeviceUpdates, DeviceWeight, column_norms, whole_norms
from zenflow.kernels.tables import BucketTables
from zenflow.layout import DTYPE_NAMES, can_be_trained
from zenflow.ledger import mass
from zenflow.rules import Hyper
from zenflow.runtime import Runtime
from zenflow.staging import ColumnStager, Dispatcher, Staged
from zenflow.standin import GradientPlaceholder
from zenflow.streaming import Streamer
from zenflow.weight import WeightState, start


class Gradient:
    """One weight's gradient in a step; knows what to do with it in each tier."""

    __slots__ = ("_energies", "_runtime", "_staged", "_whole", "control", "weight")

    def __init__(self, runtime: Runtime, weight: WeightState, staged: Staged | None) -> None:
        """Take it from `.grad`; changes nothing.

        Raises:
            UnsupportedError: it is sparse, or its parameter was frozen as what cannot be trained.
        """
        self.weight = weight
        self.control: StepControl | None = None
        """Factor and skip flag for this weight."""
        self._runtime = runtime
        self._staged = staged
        self._whole = _dense(weight, runtime.device.torch_device) if staged is None else None
        self._energies: torch.Tensor | None = None

    @property
    def left(self) -> bool:
        """Whether it left the device, but for the columns that stay there."""
        return self._staged is not None

    def leave(self, staged: Staged) -> None:
        """It has left."""
        self._staged, self._whole = staged, None

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

    @property
    def leaves(self) -> bool:
        """Whether it is to be packed, as all are but those whose state is one row, or not on this rank."""
        split = self.weight.split
        return self._staged is None and not split.flat and (split.on_device or split.deferred is not None)

    @property
    def device_parts(self) -> Sequence[DevicePart]:
        """What is updated on the device; once it has left, if it is to."""
        return (
            self.weight.split.flat_parts
            if self._staged is None
            else self._staged.group.device_parts[self._staged.number]
        )

    def account(self) -> None:
        """Tell the ledger what was applied on the device."""
        ledger, skip = self._runtime.ledger, None if self.control is None else self.control.skip
        assert ledger is not None
        for part in self.device_parts:
            ledger.apply(self.weight.name, self.whole() if part.packed is None else part.packed, skip)


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


@dataclass(frozen=True, slots=True, eq=False)
class Guess:
    """By what the deferred columns of weights that were packed together move at once, until their updates come."""

    tables: BucketTables
    signs: torch.Tensor
    control: StepControl | None
    numbers: list[int]
    """In the tables."""
    weights: list[WeightState]

    def only(self, place: int) -> Guess:
        """That of one weight."""
        return Guess(self.tables, self.signs, self.control, [self.numbers[place]], [self.weights[place]])


def guesses(gradients: Sequence[Gradient]) -> list[Guess]:
    """Of gradients that have left with their signs; of a weight that shares memory alone."""
    found: dict[tuple[int, ...], Guess] = {}
    for one in gradients:
        staged, weight = one._staged, one.weight
        if staged is None or weight.deferred is None:
            continue
        signs = staged.signs
        assert signs is not None
        key = (id(signs), id(one.control)) if len(weight.neighbours) == 1 else (id(weight),)
        guess = found.get(key)
        if guess is None:
            guess = found[key] = Guess(staged.group.tables, signs, one.control, [], [])
        guess.numbers.append(staged.number)
        guess.weights.append(weight)
    return list(found.values())


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
        staged = gradient._staged
        if staged is not None and gradient._energies is None:
            energies, columns = staged.record.energies_within()
        else:
            energies = gradient.energies()
            columns = range(len(energies))
        if parts and parts[-1][0] is energies and parts[-1][1].stop == columns.start:  # of one group
            parts[-1] = energies, range(parts[-1][1].start, columns.stop)
        else:
            parts.append((energies, columns))
    return torch.cat([energies[columns.start : columns.stop] for energies, columns in parts])


def unscales(gradients: Sequence[Gradient]) -> bool:
    """Whether GradScaler has unscaled any after it left."""
    return bool([1 for one in gradients if one._staged is not None and one._staged.record.unscale is not None])


def log(gradients: Sequence[Gradient], step: int, hypers: Sequence[Hyper]) -> None:
    """Log the deferred columns of gradients that have left."""
    for one in gradients:
        if one._staged is not None and (deferred := one.weight.deferred) is not None:
            deferred.log(one._staged.sent, step, hypers[one.weight.group], one.control)


def set_controls(runtime: Runtime, live: Sequence[Gradient], control: StepControl | None) -> None:
    """Give each gradient its control, and send those to the host that it will ask for."""
    if control is None and not [1 for one in live if one._staged is not None and one._staged.record.factor is not None]:
        return
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


@dataclass(frozen=True, slots=True, eq=False)
class _Known:
    """Some gradients that come together, and what updates the state of their weights on the device."""

    origins: list[Group | list[DevicePart]]
    """Of each gradient, where it was packed or the parts that take it whole; while these stay, all else does."""
    whole: list[tuple[int, int]]
    """Which gradients have not been packed: among the weights that are updated, and among all."""
    updates: DeviceUpdates | None
    """None: no weight has state on the device."""
    parameters: Sequence[torch.Tensor | None]
    """Of each weight that is updated; None where its state is the weight."""
    written: Sequence[torch.Tensor]
    nbytes: int
    """Memory traffic of an update."""


class OnDevice:
    """Updates the state on the device; keeps its tables while the same weights come together."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._known: dict[tuple[int, ...], _Known] = {}

    def update(self, live: Sequence[Gradient], hypers: Sequence[Hyper]) -> None:
        """Update the resident and the selected columns of all weights, and write their weights.

        Args:
            live: of one step, all that leave have left.
        """
        together: dict[int, list[Gradient]] = {}
        for gradient in live:
            if len(gradient.weight.neighbours) > 1:  # views of one memory may overlap, and then the order counts
                self._run([gradient], hypers)
            else:
                together.setdefault(id(gradient.control), []).append(gradient)
        for alike in together.values():
            self._run(alike, hypers)
        if self._runtime.ledger is not None:
            for gradient in live:
                gradient.account()

    def _run(self, gradients: Sequence[Gradient], hypers: Sequence[Hyper]) -> None:
        key = tuple([id(one.weight) for one in gradients])
        origins = [one.weight.split.flat_parts if one._staged is None else one._staged.group for one in gradients]
        known = self._known.get(key)
        if known is None or known.origins != origins:
            if known is None and len(self._known) >= _MOST_TABLES:
                self._known.clear()
            known = self._known[key] = self._make(gradients, origins)
        if known.updates is None:
            return
        whole: list[torch.Tensor | None] = [None] * len(known.parameters)
        for place, number in known.whole:
            whole[place] = gradients[number].whole()
        control = gradients[0].control
        known.updates.run(
            known.parameters,
            whole,
            hypers,
            factor=None if control is None else control.factor,
            skip=None if control is None else control.skip,
        )
        torch.autograd.graph.increment_version(known.written)
        self._runtime.device.charge(known.nbytes)

    def _make(self, gradients: Sequence[Gradient], origins: list[Group | list[DevicePart]]) -> _Known:
        runtime, weights, nbytes = self._runtime, [], 0
        updated = [number for number, one in enumerate(gradients) if one.device_parts]
        for number in updated:
            one = gradients[number]
            plan, parameter = one.weight.plan, one.weight.parameter
            group, dtype = one.weight.group, parameter.dtype
            weights.append(DeviceWeight(one.device_parts, group, dtype, plan.columns, plan.view, plan.transposed))
            elements = sum(part.state.master.numel() for part in one.device_parts)
            nbytes += elements * (8 * (1 + runtime.rule.moments) + 2 * parameter.element_size())
        updates = runtime.kernels.device_updates(runtime.rule, weights, runtime.device.send)
        states = [gradients[number].weight for number in updated]
        written = [weight.parameter for weight in states]
        parameters = [None if weight.split.is_own_master else weight.parameter for weight in states]
        whole = [(place, number) for place, number in enumerate(updated) if not gradients[number].left]
        return _Known(origins, whole, updates, parameters, written, nbytes)


_MOST_TABLES = 16
_ParamGroups = Sequence[Mapping[str, Any]]


class Gradients:
    """Where the gradients of all weights are between two steps; owns the hooks that send them away."""

    def __init__(
        self,
        runtime: Runtime,
        groups: Groups,
        *,
        stream: bool,
        least_firings: int,
        begin: Callable[[_ParamGroups], Sequence[WeightState]] | None,
    ) -> None:
        """Begin without weights.

        Args:
            stream: send gradients away during backward.
            least_firings: backward passes before a step.
            begin: a method that splits the parameters at their first gradient; returns weights that may leave at once.
        """
        self._runtime = runtime
        self._begin = None if begin is None else weakref.WeakMethod(begin)
        self._groups: _ParamGroups = ()
        self._stream = stream
        self._dispatcher = Dispatcher(runtime, groups)
        self._most_bytes = 0  # that were sent in one step
        self.streamed = False
        """Whether any gradient of the last step left during backward, the last weight's first."""
        self._streamer = Streamer(least_firings, self._leave, runtime.device.current_stream, self._begin_streaming)

    def _begin_streaming(self) -> None:
        begin = None if self._begin is None else self._begin()
        for weight in () if begin is None else begin(self._groups):
            self._streamer.stream(weight.parameter, ColumnStager(self._runtime, weight))
        self._streamer.regroup()

    def _leave(self, gradients: Sequence[tuple[ColumnStager[WeightState], torch.Tensor]]) -> list[Staged]:
        if starting := [stager.weight for stager, _ in gradients if not stager.weight.started]:
            start(self._runtime, starting)
            self._runtime.log.fill()
            for weight in starting:
                weight.watch()
        return self._dispatcher.together([(stager.weight, gradient) for stager, gradient in gradients])

    def watch(self, groups: _ParamGroups, weights: Iterable[WeightState]) -> None:
        """Count how often backward gives each parameter a gradient, from now on."""
        self._groups = groups
        if self._stream:
            self._streamer.watch(parameter for group in groups for parameter in group["params"])
            self.stream(weight for weight in weights if weight.started)

    def leave_alone(self, weight: WeightState) -> None:
        """Its gradients stay from now on; none has left."""
        self._streamer.leave_alone(weight.parameter)

    def expected(self, weight: WeightState) -> int:
        """Backward passes that its next step is expected to have."""
        return self._streamer.expected(weight.parameter)

    def expect(self, weight: WeightState, firings: int) -> None:
        """Go on with what a saved run had learnt, before it is watched."""
        self._streamer.expect(weight.parameter, firings)

    def stream(self, weights: Iterable[WeightState]) -> None:
        """Send the gradients of weights that have started away, from the next ones on; the log has room from now on."""
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
        self._most_bytes = 0

    def collect(self, weights: Iterable[WeightState]) -> list[Gradient]:
        """What there is in `.grad`, and what has left it; changes nothing.

        Raises:
            UnsupportedError: one is sparse, or was taken by an earlier step.
        """
        staged = self._streamer.staged()
        found = []
        for weight in weights:
            parameter = weight.parameter
            one = staged.get(id(parameter))
            if one is None:
                if (gradient := parameter.grad) is None:
                    continue
                if isinstance(gradient, GradientPlaceholder) and gradient.record.zeroed:
                    parameter.grad = torch.zeros_like(parameter, requires_grad=False)  # another optimizer's
            found.append(Gradient(self._runtime, weight, one))
        self.streamed = bool(staged)
        return found

    def dispatch(self, live: Iterable[Gradient]) -> None:
        """Pack what has not left during backward, and send what has a place on the host."""
        whole = [one for one in live if one._staged is None and one.leaves]
        for one, staged in zip(whole, self._dispatcher([(one.weight, one.whole()) for one in whole]), strict=True):
            one.leave(staged)

    def hand_over(self) -> None:
        """Leave what was collected to a step."""
        self._streamer.hand_over()

    def end_step(self) -> None:
        """Let one step's gradients wait for the link from now on: copies may run on until the next backward.

        In the first step no more waits than arrives at a time.
        """
        self._most_bytes = max(self._most_bytes, self._dispatcher.sent_bytes)
        self._runtime.room.nbytes, self._dispatcher.sent_bytes = self._most_bytes, 0

    def restore(self) -> None:
        """Bring everything that has left back into `.grad`, before columns change tier between two steps."""
        self._streamer.restore()

    def remove(self) -> None:
        """Take the hooks away; gradients that have left are lost."""
        self._streamer.remove()
        self._groups = ()  # whose parameters are to be freed with their optimizer
