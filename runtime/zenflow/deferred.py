"""The deferred tier of one weight: its state on the host, the window's log, and the work that applies it."""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass

import torch

from zenflow.buckets import Part, Sample, SentPart, transfers_of
from zenflow.checkpoint_format import SavedUpdate
from zenflow.control import StepControl
from zenflow.device import Transfer
from zenflow.host.engine import Job
from zenflow.host.places import padded
from zenflow.host.tasks import Control, HostColumns, HostGradient, LogEntry, ReadMasters, Targets, Task, Unpack, Update
from zenflow.layout import WeightPlan
from zenflow.rules import Hyper
from zenflow.runtime import Runtime
from zenflow.selection import BucketMove, Move
from zenflow.state import ColumnState, followed
from zenflow.stats import Moved

_SAMPLED_ELEMENTS = 4096
"""Of each part, at least (a smaller part is its own sample): how far weights move is read from these."""


@dataclass(slots=True, eq=False)
class PartWindow:
    """What a window does to one weight's part of a bucket, on its way through host and link."""

    part: Part
    slots: range | torch.Tensor
    """The slots that the window updates; [n] int64 where they are not all of the part's."""
    columns: torch.Tensor
    """[n] int64 on the device: where the result belongs."""
    result: torch.Tensor
    """[n, rows] in the model's dtype, in the bucket's memory."""
    start: int
    """Where the result begins among those of the bucket's job, in elements."""
    tier_slots: int
    """All slots of the weight."""
    entries: Sequence[LogEntry]
    task: Update | None = None
    nbytes: int = 0
    """Memory traffic of the task."""
    restored_decay: float = 1.0
    restored_steps: tuple[int, ...] = ()
    coasts: bool = False
    """Whether the result is more than the masters round to; once the job is done."""
    moved: Moved | None = None
    """How far it has moved a sample of its weights, once the job is done."""

    @property
    def is_whole(self) -> bool:
        """Whether it is about all deferred columns of its weight."""
        return isinstance(self.slots, range) and len(self.part.slots) == self.tier_slots

    @property
    def passed_over(self) -> list[int]:
        """The part's slots that it does not update: their columns changed tier at the close."""
        if isinstance(self.slots, range):
            return []
        return sorted({*self.part.slots} - set(self.slots.tolist()))

    def decay(self) -> float:
        """What its updates multiply a weight with, only once the job is done."""
        factors = (entry.hyper.decay for entry in self.entries if entry.live()[1])
        return math.prod(factors, start=self.restored_decay)

    def saved(self, place: int, due: int) -> SavedUpdate:
        return SavedUpdate(place, due, self.decay(), self.passed_over, self.steps, self.coasts)

    @property
    def steps(self) -> list[int]:
        """Whose gradients it has applied, only once the job is done."""
        return [*self.restored_steps, *(entry.step for entry in self.entries if entry.live()[1])]


