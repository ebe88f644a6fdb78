"""One parameter and its three tiers: resident and selected columns on the device, deferred ones on the host."""

from __future__ import annotations

import itertools
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from zenflow.deferred import DeferredTier
from zenflow.device import Arrived, Transfer
from zenflow.errors import UnsupportedError
from zenflow.host.tasks import LogEntry
from zenflow.layout import WeightPlan
from zenflow.ledger import mass
from zenflow.runtime import Runtime
from zenflow.selection import BucketChange, BucketMove, Move, SelectionChange, change_of_buckets, plan_move, top_columns
from zenflow.split_state import SplitState, Tier
from zenflow.writes import WriteWatch


@dataclass(slots=True)
class _Proposal:
    """A selection that was computed on the device and is on its way to the host."""

    columns: torch.Tensor
    """[n_sel] int32 in host memory."""
    transfer: Transfer
    begun: bool = False
    """Whether a close has looked at it, so that some buckets may have followed it."""


@dataclass(frozen=True, slots=True)
class OutsideWrite:
    """Somebody else may have written to a weight."""

    before: torch.Tensor | None
    """What the weight held before, in its shape; None where nothing was unsettled."""


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
        self.in_flight: set[int] = set()
        """Numbers (over the whole model) of the buckets whose windows are not visible yet."""
        self._runtime = runtime
        self._initial = initial  # of each moment
        self.started = False
        """Whether the masters were read, which happens at the first gradient."""
        self.split: SplitState
        """Where its state lies; only once it has started."""
        self.deferred: DeferredTier | None = None
        """The host's part; None where there is none, or before the start."""
        self.chosen = True
        """Whether a gradient that counts has chosen its columns, now or for the next close."""
        self._proposal: _Proposal | None = None
        self._scores: torch.Tensor | None = None
        self._writes = WriteWatch(parameter)
        self._form: _Form | None = None  # when its state began
        self.restored = False
        """Whether its state is from a checkpoint, and was not compared with the weights yet."""
        self.shown: dict[int, torch.Tensor] | None = None
        """Where it was restored, or holds what a flush would make for the time: by the number (counted in this weight)
        of each unsettled bucket, what training sees of it, [slots, rows] in the model's dtype in host memory."""
        self.neighbours: list[WeightState] = [self]
        """All weights that share this one's memory, this one included."""

    @property
    def unsettled(self) -> set[int]:
        """Numbers of the buckets whose weights are not what their masters round to: in flight, or shown ahead."""
        ahead = {part.index for part in self.deferred.parts if part.ahead} if self.deferred is not None else ()
        return self.in_flight.union(ahead)

    @property
    def selects(self) -> bool:
        """Whether there is anything to choose between."""
        return self.plan.selects

    @property
    def pending(self) -> bool:
        """Whether a selection takes effect at the next close of each bucket."""
        return self._proposal is not None

    @property
    def selection_begun(self) -> bool:
        """Whether some buckets may have followed the pending selection."""
        return self._proposal is not None and self._proposal.begun

    def matrix(self) -> torch.Tensor:
        """The weights as [rows, columns]; of a parameter that has a column view."""
        return self.plan.view(self.parameter.detach())

    @property
    def is_plain(self) -> bool:
        """Whether it is stored without gaps and alone, as kernels need it that write by addresses."""
        return self.parameter.is_contiguous() and len(self.neighbours) == 1

    @property
    def is_kept(self) -> bool:
        """Whether what it holds is kept, and stays so where kernels write to it by its address."""
        return self._writes.is_kept and self.is_plain

    @property
    def selected_index(self) -> torch.Tensor:
        """[plan.selected] int64 on the device: the selected columns in state order."""
        return self.split.selected_index

    @property
    def selected_columns(self) -> torch.Tensor:
        """The same on the CPU."""
        return self.split.selected_columns

    # --- splits ----------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Make room; at the first gradient, before `read`. The first offloaded columns are selected until a close."""
        self._begin(self._make_split(flat=self.plan.resident == self.plan.columns))
        self.chosen = not self.plan.selects

    def _begin(self, split: SplitState) -> None:
        self.split, self.deferred, self.started = split, split.deferred, True
        self._writes.end()  # what it noticed is of another split, which may have had a master of its own

    def read(self) -> None:
        self.split.read_masters(self._runtime.masters.take(self.parameter))
        self._runtime.device.charge(2 * self.parameter.nbytes)

    def _make_split(self, *, flat: bool) -> SplitState:
        """Room for the state of all columns; the proposal says which are selected."""
        offloaded = torch.arange(self.plan.resident, self.plan.columns, device="cpu")
        # Where there is nothing to choose: all or none.
        selected = self._take_proposal() if self.pending else offloaded[: self.plan.selected]
        return self._split_of(flat=flat, selected=selected, deferred=offloaded[~torch.isin(offloaded, selected)])

    def _split_of(self, *, flat: bool, selected: torch.Tensor, deferred: torch.Tensor) -> SplitState:
        self._form = _form(self.parameter)
        return SplitState(
            self.parameter,
            self.name,
            self.plan,
            self._runtime,
            self._initial,
            flat=flat,
            selected=selected,
            deferred=deferred,
        )

    def choose(self, plan: WeightPlan) -> None:
        """Select for another plan, by the newest importance; before `repartition`."""
        self._proposal = None
        if self.started and 0 < plan.selected < plan.offloaded:
            scores = self.importance()
            columns = top_columns(scores[plan.resident :], plan.selected) + plan.resident
            self.propose(*self._runtime.fetch(columns.int()))
            self._runtime.traffic.index_bytes += 4 * plan.selected

    def repartition(self, plan: WeightPlan) -> None:
        """Move every column to its tier under another plan, and only those that have to; nothing may be in flight."""
        if not self.started or plan.same_split(self.plan):
            self.plan = plan
            if self.deferred is not None:
                self.deferred.join(plan)
            return
        before, self.plan = self.split, plan
        self._begin(self._make_split(flat=plan.resident == plan.columns and before.same_counts()))
        self.split.fill(before.tiers())
        if before.deferred is not None:
            before.deferred.release()

    def restore(self, source: Tier, slots: torch.Tensor, *, flat: bool) -> None:
        """Take over a saved state: `source` has that of all columns, on the host.

        `slots` is [columns] int32 on the CPU, each column's host slot, -1 where it is not deferred; `flat`: the state
        of a wholly resident parameter is one row.
        """
        offloaded = torch.arange(self.plan.resident, self.plan.columns, device="cpu")
        slots = slots[: self.plan.columns]  # without a column view there is one, and nothing in it
        selected = offloaded[slots[self.plan.resident :] < 0]
        deferred = torch.argsort(slots.long(), stable=True)[len(slots) - self.plan.deferred :]
        self._begin(self._split_of(flat=flat, selected=selected, deferred=deferred))
        self.split.fill([source])
        self.restored = True

    # --- weights written by others ---------------------------------------------------------------------------------

    def watch(self) -> WriteWatch | None:
        """Notice from now on what others write, at the end of whatever we write ourselves.

        Returns what notices it, if `Unwritten` can look at it.
        """
        if not self.started or self.split.is_own_master or self.restored:
            return None
        shared = self._writes.begin(keep=bool(self.unsettled))
        return self._writes if shared and len(self.neighbours) == 1 else None

    def end_watch(self) -> OutsideWrite | None:
        """Notice nothing more, since we are about to write; what somebody else may have written since `watch`.

        Raises UnsupportedError if the parameter has another shape, dtype or device than when its state began.
        """
        if not self.started:
            return None
        self._require_form()
        if len(self.neighbours) == 1 and self._writes.pause():
            return None
        written = self._writes.written() or self.split.is_replaced()
        before = self._writes.end()
        if written:
            self._require_view()
        return OutsideWrite(before) if written else None

    @property
    def may_be_written(self) -> bool:
        """Whether somebody else may have written to it since `watch`."""
        return self.started and (self._writes.written() or self.split.is_replaced())

    def differs(self) -> bool:
        """Whether it holds something else than at `watch`, or may, where that cannot be told; waits for the device."""
        if _form(self.parameter) != self._form:
            return True
        found = self._writes.differs()
        if found is not None or self.deferred is None or self.unsettled:
            return found is not False
        try:
            return self.deferred.differs(self.matrix()) is not False
        except RuntimeError:  # other strides, which the next step refuses
            return True

    def keep_nothing(self) -> None:
        """Do not keep what it holds any longer, which would be copied by an operation of torch that writes to it."""
        self._writes.pause()

    def stop_watch(self) -> None:
        """Notice nothing more, whatever was written since."""
        self._writes.end()

    def take_outside_write(self) -> None:
        """Take the masters from weights that somebody else wrote to, but for the buckets that are unsettled."""
        self.split.reread_masters(self.unsettled)
        self.restored, self.shown = False, None

    def _require_form(self) -> None:
        assert self._form is not None
        if (form := _form(self.parameter)) != self._form:
            raise UnsupportedError(
                f"parameter {self.name} is {_named(form)}; when its training began it was {_named(self._form)}: "
                "make a new optimizer after changing it"
            )

    def _require_view(self) -> None:
        try:
            if self.plan.columns:
                self.matrix()
        except RuntimeError as error:
            raise UnsupportedError(
                f"parameter {self.name} has strides {self.parameter.stride()} now, and had others when "
                "its training began: make a new optimizer after changing its layout"
            ) from error

    # --- selection -------------------------------------------------------------------------------------------------

    def propose(self, columns: torch.Tensor, transfer: Transfer) -> None:
        """Select columns, [plan.selected] int32 in host memory once `transfer` is over.

        Takes effect at the next close.
        """
        self._proposal = _Proposal(columns, transfer)

    def drop_proposal(self) -> None:
        """Let the selection stay as it is at the next close."""
        self._proposal = None

    def proposed(self) -> torch.Tensor:
        """[plan.selected] int64 on the CPU: the pending selection; waits for it."""
        assert self._proposal is not None
        self._runtime.device.block_on(self._proposal.transfer)
        return self._proposal.columns.long()

    def restore_proposal(self, columns: torch.Tensor, *, begun: bool) -> None:
        """Let a saved selection, [plan.selected] int64 on the CPU, take effect at the next close of each bucket."""
        self._proposal = _Proposal(columns.int(), Arrived(self._runtime.device.mark(), 0), begun)

    def importance(self) -> torch.Tensor:
        """[columns] fp32: importance of the newest gradient that was measured, written there; zeros before."""
        if self._scores is None:
            self._scores = torch.zeros(self.plan.columns, dtype=torch.float32, device=self.parameter.device)
        return self._scores

    def share_importance(self, part: torch.Tensor) -> None:
        """Have it in memory that many weights share, [columns] fp32, which holds it already."""
        self._scores = part

    def still_selected(self) -> int:
        """How many of the selected columns the pending selection keeps; waits for it."""
        return int(torch.isin(self.split.selected_columns, self.proposed()).sum())

    def begin_selection(self) -> bool:
        """Begin to follow the pending selection; whether no close has before."""
        assert self._proposal is not None
        begun, self._proposal.begun = self._proposal.begun, True
        return not begun

    def resolve_pending(self, closing: Container[int] | None) -> SelectionChange | None:
        """What the pending selection changes in buckets that close (None: all); None where no state moves with it.

        Waits for it. Pairs of columns stay the same until all buckets have followed: both sides are in ascending order.
        """
        move = plan_move(self.split.selected_columns, self.split.slot_columns, self.proposed())
        here = move
        if move is not None and closing is not None:
            numbered = enumerate(self.plan.bucket_slots, self.plan.first_bucket)
            here = move.within([slots for number, slots in numbered if number in closing])
        if move is None or (here is not None and len(here.slots) == len(move.slots)):
            self._proposal = None
        if here is not None and self.deferred is None:  # there are no rows here
            self.split.choose(here)
            return None
        return here

    def _take_proposal(self) -> torch.Tensor:
        columns = self.proposed()
        self._proposal = None
        return columns

    # --- a step ----------------------------------------------------------------------------------------------------

    def pending_entries(self) -> list[LogEntry]:
        return [] if self.deferred is None else [entry for part in self.deferred.parts for entry in part.log]

    def pending_mass(self) -> int:
        """Mass of the logged gradients, for the ledger."""
        logged = [] if self.deferred is None else self.deferred.logged()
        return sum(int(mass(rows)) for entry, rows in logged if entry.live()[1])

    def scatter(self, columns: torch.Tensor, rows: torch.Tensor) -> None:
        """Write columns, [n] int64 on the device, into the weights: `rows`, [n, rows], rounded to their dtype."""
        self._runtime.kernels.scatter(self.matrix(), columns, rows)
        wrote([self])

    # --- a change of selection -------------------------------------------------------------------------------------

    def give_up_selected(self, move: Move) -> None:
        """Hand the state of the columns that become deferred to the host; after `DeferredTier.submit_leave`."""
        split = self.split
        assert split.deferred is not None
        assert split.selected is not None
        self._runtime.leaving.make(len(move.places) * split.selected.packed_columns * 4)
        split.deferred.submit_join(move, split.selected.pack(move.places))

    def take_selected(self, move: Move, state: torch.Tensor) -> None:
        """Take over `state`, [n, packed_columns] int32 on the device, of the columns that become selected.

        Makes their weights visible.
        """
        split = self.split
        assert split.deferred is not None
        assert split.selected is not None
        split.selected.unpack(move.places, state)
        self.scatter(move.to_selected, split.selected.master.index_select(0, move.places))
        split.exchange(move)


