"""What device kernels do with the columns of one weight: the interface, and the same in plain PyTorch."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch

from zenflow.kernels.tables import BucketTables, Send, TablePart, sign_bytes_of
from zenflow.rules import Hyper, Rule
from zenflow.state import ColumnState

ENERGY_ROWS = 64
"""Rows whose squares are summed before they join those of others (csrc/energies.hpp has it too)."""


_CONST = hasattr(torch.Tensor, "const_data_ptr")


def address_of(tensor: torch.Tensor | None) -> int:
    """Address of a tensor's first element, 0 for None. Unlike `data_ptr`, it leaves memory shared that is so lazily."""
    if tensor is None:
        return 0
    if _CONST:
        address: int = tensor.const_data_ptr()  # type: ignore[attr-defined]
    else:
        address = torch._C._data_address(tensor)  # type: ignore[attr-defined]
        address += int(tensor.storage_offset()) * tensor.element_size()
    return address or 16  # an empty tensor has no memory, and is there


def addresses_of(tensors: Sequence[torch.Tensor | None]) -> list[int]:
    """`address_of` each."""
    if not _CONST:
        return list(map(address_of, tensors))
    return [0 if one is None else one.const_data_ptr() or 16 for one in tensors]  # type: ignore[attr-defined]


def finite_or_zero(energies: torch.Tensor) -> torch.Tensor:
    """Turn energies, in any shape, into importance, in place: 0 where they are not finite."""
    return energies.nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)


