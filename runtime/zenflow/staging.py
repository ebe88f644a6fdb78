"""A gradient's way off the device while backward goes on: packed, sent, and brought back where it was too early."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import nn

from zenflow.deferred import DeferredTier, SentBucket
from zenflow.device import HostSpan
from zenflow.layout import WeightPlan
from zenflow.ledger import mass
from zenflow.runtime import Runtime
from zenflow.standin import GradientRecord


class SplitWeight(Protocol):
    """What is asked of a weight, which may be split anew between two gradients."""

    @property
    def name(self) -> str:
        """The parameter's."""

    @property
    def parameter(self) -> nn.Parameter:
        """The parameter itself."""

    @property
    def plan(self) -> WeightPlan:
        """Its split."""

    @property
    def deferred(self) -> DeferredTier | None:
        """Its host tier, once it has one."""

    @property
    def selected_index(self) -> torch.Tensor:
        """[plan.selected] int64 on the device: the selected columns in state order."""


@dataclass(slots=True)
class Staged:
    """One weight's gradient that has left the device."""

    record: GradientRecord
    resident: torch.Tensor | None
    """[plan.resident, rows] in the gradient's dtype, on the device."""
    selected: torch.Tensor | None
    """[plan.selected, rows] likewise, in the order of the selected columns."""
    sent: list[SentBucket]
    """The deferred columns, bucket by bucket."""
    mass: torch.Tensor | None = None
    """Of all columns, where a ledger is kept."""


class ColumnStager:
    """Sends one weight's gradient away as backward produces it; calls are made in the order of the compute stream."""

    def __init__(self, runtime: Runtime, weight: SplitWeight) -> None:
        self._runtime = runtime
        self._weight = weight

    def stage(self, gradient: torch.Tensor) -> Staged | None:
        """Send the deferred columns to the host and keep the others.

        Args:
            gradient: dense, in the parameter's shape and dtype; may be freed afterwards.

        Returns:
            None where nothing of the weight is deferred: then the gradient has to stay.

        Raises:
            MemoryError: the host has less memory.
            HostEngineError: the host engine has failed.
        """
        weight, kernels, device = self._weight, self._runtime.kernels, self._runtime.device
        if weight.deferred is None:
            return None
        plan = weight.plan
        matrix = plan.view(gradient if plan.transposed else gradient.contiguous())
        record = GradientRecord(weight.name, kernels.energies(matrix))
        resident = matrix[:, : plan.resident].t().contiguous() if plan.resident else None
        selected = kernels.pack(matrix, weight.selected_index) if plan.selected else None
        kept_bytes = sum(part.nbytes for part in (resident, selected) if part is not None)
        device.charge(gradient.nbytes + 2 * kept_bytes)
        staged = Staged(record, resident, selected, [])
        if self._runtime.ledger is not None:
            staged.mass = mass(matrix)
        try:
            for bucket in weight.deferred.buckets:
                staged.sent.append(weight.deferred.send(bucket, matrix))
        except BaseException:
            self.void(staged)  # else the log would lose their places
            raise
        return staged

    def void(self, staged: Staged) -> None:
        """Forget a gradient that no step will take; waits for its copies, since the log's room is used again.

        Args:
            staged: what `stage` gave.
        """
        staged.record.give_up()
        for sent in staged.sent:
            self._runtime.device.block_on(sent.transfer)
        self._runtime.log.give_back([sent.place for sent in staged.sent])
        staged.sent.clear()

    def restore(self, staged: Staged) -> torch.Tensor:
        """Bring a gradient back, bit for bit, times what it was multiplied with meanwhile; waits for the copies.

        Args:
            staged: what `stage` gave, with the weight split as it was then.

        Returns:
            The gradient in the parameter's shape, strides and dtype.
        """
        self._runtime.engine.process.require()
        weight, kernels = self._weight, self._runtime.kernels
        plan, record = weight.plan, staged.record
        assert weight.deferred is not None
        gradient = torch.empty_like(weight.parameter, requires_grad=False)
        matrix = plan.view(gradient)
        if staged.resident is not None:
            matrix[:, : plan.resident] = staged.resident.t()
        if staged.selected is not None:
            kernels.scatter(matrix, weight.selected_index, staged.selected)
        for bucket, sent in zip(weight.deferred.buckets, staged.sent, strict=True):
            kernels.scatter(matrix, bucket.columns, self._fetch_back(sent).view(len(bucket.slots), plan.rows))
        self._runtime.device.charge(2 * gradient.nbytes)
        self.void(staged)
        if record.zeroed:
            return gradient.zero_()
        return gradient if record.factor is None else gradient.mul_(record.factor)

    def _fetch_back(self, sent: SentBucket) -> torch.Tensor:
        device = self._runtime.device
        device.block_on(sent.transfer)
        parts = []
        for piece in sent.pieces:
            transfer, part = device.h2d(piece, HostSpan(), device.asked())
            device.block_on(transfer)  # the piece's place is given back soon
            device.join(transfer, part)
            self._runtime.traffic.migrated_bytes += piece.nbytes
            parts.append(part)
        return parts[0] if len(parts) == 1 else torch.cat(parts)
