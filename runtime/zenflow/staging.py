"""A gradient's way off the device while backward goes on: packed, sent, and brought back where it was too early."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch

from zenflow.buckets import Bucket, Kind, Part, Sent, SentPart
from zenflow.deferred import plan_entry, saved_into
from zenflow.device import HostSpan
from zenflow.groups import Group, Groups, SplitWeight, first_bucket
from zenflow.host.places import padded
from zenflow.host.tasks import HostGradient
from zenflow.ledger import mass
from zenflow.runtime import Runtime
from zenflow.standin import GradientRecord

_Weight = TypeVar("_Weight", bound=SplitWeight)


@dataclass(slots=True, eq=False)
class Staged:
    """One weight's gradient that has left the device."""

    record: GradientRecord
    group: Group
    """With which it was packed."""
    number: int
    """In the group."""
    resident: torch.Tensor | None
    """[plan.resident, rows] in the gradient's dtype, on the device."""
    selected: torch.Tensor | None
    """[plan.selected, rows] likewise, in the order of the selected columns."""
    sent: list[SentPart]
    """The deferred columns, part by part."""
    signs: torch.Tensor | None
    """Of the group's deferred columns, where weights are guessed by them, see `Kernels.pack_bucket`."""
    mass: torch.Tensor | None = None
    """Of all columns, where a ledger is kept."""


class Dispatcher:
    """Sends gradients off the device, those of a bucket by one launch and one copy."""

    def __init__(self, runtime: Runtime, groups: Groups) -> None:
        self._runtime = runtime
        self.groups = groups
        self.sent_bytes = 0
        """Since a step set it to 0."""

    def __call__(self, gradients: Sequence[tuple[SplitWeight, torch.Tensor]]) -> list[Staged]:
        """Send gradients; blocks while there is no room for them, on the host or on their way.

        Args:
            gradients: each weight's at most once, dense and in the parameter's shape.
        """
        together: dict[tuple[Bucket | None, torch.dtype, bool], list[int]] = {}
        for number, (weight, gradient) in enumerate(gradients):
            key = first_bucket(weight), gradient.dtype, weight.plan.transposed
            together.setdefault(key, []).append(number)
        found: dict[int, Staged] = {}
        try:
            for numbers in together.values():
                found.update(zip(numbers, self.together([gradients[number] for number in numbers]), strict=True))
        except BaseException:
            for staged in found.values():
                void(self._runtime, staged.sent)
            raise
        return [found[number] for number in range(len(gradients))]

    def together(self, gradients: Sequence[tuple[SplitWeight, torch.Tensor]]) -> list[Staged]:
        """Send gradients of one dtype, of weights that are alike in layout and have their first columns in one bucket.

        Raises MemoryError if the host has less memory, HostEngineError if its engine has failed.
        """
        runtime, device = self._runtime, self._runtime.device
        group = self.groups.of([weight for weight, _ in gradients], gradients[0][1].dtype)
        whole = [gradient.contiguous() for _, gradient in gradients]
        energies = torch.empty(group.columns[-1].stop, dtype=torch.float32, device=device.torch_device)
        device.charge(group.nbytes + 2 * group.kept.nbytes)

        signs = None
        if runtime.guesses and group.sent_elements:
            signs = torch.empty(group.tables.sign_bytes, dtype=torch.uint8, device=device.torch_device)

        def pack(sent: torch.Tensor) -> None:
            runtime.kernels.pack_bucket(group.tables, whole, sent, group.kept, energies, signs)

        packed: torch.Tensor | None = None
        if len(group.buckets) != 1:  # of one large weight, or nothing is sent
            packed = torch.empty(group.sent_elements, dtype=group.kept.dtype, device=device.torch_device)
            pack(packed)
        sent: list[SentPart] = []
        try:
            for bucket, (start, parts) in group.buckets.items():
                sent += self._send(bucket, parts, group.kept.dtype, pack if packed is None else packed[start:])
        except BaseException:
            void(runtime, sent)
            raise
        first, found = 0, []
        of_weights = zip(gradients, group.columns, group.resident, group.selected, group.parts, strict=True)
        for number, ((weight, gradient), columns, resident, selected, count) in enumerate(of_weights):
            record = GradientRecord(weight.name, energies, columns)
            staged = Staged(record, group, number, resident, selected, sent[first : first + count], signs)
            if runtime.ledger is not None:
                staged.mass = mass(gradient)
            found.append(staged)
            first += count
        return found

    def _send(
        self,
        bucket: Bucket,
        parts: Sequence[tuple[Part, int]],
        dtype: torch.dtype,
        packed: torch.Tensor | Callable[[torch.Tensor], object],
    ) -> list[SentPart]:
        """Send a bucket's columns.

        Args:
            packed: all of them on the device, flat, with others behind them perhaps; or what packs them.
        """
        runtime, device = self._runtime, self._runtime.device
        numel = sum(elements for _, elements in parts)
        nbytes = numel * dtype.itemsize
        if dtype != bucket.kind[1]:
            for part, elements in parts:
                plan_entry(runtime, part, elements * dtype.itemsize)
        device.charge_thread(buckets=1)
        runtime.room.make(nbytes)
        device.charge(2 * nbytes)
        if device.in_host_memory:
            write = saved_into(packed[:numel]) if isinstance(packed, torch.Tensor) else packed
            place, memory, transfer = runtime.log.write(numel, dtype, write)
        else:
            if not isinstance(packed, torch.Tensor):
                pack, packed = packed, torch.empty(numel, dtype=dtype, device=device.torch_device)
                pack(packed)
            place, memory, transfer = runtime.log.send(packed[:numel])
        runtime.room.add(transfer, nbytes)
        runtime.last_d2h = transfer
        runtime.traffic.d2h_bytes += nbytes
        self.sent_bytes += nbytes
        sent = Sent(bucket, place, transfer, len(parts))
        bucket.places.append(place)
        ends = itertools.accumulate((elements for _, elements in parts), initial=0)
        return [
            SentPart(sent, HostGradient(memory, start, elements, transfer))
            for (_, elements), start in zip(parts, ends, strict=False)
        ]