def start(runtime: Runtime, weights: Sequence[WeightState]) -> None:
    """Make room for weights that have their first gradient, and read their masters."""
    try:
        for weight in weights:
            weight.start()
        runtime.buckets.allocate()
        for weight in weights:
            weight.read()
    except BaseException:
        for weight in weights:
            weight.started = False
        raise


def wrote(weights: Sequence[WeightState]) -> None:
    """Say that kernels have written to parameters: they do not count it, and autograd must know."""
    torch.autograd.graph.increment_version([weight.parameter for weight in weights])


def send_moves(runtime: Runtime, changes: Mapping[WeightState, SelectionChange]) -> dict[WeightState, Move]:
    """Put what kernels need of changes of selection, of weights with a host tier, on the device in one copy."""
    parts: list[torch.Tensor] = []
    buckets = {}
    for weight, change in changes.items():
        assert weight.deferred is not None
        slots = [part.slots for part in weight.deferred.parts]
        buckets[weight] = change_of_buckets(change, weight.split.slot_columns, slots)
        selected = weight.split.selected_columns.clone()
        selected.numpy()[change.places.numpy()] = change.to_selected.numpy()
        parts += [change.places, change.to_selected, selected]
        for part in buckets[weight]:
            parts += [] if part is None else [part.staying_columns, part.columns]
    if not parts:
        return {}
    sent = _sent_together(runtime, parts)
    return {
        weight: Move(change, next(sent), next(sent), next(sent), [_sent(part, sent) for part in buckets[weight]])
        for weight, change in changes.items()
    }


def _sent_together(runtime: Runtime, parts: Sequence[torch.Tensor]) -> Iterator[torch.Tensor]:
    """Indices on the device, each at 16 bytes: for others Triton would compile its kernels once more."""
    sizes = [part.numel() for part in parts]
    starts = list(itertools.accumulate((size + size % 2 for size in sizes), initial=0))
    together = torch.zeros(starts[-1], dtype=torch.int64, device="cpu")
    for part, start, size in zip(parts, starts, sizes, strict=False):
        together.numpy()[start : start + size] = part.numpy()
    sent = runtime.send_index(together)
    return (sent.narrow(0, start, size) for start, size in zip(starts, sizes, strict=False))


def _sent(part: BucketChange | None, sent: Iterator[torch.Tensor]) -> BucketMove | None:
    return None if part is None else BucketMove(part, next(sent), next(sent))


_Form = tuple[torch.Size, torch.dtype, torch.device]


def _form(parameter: nn.Parameter) -> _Form:
    return parameter.shape, parameter.dtype, parameter.device


def _named(form: _Form) -> str:
    shape, dtype, device = form
    return f"{dtype} of shape {tuple(shape)} on {device}"