class DeferredTier:
    """Owns the host state of the deferred columns. Slot i of `state` holds column `slot_columns[i]`."""

    def __init__(
        self,
        name: str,
        plan: WeightPlan,
        dtype: torch.dtype,
        columns: torch.Tensor,
        runtime: Runtime,
        initial: Sequence[float],
    ) -> None:
        """Make room for columns; `read_masters` fills it.

        Args:
            columns: [plan.deferred] int64, ascending.
        """
        self._name = name
        self._rows = plan.rows
        self._slots = plan.deferred
        self._dtype = dtype
        self._runtime = runtime
        self.slot_columns = columns
        self.parts: list[Part] = []
        self.join(plan)
        self.state = _host_state(plan, runtime, initial)
        handle = runtime.engine.backend.register(runtime.rule, self.state)
        self._host = HostColumns(runtime.rule, self.state, handle)

    def join(self, plan: WeightPlan) -> None:
        """Join the buckets that a plan has; after `Buckets.begin`, and with nothing logged or in flight."""
        known = {part.slots: part for part in self.parts}
        self.parts = []
        for number, (low, high) in enumerate(plan.bucket_slots):
            slots, elements = range(low, high), (high - low) * plan.rows
            kind = plan.first_bucket + number, self._dtype, plan.transposed
            bucket, start = self._runtime.buckets.join(kind, elements)
            before = known.get(slots)
            columns = self._runtime.send_index(self.slot_columns[low:high]) if before is None else before.columns
            part = Part(bucket, slots, columns, start, elements * self._dtype.itemsize)
            part.sample = None if before is None else before.sample or self._left(before)
            self.parts.append(part)

    # --- how far weights move --------------------------------------------------------------------------------------

    def note_movement(self, window: PartWindow) -> None:
        """Note how far a window has moved a sample of its weights; called when its job is done, by any thread.

        It reads the host's own masters before the part's next window: no launch, no copy over the link.
        """
        part, before = window.part, window.part.sample
        every = self._stride(part)
        masters = self.state.master[part.slots.start : part.slots.stop : every].clone()
        columns = self._sampled_columns(part).clone()
        if not isinstance(window.slots, range):  # those that have moved are not ours to read
            sampled = torch.arange(part.slots.start, part.slots.stop, every, device="cpu")
            columns[~torch.isin(sampled, window.slots)] = -1
        part.sample = columns, masters
        steps = sum(entry.live()[1] for entry in window.entries)
        if before is None or not steps:
            return
        same = (columns == before[0]) & (columns >= 0)  # those that have joined have another past
        if not bool(same.all()):
            masters, before = masters[same], (before[0][same], before[1][same])
        if masters.numel():
            change, weights = (
                float(torch.linalg.vector_norm(one, dtype=torch.float64)) for one in (masters - before[1], before[1])
            )
            window.moved = Moved()
            window.moved.add(change / steps, weights, len(masters) / len(part.slots))

    def _sample(self, part: Part, rows: torch.Tensor) -> Sample:
        """Some of a part's columns.

        Args:
            rows: [slots, rows], of its slots in order.
        """
        return self._sampled_columns(part).clone(), rows[:: self._stride(part)].to(torch.float32, copy=True)

    def _sampled_columns(self, part: Part) -> torch.Tensor:
        return self.slot_columns[part.slots.start : part.slots.stop : self._stride(part)]

    def _stride(self, part: Part) -> int:
        return max(1, len(part.slots) * self._rows // _SAMPLED_ELEMENTS)

    def differs(self, matrix: torch.Tensor) -> bool | None:
        """Whether weights are not what we left of them, by samples; None: nothing is known. Waits for the device.

        Args:
            matrix: the weights, [rows, columns] on the device; nothing is in flight.
        """
        known = [one for part in self.parts if (one := self._left(part)) is not None]
        if not known:
            return None
        columns, masters = (torch.cat(parts) for parts in zip(*known, strict=True))
        now = self.on_host(matrix, self._runtime.send_index(columns))
        return not torch.equal(now, masters.to(now.dtype))

    def _left(self, part: Part) -> Sample | None:
        """The sample of a part that holds now; None: there is none."""
        if part.sample is None:
            if part.reading is None or not part.reading[0].done():
                return None
            return self._sample(part, part.reading[1])
        columns, masters = part.sample
        same = columns == self._sampled_columns(part)
        return columns[same], masters[same]

    def release(self) -> None:
        """Let go of what is known elsewhere; nothing is in flight, and nobody uses this tier any more."""
        self._runtime.engine.backend.forget(self._host.handle)

    def read_masters(self, matrix: torch.Tensor, *, keep: bool, besides: Container[int] = ()) -> None:
        """Take the masters from the weights.

        Args:
            matrix: the weights, [rows, columns], or in fp32 what they were rounded from.
            keep: keep a master that rounds to its weight, so that an unchanged weight loses no precision.
            besides: numbers (over the whole model) of the buckets that are left alone.
        """
        for part in self.parts:
            if part.index in besides:
                continue
            part.sample = part.reading = None
            self._runtime.room.make(len(part.slots) * self._rows * matrix.element_size())
            weights = self._runtime.kernels.pack(matrix, part.columns)
            target = None
            if not keep and weights.dtype == self._dtype:  # else its memory may be in use
                target = self._result(part, part.start, len(part.slots))
            arrived, transfer = self._runtime.fetch(weights, target)
            self._runtime.room.add(transfer, weights.nbytes)
            self._runtime.traffic.migrated_bytes += weights.nbytes
            part.reading = None if target is None else (transfer, target)
            task = ReadMasters(self._host, part.slots, arrived, keep)
            nbytes = weights.nbytes + 4 * weights.numel()
            self._submit(f"reading the masters of {self._name}", task, nbytes, [transfer])

    def _result(self, part: Part, start: int, columns: int) -> torch.Tensor:
        """[columns, rows] of the memory of the part's bucket."""
        memory = self._runtime.buckets.result_of(part.bucket)
        if part.result is not None and part.result[0] is memory:
            last = part.result[1]
            if last.storage_offset() == memory.storage_offset() + start and last.shape[0] == columns:
                return last  # as in the window before
        result = memory.narrow(0, start, columns * self._rows).view(columns, self._rows)
        part.result = memory, result
        return result

    def log(self, sent: Sequence[SentPart], step: int, hyper: Hyper, control: StepControl | None) -> None:
        """Make entries of the log of a step's gradient.

        Args:
            sent: of each part in turn; may still be on its way.
        """
        host = None if control is None else control.host
        for number, part in enumerate(self.parts):
            part.log.append(LogEntry(step, sent[number].gradient, hyper, host))

    # --- saved and restored ----------------------------------------------------------------------------------------

    def logged(self) -> list[tuple[LogEntry, torch.Tensor]]:
        """The open windows' entries, each with its gradient in slot order, [deferred, rows] in host memory.

        A bucket that closed since has zeros in an entry: each has the newest `len(log)` of them.
        """
        found = []
        for back in range(max((len(part.log) for part in self.parts), default=0), 0, -1):
            entries = {part: part.log[-back] for part in self.parts if len(part.log) >= back}
            for transfer in transfers_of([*entries.values()]):
                transfer.wait()
            one = next(iter(entries.values()))
            rows = torch.zeros((self._slots, self._rows), dtype=one.gradient.dtype, device="cpu")
            for part, entry in entries.items():
                pieces = torch.cat([*entry.gradient.pieces()])
                rows[part.slots.start : part.slots.stop] = pieces.view(-1, self._rows)
            found.append((one, rows))
        return found

    def restore_entry(
        self, rows: torch.Tensor, step: int, hyper: Hyper, control: Control | None, places: Container[int]
    ) -> None:
        """Log a saved gradient.

        Args:
            rows: [deferred, rows] in host memory, in slot order.
            places: the parts whose windows have it, by number.
        """
        for part in [part for place, part in enumerate(self.parts) if place in places]:
            saved = rows[part.slots.start : part.slots.stop].reshape(-1)
            plan_entry(self._runtime, part, saved.nbytes)
            place, pieces, transfer = self._runtime.log.write(saved.numel(), saved.dtype, saved_into(saved))
            part.bucket.places.append(place)
            part.log.append(LogEntry(step, HostGradient(pieces, 0, saved.numel(), transfer), hyper, control))

    def restore_window(self, saved: SavedUpdate, coming: torch.Tensor | None) -> PartWindow:
        """A part's window that is not visible yet; `coming`, [n, rows], is its result where masters do not tell it."""
        part = self.parts[saved.bucket]
        slots: range | torch.Tensor = part.slots
        if saved.passed_over:
            slots = torch.tensor(sorted({*slots} - {*saved.passed_over}), device="cpu")
        if isinstance(slots, range):
            columns, masters = part.columns, self.state.master[slots.start : slots.stop]
        else:
            columns, masters = self._runtime.send_index(self.slot_columns[slots]), self.state.master[slots]
        result = self._result(part, part.start, len(slots))
        result.copy_(masters if coming is None else coming)
        window = PartWindow(part, slots, columns, result, 0, self._slots, [], coasts=coming is not None)
        window.restored_decay, window.restored_steps = saved.decay, tuple(saved.steps)
        return window

    def rewrite_window(self, window: PartWindow, before: torch.Tensor, matrix: torch.Tensor) -> None:
        """Let a window's updates count on top of weights that somebody wrote while it was in flight.

        Where a weight changed, its master moves by as much as if the updates had come afterwards: they add to a weight
        and multiply it with `decay()`. (L2 decay, which is part of the gradient, stays that of the old weight; a 16-bit
        weight keeps what its old master was rounded by.)

        Args:
            window: whose job is done, whose result is on no way, and not visible yet; receives its new result.
        """
        part, slots = window.part, window.slots
        old, new, masters = self._rewritten(part, before, matrix)
        inside = torch.zeros(len(part.slots), dtype=torch.bool, device="cpu")
        inside[torch.as_tensor(slots, device="cpu") - part.slots.start] = True
        last = masters[inside]
        moved = masters + window.decay() * (new.float() - old.float())
        moved = torch.where(old == new, masters, moved)
        masters.copy_(torch.where(inside.unsqueeze(1), moved, followed(masters, old, new)))
        if window.coasts:
            moved = window.result.float() + (masters[inside] - last)
            window.result.copy_(torch.where((old == new)[inside], window.result, moved.to(window.result.dtype)))
        else:
            window.result.copy_(masters[inside])
        window.restored_decay, window.restored_steps, window.entries = window.decay(), tuple(window.steps), []

    def rewrite(self, part: Part, before: torch.Tensor, matrix: torch.Tensor) -> None:
        """Let the masters of a part that is not in flight follow what somebody wrote."""
        old, new, masters = self._rewritten(part, before, matrix)
        masters.copy_(followed(masters, old, new))

    def _rewritten(
        self, part: Part, before: torch.Tensor, matrix: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """[slots, rows] each, in host memory: weights before and after, and the masters themselves."""
        part.sample = None
        old, new = (self.on_host(one, part.columns) for one in (before, matrix))
        return old, new, self.state.master[part.slots.start : part.slots.stop]

    def on_host(self, matrix: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
        """Columns of a matrix in host memory; waits for them.

        Returns:
            [n, rows].
        """
        rows, transfer = self._runtime.fetch(self._runtime.kernels.pack(matrix, columns))
        self._runtime.device.block_on(transfer)
        self._runtime.traffic.migrated_bytes += rows.nbytes
        return rows

    def rounded(self, part: Part) -> torch.Tensor:
        """[slots, rows] in the model's dtype, in host memory: what the masters round to; all host work is done."""
        return self.state.master[part.slots.start : part.slots.stop].to(self._dtype)

    def preview(self, part: Part, closing: Hyper) -> torch.Tensor:
        """What the weights would be if the window closed now; changes nothing, and all host work is done.

        Returns:
            [slots, rows] in the model's dtype, in host memory.
        """
        if not part.log:
            return self.rounded(part)
        engine, state = self._runtime.engine, self.state.slice(part.slots.start, part.slots.stop)
        copied = ColumnState.over([stream.clone() for stream in (state.master, *state.moments)], state.count.clone())
        columns = HostColumns(self._host.rule, copied, engine.backend.register(self._host.rule, copied))
        result = torch.empty((len(part.slots), self._rows), dtype=self._dtype, device="cpu")
        targets = Targets(range(len(part.slots)), [(entry, None) for entry in part.log])
        task = Update(columns, [targets], self._closing(closing), weights=result)
        try:
            job = Job(
                f"looking ahead in {self._name}",
                self._runtime.device,
                [task],
                nbytes=self._update_bytes(result.numel(), part.log),
                inputs=transfers_of(part.log),
            )
            engine.submit(job).wait(engine)
        finally:
            engine.backend.forget(columns.handle)
        return result

    # --- a close ---------------------------------------------------------------------------------------------------

    def close_part(
        self, part: Part, closing: Hyper, move: BucketMove | None, start: int, missing: float
    ) -> PartWindow | None:
        """Take a part's logged window for the bucket's job, and begin an empty log; None: there is nothing to show.

        Args:
            move: columns that change tier at this close; their slots are passed over.
            start: where in the bucket's results there is room, in elements.
            missing: updates that the results are to be moved on by.
        """
        if part.reading is not None:  # its memory is not written before this window
            part.sample, part.reading = self._left(part), None
        entries, part.log, part.guessed = part.log, [], False
        if move is not None and len(move.staying_columns) == 0:
            part.ahead, entries = False, []  # whoever leaves has read them before the next step overwrites them
        if not (entries or part.ahead):
            return None
        if move is None:
            slots: range | torch.Tensor = part.slots
            targets, columns = Targets(slots, [(entry, None) for entry in entries]), part.columns
        else:
            slots = move.change.staying
            targets = Targets(slots, [(entry, move.change.staying_rows) for entry in entries])
            columns = move.staying_columns
        result = self._result(part, start, len(slots))
        task = Update(self._host, [targets], self._closing(closing), weights=result, missing=missing)
        nbytes = self._update_bytes(result.numel(), entries)
        return PartWindow(part, slots, columns, result, start, self._slots, entries, task, nbytes)

    def done(self, window: PartWindow) -> None:
        """Account for a window whose job is done; called by a thread of the engine."""
        if window.task is not None:
            window.coasts = window.task.coast() != 0
            if self._runtime.ledger is not None:
                self._runtime.ledger.apply_on_host(self._name, window.task)
        self.note_movement(window)
        window.task = None  # its memory may be needed elsewhere

    def submit_leave(self, move: Move, closing: Hyper) -> Job:
        """Apply the window to the columns that leave the tier; before `submit_window`, which empties the log.

        Returns:
            The job whose result is their packed state, [n, packed_columns] int32.
        """
        result = self._runtime.memory.transient((len(move.places), self.state.packed_columns), torch.int32)
        parts, inputs, nbytes = [], [], 0
        for part, moved in zip(self.parts, move.buckets, strict=True):
            if moved is None:
                continue
            pairs, slots, rows = moved.change.pairs, moved.change.slots, moved.change.rows
            entries = [(entry, rows) for entry in part.log]
            parts.append(Targets(slots, entries, pairs))
            inputs += transfers_of([entry for entry, _ in entries])
            nbytes += self._update_bytes(len(slots) * self._rows, part.log)
        self._runtime.traffic.migrated_bytes += result.nbytes
        task = Update(self._host, parts, self._closing(closing), packed=result)
        return self._submit(f"moving columns of {self._name}", task, nbytes, inputs, result)

    def submit_join(self, move: Move, packed: torch.Tensor) -> None:
        """Take over the state of the columns that join the tier; after `submit_leave`, whose slots they get.

        Args:
            packed: [n, packed_columns] int32 on the device.
        """
        arriving, transfer = self._runtime.fetch(packed, self._runtime.memory.transient(packed.shape, packed.dtype))
        self._runtime.leaving.add(transfer, packed.nbytes)
        self._runtime.traffic.migrated_bytes += arriving.nbytes
        task = Unpack(self._host, move.change.slots, arriving)
        self._submit(f"moving columns of {self._name}", task, 2 * arriving.nbytes, [transfer])

    def rename(self, move: Move) -> None:
        """Let the slots stand for the columns that joined; after `submit_window`."""
        self.slot_columns.numpy()[move.change.slots.numpy()] = move.change.to_deferred.numpy()
        for part, moved in zip(self.parts, move.buckets, strict=True):
            part.bucket.moves += 1
            if moved is not None:
                part.columns = moved.columns.clone()  # in memory of its own: the move's is that of all weights

    def _closing(self, closing: Hyper) -> Hyper | None:
        return closing if self._runtime.deferred_update == "mean" else None

    def _update_bytes(self, elements: int, entries: list[LogEntry]) -> int:
        """Memory traffic of a host update: fp32 state read and written, gradients read, result written."""
        state = 8 * (1 + len(self.state.moments))
        return elements * (state + sum([entry.gradient.dtype.itemsize for entry in entries]) + self._dtype.itemsize)

    def _submit(
        self,
        name: str,
        task: Task,
        nbytes: int,
        inputs: list[Transfer],
        result: torch.Tensor | None = None,
    ) -> Job:
        runtime = self._runtime

        def done() -> None:
            if runtime.ledger is not None and isinstance(task, Update):
                runtime.ledger.apply_on_host(self._name, task)

        job = Job(name, runtime.device, [task], nbytes=nbytes, inputs=inputs, result=result, after=done)
        runtime.device.charge_thread(jobs=1)
        return runtime.engine.submit(job)


def plan_entry(runtime: Runtime, part: Part, nbytes: int) -> None:
    """Plan room in the log for gradients of another dtype than the weights."""
    if nbytes > part.entry_bytes:
        runtime.buckets.plan(part.bucket, padded(nbytes) - padded(part.entry_bytes))
        part.entry_bytes = nbytes


def saved_into(saved: torch.Tensor) -> Callable[[torch.Tensor], object]:
    """What fills memory with a tensor."""
    return lambda memory: memory.copy_(saved)


def _host_state(plan: WeightPlan, runtime: Runtime, initial: Sequence[float]) -> ColumnState:
    interval = 4 * plan.slots_per_bucket * plan.rows
    streams = [
        runtime.memory.empty((plan.deferred, plan.rows), torch.float32, "state", interval)
        for _ in range(1 + runtime.rule.moments)
    ]
    for moment, value in zip(streams[1:], initial, strict=True):
        if value:
            moment.fill_(value)
    return ColumnState.over(streams, runtime.memory.empty((plan.deferred,), torch.int32, "state"))