def void(runtime: Runtime, sent: Sequence[SentPart]) -> None:
    """Forget gradients that no step will take.

    Waits for their copies, since the log's room is used again: at once where nothing else lies in the same place, else
    after the window. Another gradient of the same step then needs room beside it, which is planned from now on.
    """
    for one in sent:
        runtime.device.block_on(one.gradient.transfer)
        one.sent.parts -= 1
        bucket = one.sent.bucket
        if one.sent.parts:
            one.sent.unused_bytes += padded(one.gradient.numel * one.gradient.dtype.itemsize)
            runtime.buckets.plan_beside(bucket, one.sent.unused_bytes)
        else:
            bucket.places.remove(one.sent.place)
            runtime.log.give_back([one.sent.place])


class ColumnStager(Generic[_Weight]):
    """What can be done with one weight's gradient that has left, or is to leave, during backward."""

    def __init__(self, runtime: Runtime, weight: _Weight) -> None:
        self._runtime = runtime
        self.weight = weight

    @property
    def bucket(self) -> Kind | None:
        """That of its first columns, as soon as it is planned."""
        plan = self.weight.plan
        return (plan.first_bucket, self.weight.parameter.dtype, plan.transposed) if plan.deferred else None

    def void(self, staged: Staged) -> None:
        """Forget a gradient that no step will take."""
        staged.record.give_up()
        void(self._runtime, staged.sent)
        staged.sent = []

    def restore(self, staged: Staged) -> torch.Tensor:
        """Bring a gradient back, bit for bit, times what it was multiplied with meanwhile; waits for the copies.

        Args:
            staged: of this weight, split as it was then.

        Returns:
            The gradient in the parameter's shape, strides and dtype.
        """
        self._runtime.engine.process.require()
        weight, kernels = self.weight, self._runtime.kernels
        plan, record = weight.plan, staged.record
        assert weight.deferred is not None
        gradient = torch.empty_like(weight.parameter, requires_grad=False)
        matrix = plan.view(gradient)
        if staged.resident is not None:
            matrix[:, : plan.resident] = staged.resident.t()
        if staged.selected is not None:
            kernels.scatter(matrix, weight.selected_index, staged.selected)
        for part, sent in zip(weight.deferred.parts, staged.sent, strict=True):
            kernels.scatter(matrix, part.columns, self._fetch_back(sent).view(len(part.slots), plan.rows))
        self._runtime.device.charge(2 * gradient.nbytes)
        self.void(staged)
        if record.zeroed:
            return gradient.zero_()
        return gradient if record.factor is None else gradient.mul_(record.factor)

    def _fetch_back(self, sent: SentPart) -> torch.Tensor:
        device = self._runtime.device
        device.block_on(sent.gradient.transfer)
        parts = []
        for piece in sent.gradient.pieces():
            transfer, part = device.h2d(piece, HostSpan(), device.asked())
            device.block_on(transfer)  # the piece's place is given back soon
            device.join(transfer, part)
            self._runtime.traffic.migrated_bytes += piece.nbytes
            parts.append(part)
        return parts[0] if len(parts) == 1 else torch.cat(parts)
