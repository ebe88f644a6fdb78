"""What the host can be asked to do with the deferred columns of one weight, and the gate that starts tasks in order."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from zenflow.clock import Clock
from zenflow.device import Transfer
from zenflow.rules import Hyper, Rule
from zenflow.state import ColumnState


class StartGate:
    """Holds jobs back in the order in which they come; any thread may call it.

    For a device that computes on the host's own cores: work that starts long before it is due then only slows the steps
    down that come next, and all of it the same one.
    """

    def __init__(self, clock: Clock) -> None:
        self._poll_s = clock.poll_s
        self._changed = clock.condition("its turn")
        self._step = 0
        self._urgent = 0
        self._open = False

    def reach(self, step: int) -> None:
        with self._changed:
            self._step = step
            self._changed.notify_all()

    def hurry(self, number: int) -> None:
        """Hold nothing back up to a job, counted from 1 in the order of submission, since somebody waits for it."""
        with self._changed:
            self._urgent = max(self._urgent, number)
            self._changed.notify_all()

    def open(self) -> None:
        """Hold nothing back any more."""
        with self._changed:
            self._open = True
            self._changed.notify_all()

    def wait(self, number: int, not_before: int) -> None:
        """Block until a job may start, which is after the step `not_before`."""
        with self._changed:
            while not (not_before <= self._step or number <= self._urgent or self._open):
                # Not for ever: a finalizer that runs in this very thread may open it just before it sleeps.
                self._changed.wait(self._poll_s)


@dataclass(frozen=True, slots=True)
class HostColumns:
    """The deferred columns of one weight as a backend knows them."""

    rule: Rule
    state: ColumnState
    handle: int  # the backend's number for them


class Control:
    """A step's device scalars on the host: factor on the gradient, and whether the step is skipped.

    `values` is [2] fp32 in host memory (factor, and 0 or 1 for skip) once `transfer` is over.
    """

    __slots__ = ("_live", "transfer", "values")

    def __init__(self, values: torch.Tensor, transfer: Transfer) -> None:
        self.values = values
        self.transfer = transfer
        self._live: tuple[float, bool] | None = None

    def live(self) -> tuple[float, bool]:
        """Factor on the gradient, and whether the step counts; only once it has arrived."""
        if self._live is None:
            factor, skip = self.values.tolist()
            self._live = factor, not skip
        return self._live


# Not frozen, since one is made for each weight and step: that would take three times as long.
@dataclass(slots=True, eq=False)
class HostGradient:
    """A step's gradient of some columns, [n, rows], on its way to host memory or there; others may lie beside it."""

    memory: Sequence[torch.Tensor]
    """Flat, in the gradient's dtype; behind each other."""
    start: int
    """Where in it the gradient begins, in elements."""
    numel: int
    transfer: Transfer  # the last of its copies

    def pieces(self) -> list[torch.Tensor]:
        """Flat memory of this gradient alone; behind each other [n, rows]."""
        found: list[torch.Tensor] = []
        start, left = self.start, self.numel
        for piece in self.memory:
            size = min(left, piece.numel() - start)
            if size > 0:
                found.append(piece.narrow(0, start, size))
                left -= size
            start = max(0, start - piece.numel())
        return found or [self.memory[0].narrow(0, 0, 0)]

    @property
    def dtype(self) -> torch.dtype:
        return self.memory[0].dtype


@dataclass(slots=True, eq=False)
class LogEntry:
    """One step's gradient of some columns, with what the step did with it."""

    step: int
    gradient: HostGradient
    hyper: Hyper
    control: Control | None  # None: factor 1, not skipped

    def live(self) -> tuple[float, bool]:
        """Factor on the gradient, and whether the step counts; only once the control has arrived."""
        return (1.0, True) if self.control is None else self.control.live()

    @property
    def may_count(self) -> bool:
        """Whether the step counts, as far as is known: waits for nothing."""
        return self.control is None or not self.control.transfer.done() or self.live()[1]

    def transfers(self) -> list[Transfer]:
        """What must have arrived before the entry can be used."""
        return [self.gradient.transfer] if self.control is None else [self.gradient.transfer, self.control.transfer]


@dataclass(frozen=True, slots=True)
class Targets:
    """Columns that share a log, and where their gradients are found in it."""

    slots: range | torch.Tensor
    """The slots to update; [n] int64 where they are not consecutive."""
    entries: Sequence[tuple[LogEntry, torch.Tensor | None]]
    """In order of their steps; with each [n] int64: the packed row of each target. None: row i belongs to target i."""
    out: torch.Tensor | None = None
    """[n] int64: row of the outcome that belongs to each target. None: row i."""


@dataclass(frozen=True, slots=True)
class Update:
    """Apply a window to columns: replayed, or averaged where `closing` is given."""

    columns: HostColumns
    parts: Sequence[Targets]
    closing: Hyper | None
    """For the mean: hyperparameters of the step that closed the window."""
    weights: torch.Tensor | None = None
    """[n, rows] host memory in the model's dtype: receives the new weights."""
    packed: torch.Tensor | None = None
    """[n, packed_columns] int32 host memory: receives the columns' state instead."""
    missing: float = 0.0
    """Updates that the new weights will lack while they are seen, in the mean, and are to be moved on by."""

    def coast(self) -> float:
        """How many times the last update is added to the weights, not to the masters; once all entries are here."""
        last = [entry.hyper for entry, _ in self.parts[0].entries if entry.live()[1]][-1:]
        return self.columns.rule.coast(last[0], self.missing) if last and self.missing else 0.0


@dataclass(frozen=True, slots=True)
class ReadMasters:
    """Take masters from weights."""

    columns: HostColumns
    slots: range
    weights: torch.Tensor
    """[n, rows] in the model's dtype, in host memory."""
    keep: bool
    """Keep a master that rounds to its weight, so that an unchanged weight loses no precision."""


@dataclass(frozen=True, slots=True)
class Unpack:
    """Take over the state of columns."""

    columns: HostColumns
    slots: torch.Tensor  # [n] int64
    packed: torch.Tensor  # [n, packed_columns] int32 in host memory


Task = Update | ReadMasters | Unpack