def sums(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """What each of many tensors adds up to; off the CPU in one launch for all of them.

    Args:
        parts: at least one, of one dimension, fp32, without numbers below 0.

    Returns:
        [parts] fp32.
    """
    if parts[0].device.type == "cpu":  # in the order that torch has for one sum
        return torch.stack([part.sum() for part in parts])
    return torch.stack(torch._foreach_norm(list(parts), 1))  # what is not negative is its own absolute value


def column_norms(energies: Sequence[torch.Tensor], factors: Sequence[torch.Tensor | None]) -> torch.Tensor:
    """The L2 norms of many matrices; off the CPU in a few launches for all of them.

    Args:
        energies: at least one; of each matrix [columns] fp32, the squared L2 norm of each column.
        factors: what each matrix was multiplied with since, 0-dim fp32; None: nothing.

    Returns:
        [matrices] fp32, not finite where the matrix is not.
    """
    if energies[0].device.type == "cpu":  # one root is not always torch's of many
        found = torch.stack([one.sum().sqrt() for one in energies])
    else:
        found = sums(energies).sqrt()
    if all(factor is None for factor in factors):
        return found
    one = torch.ones((), dtype=torch.float32, device=found.device)
    return found * torch.stack([one if factor is None else factor for factor in factors]).abs()


def whole_norms(tensors: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
    """The L2 norms of tensors in any shape and dtype, each 0-dim fp32; off the CPU in one launch for those alike."""
    if tensors[0].device.type == "cpu":
        return [torch.linalg.vector_norm(one.float()) for one in tensors]
    return torch._foreach_norm(list(tensors), 2, torch.float32)


@dataclass(frozen=True, slots=True, eq=False)
class DevicePart:
    """State on the device that every step updates: some columns of a weight, or all of it in one row."""

    state: ColumnState
    columns: torch.Tensor | None
    """[n] int64 on the device; None: the one row has the elements in the order of the parameter's memory."""
    packed: torch.Tensor | None
    """[n, rows], the gradients, in memory that stays; None: each update is given the whole gradient."""


@dataclass(frozen=True, slots=True)
class DeviceWeight:
    """The parts of one weight, no two of which have the same column."""

    parts: Sequence[DevicePart]
    group: int
    """Number of its parameter group."""
    dtype: torch.dtype
    columns: int
    """Of the parameter as a matrix."""
    view: Callable[[torch.Tensor], torch.Tensor]
    """The parameter as [rows, columns]."""
    transposed: bool
    """Whether it is stored [columns, rows]."""

    def gradients_alike(self) -> bool:
        """Whether packed gradients have the parameter's dtype."""
        return all(part.packed is None or part.packed.dtype == self.dtype for part in self.parts)


@dataclass(frozen=True, slots=True, eq=False)
class GuessedColumns:
    """The columns of weights that were sent together, and how far the signs of their gradients move them."""

    tables: BucketTables
    numbers: Sequence[int]
    """Of the weights' parts in these."""
    weights: Sequence[torch.Tensor]
    """In their own shapes."""
    views: Sequence[Callable[[torch.Tensor], torch.Tensor]]
    """Of each weight, as [rows, columns]."""
    signs: torch.Tensor
    """Of all parts, as `Kernels.pack_bucket` has them."""
    lengths: Sequence[float]


class DeviceUpdates:
    """Updates that differ from step to step in little but addresses and the gradients' values."""

    def __init__(self, kernels: Kernels, rule: Rule, weights: Sequence[DeviceWeight]) -> None:
        self._kernels = kernels
        self._rule = rule
        self._weights = weights

    def run(
        self,
        parameters: Sequence[torch.Tensor | None],
        gradients: Sequence[torch.Tensor | None],
        hypers: Sequence[Hyper],
        *,
        factor: torch.Tensor | None = None,
        skip: torch.Tensor | None = None,
    ) -> None:
        """Update all parts, and write them into the parameters, rounded to nearest even.

        Args:
            parameters: of each weight; None: the master is the weight.
            gradients: of each weight that has one which is not packed, contiguous or of the same strides.
            hypers: by number of the parameter group, all of the rule's own type.
            factor: 0-dim fp32 on the device, multiplies the gradients; None: 1.
            skip: 0-dim bool on the device; where it is true the state stays as it is and the parameters are written
                from it all the same.
        """
        for weight, parameter, gradient in zip(self._weights, parameters, gradients, strict=True):
            for part in weight.parts:
                rows = part.packed if gradient is None or part.packed is not None else gradient.reshape(1, -1)
                assert rows is not None
                rows = rows.float() if factor is None else rows.float() * factor
                part.state.update(self._rule, rows, hypers[weight.group], skip=skip)
                if parameter is not None:
                    self._write(weight, part, parameter)

    def _same_dtypes(self, gradients: Sequence[torch.Tensor | None]) -> bool:
        """Whether gradients that are not packed have their parameters' dtypes."""
        pairs = zip(gradients, self._weights, strict=True)
        return all(gradient is None or gradient.dtype == weight.dtype for gradient, weight in pairs)

    def _write(self, weight: DeviceWeight, part: DevicePart, parameter: torch.Tensor) -> None:
        if part.columns is None:
            parameter.detach().copy_(part.state.master.view(parameter.shape))
        else:
            self._kernels.scatter(weight.view(parameter.detach()), part.columns, part.state.master)


class Kernels(ABC):
    """The runtime's arithmetic on a device: queued in the order of its current stream, nothing waits or is read back.

    A matrix is [rows, columns] in fp32, bf16 or fp16, in any strides that do not overlap: a weight stored transposed
    or a slice of one too. Columns are numbered by [n] int64 (or int32), each at most once, all of them in range.
    """

    name: ClassVar[str]
    by_address: ClassVar[bool] = False
    """Whether `guess` writes to contiguous weights by their address alone, which torch does not notice."""

    def runs_on(self, device: torch.device) -> bool:
        """Whether they can work on a device's memory."""
        return True

    @abstractmethod
    def energies(self, matrix: torch.Tensor) -> torch.Tensor:
        """Per-column squared L2 norm, summed in fp32.

        On the CPU the order of the sums is defined, so that every implementation gives the same bits, in any strides:
        blocks of `ENERGY_ROWS` rows, each from its first row to its last, then the blocks' sums from first to last.

        Args:
            matrix: [rows, columns], a gradient.

        Returns:
            [columns], fp32; not finite where the column is not, or where its sum is beyond fp32.
        """

    @abstractmethod
    def pack(self, matrix: torch.Tensor, columns: torch.Tensor, into: torch.Tensor | None = None) -> torch.Tensor:
        """Copy columns out of a matrix, bit for bit.

        Args:
            matrix: [rows, columns].
            columns: [n].
            into: where to, as it is returned; None: new memory.

        Returns:
            [n, rows] in the matrix' dtype, contiguous: each column in one piece.
        """

    @abstractmethod
    def scatter(self, matrix: torch.Tensor, columns: torch.Tensor, rows: torch.Tensor) -> None:
        """Write columns into a matrix, rounded to its dtype, to nearest even.

        Args:
            matrix: [rows, columns], changed in place.
            columns: [n].
            rows: [n, rows], fp32 or the matrix' dtype.
        """

    def device_updates(self, rule: Rule, weights: Sequence[DeviceWeight], send: Send) -> DeviceUpdates:
        """Get updates ready that every step repeats; `send` copies to the device."""
        return DeviceUpdates(self, rule, weights)

    def pack_bucket(
        self,
        tables: BucketTables,
        gradients: Sequence[torch.Tensor | None],
        sent: torch.Tensor,
        kept: torch.Tensor,
        energies: torch.Tensor,
        signs: torch.Tensor | None = None,
    ) -> None:
        """Copy the columns of a bucket's gradients to their places, bit for bit, and sum their squares.

        Args:
            tables: of the bucket.
            gradients: of each part, in the weight's own shape and the bucket's dtype, contiguous; None: nothing of it
                is written.
            sent: flat, in the bucket's dtype, `tables.sent_elements` at least.
            kept: flat, in the bucket's dtype: the kept columns.
            energies: flat fp32, of all parts' columns; on the CPU those of `energies` bit for bit, but for Triton's
                interpreter.
            signs: flat uint8, `tables.sign_bytes`, of the columns that are sent, see `sign_bytes_of`; None: not kept.
        """
        of_parts = zip(tables.parts, gradients, tables.indices, energies.split(tables.columns), strict=True)
        for part, gradient, indices, sums in of_parts:
            if gradient is None:
                continue
            matrix = tables.matrix(part, gradient)
            for run, columns, buffer in zip(part.runs, indices, (sent, kept), strict=True):
                self.pack(matrix, columns, into=run.within(buffer))
            sums.copy_(self.energies(matrix))
            if signs is not None and len(indices[0]):
                _signs_of(part, signs).copy_(_coded(part.runs[0].within(sent)))

    def guess(
        self, guesses: Sequence[GuessedColumns], *, factor: torch.Tensor | None, skip: torch.Tensor | None
    ) -> None:
        """Move weights against the signs of their gradients: `w - length sign(factor) sign(g)`.

        Args:
            guesses: of weights that share no memory.
            factor: 0-dim fp32 on the device, that the gradients were multiplied with; None: 1.
            skip: 0-dim bool on the device; where it is true nothing moves.
        """
        for one in guesses:
            for number, weight, view, length in zip(one.numbers, one.weights, one.views, one.lengths, strict=True):
                part, columns, matrix = one.tables.parts[number], one.tables.indices[number][0], view(weight)
                move = _decoded(_signs_of(part, one.signs), part.rows) * length
                move = move if factor is None else move * _sign(factor)
                old = self.pack(matrix, columns)
                new = (old.float() - move).to(old.dtype)
                self.scatter(matrix, columns, new if skip is None else torch.where(skip, old, new))

    def show_bucket(self, tables: BucketTables, weights: Sequence[torch.Tensor | None], rows: torch.Tensor) -> None:
        """Write the columns that were sent, and have been updated, into the weights.

        Args:
            tables: of the bucket.
            weights: of each part, in the bucket's dtype, contiguous; None: it is left as it is. Nothing else writes to
                them at the same time, not even to other columns.
            rows: flat, in the bucket's dtype and in the layout of what was sent.
        """
        for part, weight, indices in zip(tables.parts, weights, tables.indices, strict=True):
            if weight is not None and len(indices[0]):
                self.scatter(tables.matrix(part, weight), indices[0], part.runs[0].within(rows))


def _sign(values: torch.Tensor) -> torch.Tensor:
    """-1, 0 or 1 in fp32; 0 for what is not a number."""
    return (values > 0).float() - (values < 0).float()


def _signs_of(part: TablePart, signs: torch.Tensor) -> torch.Tensor:
    """[slots, bytes] of a part, a view."""
    slots, width = len(part.runs[0].columns), sign_bytes_of(part.rows)
    return signs[part.sign_start : part.sign_start + slots * width].view(slots, width)


def _coded(rows: torch.Tensor) -> torch.Tensor:
    """[slots, bytes] uint8 of gradients [slots, rows]."""
    codes = (rows > 0).to(torch.uint8) + (rows < 0).to(torch.uint8) * 2
    fours = torch.nn.functional.pad(codes, (0, -rows.shape[1] % 4)).unflatten(1, (-1, 4))
    coded: torch.Tensor = fours[..., 0] | fours[..., 1] << 2 | fours[..., 2] << 4 | fours[..., 3] << 6
    return coded


def _decoded(codes: torch.Tensor, rows: int) -> torch.Tensor:
    """[slots, rows] fp32: -1, 0 and 1."""
    places = torch.stack([codes >> shift & 3 for shift in (0, 2, 4, 6)], dim=2).flatten(1)[:, :rows]
    return (places == 1).float() - (places == 2).float()


def _down(rows: torch.Tensor) -> torch.Tensor:
    """The sum over the first dimension, from first to last; `torch.sum` has an order of its own."""
    total = torch.zeros_like(rows[0]) if len(rows) else rows.sum(dim=0)
    for row in rows:
        total += row
    return total


class EagerKernels(Kernels):
    """One PyTorch operation after the other."""

    name = "eager"

    def energies(self, matrix: torch.Tensor) -> torch.Tensor:
        if matrix.device.type != "cpu":  # where no order is promised: row after row would be as many launches
            norms: torch.Tensor = torch.linalg.vector_norm(matrix, dim=0, dtype=torch.float32)
            return norms.square_()
        squares = matrix.float().square()
        whole = matrix.shape[0] // ENERGY_ROWS * ENERGY_ROWS
        blocks = _down(squares[:whole].unflatten(0, (-1, ENERGY_ROWS)).transpose(0, 1))
        return _down(torch.cat([blocks, _down(squares[whole:])[None]]))

    def pack(self, matrix: torch.Tensor, columns: torch.Tensor, into: torch.Tensor | None = None) -> torch.Tensor:
        packed = matrix.t().index_select(0, columns)
        return packed if into is None else into.copy_(packed)

    def scatter(self, matrix: torch.Tensor, columns: torch.Tensor, rows: torch.Tensor) -> None:
        matrix.index_copy_(1, columns.long(), rows.t().to(matrix.dtype))
