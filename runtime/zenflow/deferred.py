"""The deferred tier of one weight: its state on the host, the window's log, and the jobs that apply it."""

from __future__ import annotations

import functools
import math
from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass, field, replace

import torch

from zenflow.control import StepControl
from zenflow.device import Transfer
from zenflow.host.engine import Job
from zenflow.host.log_pool import Extents
from zenflow.host.tasks import Control, HostColumns, LogEntry, ReadMasters, Targets, Task, Unpack, Update
from zenflow.layout import WeightPlan
from zenflow.rules import Hyper
from zenflow.runtime import Runtime
from zenflow.selection import BucketMove, Move
from zenflow.state import ColumnState, reread
from zenflow.stats import Moved, StepRecord

_SAMPLED_ELEMENTS = 4096
"""Of each bucket, at least (a smaller bucket is its own sample): how far weights move is read from these."""

Ahead = tuple[torch.Tensor, Transfer]
"""A closing step's gradient of the columns that leave the tier, [n, rows], sent ahead of the rest."""


@dataclass(slots=True)
class SentBucket:
    """One bucket's gradient on its way to the log, not an entry of it yet."""

    place: Extents
    pieces: list[torch.Tensor]
    transfer: Transfer


@dataclass(slots=True)
class Bucket:
    """A range of the weight's slots that is moved and updated as a unit."""

    index: int
    """b, counted over the whole model."""
    slots: range
    columns: torch.Tensor
    """[slots] int64 on the device: the deferred column in each slot."""
    result: torch.Tensor
    """[slots, rows] in the model's dtype, in host memory: new weights on their way to the device."""
    entry_bytes: int
    """That are planned for each entry of the log."""
    log: list[LogEntry] = field(default_factory=list)
    places: list[Extents] = field(default_factory=list)
    """Where the log's entries lie."""
    sent: Transfer | None = None
    """The last copy out of `result`; it must be over before `result` changes."""
    sample: tuple[torch.Tensor, torch.Tensor] | None = None
    """Some columns, [n] int64, and their masters as the last window left them, [n, rows]; None: not known."""
    reading: Transfer | None = None
    """That brings the weights into `result` which the masters begin with; None: once a window has been submitted."""


@dataclass(slots=True)
class BucketJob:
    """A bucket's window on its way through host and link."""

    bucket: Bucket
    slots: range | torch.Tensor
    """The slots that the window updates; [n] int64 where they are not all of the bucket's."""
    columns: torch.Tensor
    """[n] int64 on the device: where the result belongs."""
    job: Job
    entries: list[LogEntry]
    gradients: Transfer | None
    """The last of the gradients that the job waits for; None where it was restored."""
    restored_decay: float = 1.0
    restored_steps: tuple[int, ...] = ()

    @property
    def passed_over(self) -> list[int]:
        """The bucket's slots that it does not update: their columns changed tier at the close."""
        if isinstance(self.slots, range):
            return []
        return sorted({*self.bucket.slots} - set(self.slots.tolist()))

    def decay(self) -> float:
        """What its updates multiply a weight with, only once the job is done."""
        factors = (entry.hyper.decay for entry in self.entries if entry.live()[1])
        return math.prod(factors, start=self.restored_decay)

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
            name: the parameter's.
            plan: its split.
            dtype: its dtype.
            columns: [plan.deferred] int64, ascending.
            runtime: shared by all weights.
            initial: what each moment starts with.

        Raises:
            MemoryError: the host has less memory.
            HostEngineError: the host engine has failed.
        """
        self._name = name
        self._rows = plan.rows
        self._dtype = dtype
        self._runtime = runtime
        self.slot_columns = columns
        empty, beside = runtime.memory.empty, runtime.memory.beside
        results = [
            beside(functools.partial(empty, (high - low, plan.rows), dtype, "staging"))
            for low, high in plan.bucket_slots
        ]
        self.state = _host_state(plan, runtime, initial)
        handle = runtime.engine.backend.register(runtime.rule, self.state)
        self._host = HostColumns(runtime.rule, self.state, handle)
        self.buckets = [
            Bucket(
                plan.first_bucket + number,
                range(low, high),
                runtime.send_index(columns[low:high]),
                result.result(),
                (high - low) * plan.rows * dtype.itemsize,
            )
            for number, ((low, high), result) in enumerate(zip(plan.bucket_slots, results, strict=True))
        ]
        for bucket in self.buckets:
            runtime.log.plan(bucket.entry_bytes)

    def note_movement(self, window: BucketJob, record: StepRecord) -> None:
        """Note how far a window has moved a sample of its weights.

        It reads the host's own masters, between two windows, when nothing else does: no launch, no copy over the link.

        Args:
            window: whose job is done.
            record: takes it.
        """
        bucket, before = window.bucket, window.bucket.sample
        bucket.sample = columns, masters = self._sample(bucket, self.state.master[bucket.slots.start :])
        steps = sum(entry.live()[1] for entry in window.entries)
        if before is None or not steps:
            return
        if not torch.equal(columns, before[0]):  # those that have joined have another past
            same = columns == before[0]
            masters, before = masters[same], (columns[same], before[1][same])
        if masters.numel():
            change, weights = (
                float(torch.linalg.vector_norm(part, dtype=torch.float64)) for part in (masters - before[1], before[1])
            )
            record.moved = record.moved or Moved()
            record.moved.add(change / steps, weights, len(masters) / len(bucket.slots))

    def _sample(self, bucket: Bucket, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Some of a bucket's columns.

        Args:
            bucket: one of the tier's.
            rows: [slots or more, rows], of its slots in order.
        """
        count, every = len(bucket.slots), self._stride(bucket)
        return self._sampled_columns(bucket).clone(), rows[:count:every].to(torch.float32, copy=True)

    def _sampled_columns(self, bucket: Bucket) -> torch.Tensor:
        return self.slot_columns[bucket.slots.start : bucket.slots.stop : self._stride(bucket)]

    def _stride(self, bucket: Bucket) -> int:
        return max(1, len(bucket.slots) * self._rows // _SAMPLED_ELEMENTS)

    def differs(self, matrix: torch.Tensor) -> bool | None:
        """Whether weights are not what we left of them, by samples; None: nothing is known. Waits for the device.

        Args:
            matrix: the weights, [rows, columns] on the device; nothing is in flight.
        """
        known = [one for bucket in self.buckets if (one := self._left(bucket)) is not None]
        if not known:
            return None
        columns, masters = (torch.cat(parts) for parts in zip(*known, strict=True))
        now = self.on_host(matrix, self._runtime.send_index(columns))
        return not torch.equal(now, masters.to(now.dtype))

    def _left(self, bucket: Bucket) -> tuple[torch.Tensor, torch.Tensor] | None:
        """The sample of a bucket that holds now; None: there is none."""
        if bucket.sample is None:
            has_read = bucket.reading is not None and bucket.reading.done()
            return self._sample(bucket, bucket.result) if has_read else None
        columns, masters = bucket.sample
        same = columns == self._sampled_columns(bucket)
        return columns[same], masters[same]

    def renumber(self, first_bucket: int) -> None:
        """Count the buckets from another number on: the model's plan has changed, but not for this weight."""
        for number, bucket in enumerate(self.buckets):
            bucket.index = first_bucket + number

    def release(self) -> None:
        """Give back what is planned and known elsewhere; nothing is in flight, and nobody uses this tier any more."""
        for bucket in self.buckets:
            self._runtime.log.plan(0, instead_of=bucket.entry_bytes)
        self._runtime.engine.backend.forget(self._host.handle)

    def read_masters(self, matrix: torch.Tensor, *, keep: bool, besides: Container[int] = ()) -> None:
        """Take the masters from the weights.

        Args:
            matrix: the weights, [rows, columns], or in fp32 what they were rounded from.
            keep: keep a master that rounds to its weight, so that an unchanged weight loses no precision.
            besides: numbers (over the whole model) of the buckets that are left alone.
        """
        for bucket in self.buckets:
            if bucket.index in besides:
                continue
            bucket.sample = None
            self._runtime.room.make(len(bucket.slots) * self._rows * matrix.element_size())
            weights = self._runtime.kernels.pack(matrix, bucket.columns)
            target = bucket.result if weights.dtype == bucket.result.dtype else None
            arrived, transfer = self._runtime.fetch(weights, target)
            self._runtime.room.add(transfer, weights.nbytes)
            self._runtime.traffic.migrated_bytes += weights.nbytes
            bucket.reading = None if keep or target is None else transfer
            task = ReadMasters(self._host, bucket.slots, arrived, keep)
            nbytes = weights.nbytes + 4 * weights.numel()
            self._submit(f"reading the masters of {self._name}", task, nbytes, [transfer])

    def send(self, bucket: Bucket, matrix: torch.Tensor) -> SentBucket:
        """Send a bucket's gradient to the host; blocks while there is no room for it, there or on its way.

        Args:
            bucket: one of the tier's.
            matrix: the gradient, [rows, columns].

        Raises:
            MemoryError: the host has less memory.
            HostEngineError: the host engine has failed.
        """
        kernels, device, log = self._runtime.kernels, self._runtime.device, self._runtime.log
        shape = len(bucket.slots), self._rows
        nbytes = math.prod(shape) * matrix.element_size()
        if nbytes > bucket.entry_bytes:
            self._plan_entry(bucket, nbytes)
        device.charge_thread(buckets=1)
        self._runtime.room.make(nbytes)
        device.charge(2 * nbytes)
        if device.in_host_memory:
            sent = SentBucket(*log.write(shape, matrix.dtype, functools.partial(kernels.pack, matrix, bucket.columns)))
        else:
            sent = SentBucket(*log.send(kernels.pack(matrix, bucket.columns)))
        self._runtime.room.add(sent.transfer, nbytes)
        self._runtime.last_d2h = sent.transfer
        self._runtime.traffic.d2h_bytes += nbytes
        return sent

    def log(self, sent: Iterable[SentBucket], step: int, hyper: Hyper, control: StepControl | None) -> None:
        """Make entries of the log of a step's gradient.

        Args:
            sent: for each bucket in turn what `send` gave; may still be on its way.
            step: number of the step.
            hyper: the group's hyperparameters at that step.
            control: factor and skip flag.
        """
        host = None if control is None else control.host
        for bucket, one in zip(self.buckets, sent, strict=True):
            bucket.places.append(one.place)
            bucket.log.append(LogEntry(step, one.pieces, one.transfer, hyper, host))

    def _plan_entry(self, bucket: Bucket, nbytes: int) -> None:
        if nbytes > bucket.entry_bytes:  # gradients of another dtype than the weights
            self._runtime.log.plan(nbytes, instead_of=bucket.entry_bytes)
            bucket.entry_bytes = nbytes

    # --- saved and restored ----------------------------------------------------------------------------------------

    def logged(self) -> list[tuple[LogEntry, torch.Tensor]]:
        """The open window's entries, each with its gradient in slot order, [deferred, rows] in host memory."""
        found = []
        for entries in zip(*(bucket.log for bucket in self.buckets), strict=True):
            for transfer in _transfers(list(entries)):
                transfer.wait()
            rows = torch.cat([piece for entry in entries for piece in entry.pieces])
            found.append((entries[0], rows.view(-1, self._rows)))
        return found

    def restore_entry(self, rows: torch.Tensor, step: int, hyper: Hyper, control: Control | None) -> None:
        """Log a saved gradient.

        Args:
            rows: [deferred, rows] in host memory, in slot order.
            step: number of the step.
            hyper: the group's hyperparameters at that step.
            control: factor and skip flag, on the host.
        """
        for bucket in self.buckets:
            part = rows[bucket.slots.start : bucket.slots.stop]
            self._plan_entry(bucket, part.nbytes)
            write = functools.partial(torch.Tensor.copy_, other=part)
            place, pieces, transfer = self._runtime.log.write(part.shape, part.dtype, write)
            bucket.places.append(place)
            bucket.log.append(LogEntry(step, pieces, transfer, hyper, control))

    def restore_window(self, number: int, slots: range | torch.Tensor, decay: float, steps: Sequence[int]) -> BucketJob:
        """A bucket's window that the host has applied and that is not visible yet.

        Args:
            number: of the bucket, counted in this weight.
            slots: those that the window updated, [n] int64 where they are not all of the bucket's.
            decay: what its updates multiplied a weight with.
            steps: whose gradients it has applied.
        """
        bucket = self.buckets[number]
        if isinstance(slots, range):
            columns, masters = bucket.columns, self.state.master[slots.start : slots.stop]
        else:
            columns, masters = self._runtime.send_index(self.slot_columns[slots]), self.state.master[slots]
        result = bucket.result[: len(slots)]
        result.copy_(masters)
        job = Job(f"restoring {self._name}", self._runtime.device, None, nbytes=0, inputs=[], result=result)
        return BucketJob(bucket, slots, columns, self._runtime.engine.submit(job), [], None, decay, tuple(steps))

    def rewrite_window(self, window: BucketJob, before: torch.Tensor, matrix: torch.Tensor) -> BucketJob:
        """Let a window's updates count on top of weights that somebody wrote while it was in flight.

        Where a weight changed, its master moves by as much as if the updates had come afterwards: they add to a weight
        and multiply it with `decay()`. (L2 decay, which is part of the gradient, stays that of the old weight; a 16-bit
        weight keeps what its old master was rounded by.)

        Args:
            window: whose job is done, and whose result is not visible yet.
            before: the weights as they were, [rows, columns].
            matrix: the weights as they are.

        Returns:
            The window with its new result.
        """
        bucket, slots = window.bucket, window.slots
        old, new = (self.on_host(part, bucket.columns) for part in (before, matrix))
        masters = self.state.master[bucket.slots.start : bucket.slots.stop]
        inside = torch.zeros(len(bucket.slots), dtype=torch.bool, device="cpu")
        inside[torch.as_tensor(slots, device="cpu") - bucket.slots.start] = True
        moved = masters + window.decay() * (new.float() - old.float())
        moved = torch.where(old == new, masters, moved)
        masters.copy_(torch.where(inside.unsqueeze(1), moved, reread(masters, new)))
        bucket.sample = None
        if window.job.transfer is not None:
            window.job.transfer.wait()
        return self.restore_window(bucket.index - self.buckets[0].index, slots, window.decay(), window.steps)

    def on_host(self, matrix: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
        """Columns of a matrix in host memory; waits for them.

        Args:
            matrix: [rows, columns] on the device.
            columns: [n] int64 on the device.

        Returns:
            [n, rows].
        """
        rows, transfer = self._runtime.fetch(self._runtime.kernels.pack(matrix, columns))
        self._runtime.device.block_on(transfer)
        self._runtime.traffic.migrated_bytes += rows.nbytes
        return rows

    def rounded(self, bucket: Bucket) -> torch.Tensor:
        """[slots, rows] in the model's dtype, in host memory: what the masters round to; all host work is done."""
        return self.state.master[bucket.slots.start : bucket.slots.stop].to(self._dtype)

    def preview(self, bucket: Bucket, closing: Hyper) -> torch.Tensor:
        """What the weights would be if the window closed now; changes nothing, and all host work is done.

        Args:
            bucket: one of the tier's.
            closing: hyperparameters of the newest step.

        Returns:
            [slots, rows] in the model's dtype, in host memory.
        """
        if not bucket.log:
            return self.rounded(bucket)
        engine, part = self._runtime.engine, self.state.slice(bucket.slots.start, bucket.slots.stop)
        copied = ColumnState.over([stream.clone() for stream in (part.master, *part.moments)], part.count.clone())
        columns = HostColumns(self._host.rule, copied, engine.backend.register(self._host.rule, copied))
        result = torch.empty_like(bucket.result)
        targets = Targets(range(len(bucket.slots)), [(entry, None) for entry in bucket.log])
        task = Update(columns, [targets], self._closing(closing), weights=result)
        try:
            job = Job(
                f"looking ahead in {self._name}",
                self._runtime.device,
                task,
                nbytes=self._update_bytes(result.numel(), bucket.log),
                inputs=_transfers(bucket.log),
            )
            engine.submit(job).wait(engine)
        finally:
            engine.backend.forget(columns.handle)
        return result

    # --- a close ---------------------------------------------------------------------------------------------------

    def submit_window(
        self, bucket: Bucket, closing: Hyper, move: BucketMove | None, *, after_all_d2h: bool, not_before: int
    ) -> BucketJob | None:
        """Submit a bucket's logged window and begin an empty log; None where there is nothing to apply.

        Args:
            bucket: one of the tier's.
            closing: hyperparameters of the closing step.
            move: columns that change tier at this close; their slots are passed over.
            after_all_d2h: start only when every gradient has arrived, as DeepSpeed does.
            not_before: the step that must be over, unless somebody waits for the result.
        """
        runtime = self._runtime
        if bucket.reading is not None:  # its result is not written before this window
            bucket.sample = self._left(bucket)
        bucket.reading = None
        entries, bucket.log = bucket.log, []
        places, bucket.places = bucket.places, []
        if not entries or (move is not None and len(move.staying_columns) == 0):
            runtime.log.give_back(places)  # whoever leaves has read them before the next step overwrites them
            return None
        if move is None:
            slots: range | torch.Tensor = bucket.slots
            part = Targets(slots, [(entry, None) for entry in entries])
            result, columns = bucket.result, bucket.columns
        else:
            slots = move.change.staying
            part = Targets(slots, [(entry, move.change.staying_rows) for entry in entries])
            result, columns = bucket.result[: len(slots)], move.staying_columns
        barrier = [runtime.last_d2h] if after_all_d2h and runtime.last_d2h is not None else []
        job = self._submit(
            f"updating {self._name}",
            Update(self._host, [part], self._closing(closing), weights=result),
            self._update_bytes(result.numel(), entries),
            _transfers(entries) + ([bucket.sent] if bucket.sent is not None else []) + barrier,
            result,
            places,
            not_before,
        )
        gradients = barrier[-1] if barrier else entries[-1].transfer
        return BucketJob(bucket, slots, columns, job, entries, gradients)

    def send_ahead(self, matrix: torch.Tensor, move: Move) -> Ahead:
        """Send the closing step's gradient of the columns that leave the tier, ahead of everything else.

        Args:
            matrix: the gradient, [rows, columns].
            move: the columns that change tier.
        """
        leaving = self._runtime.kernels.pack(matrix, move.to_selected)
        rows, transfer = self._runtime.fetch(leaving, self._runtime.memory.transient(leaving.shape, leaving.dtype))
        self._runtime.traffic.migrated_bytes += rows.nbytes
        return rows, transfer

    def submit_leave(self, move: Move, closing: Hyper, ahead: Ahead | None) -> Job:
        """Apply the window to the columns that leave the tier; before `submit_window`, which empties the log.

        Returns:
            The job whose result is their packed state, [n, packed_columns] int32.
        """
        result = self._runtime.memory.transient((len(move.places), self.state.packed_columns), torch.int32)
        parts, inputs, nbytes = [], [], 0
        for bucket, part in zip(self.buckets, move.buckets, strict=True):
            if part is None:
                continue
            pairs, slots, rows = part.change.pairs, part.change.slots, part.change.rows
            entries = [(entry, rows) for entry in bucket.log]
            if ahead is not None and entries:
                newest = replace(entries[-1][0], pieces=[ahead[0].view(-1)], transfer=ahead[1])
                entries[-1] = newest, pairs
            parts.append(Targets(slots, entries, pairs))
            inputs += _transfers([entry for entry, _ in entries])
            nbytes += self._update_bytes(len(slots) * self._rows, bucket.log)
        self._runtime.traffic.migrated_bytes += result.nbytes
        task = Update(self._host, parts, self._closing(closing), packed=result)
        job = self._submit(f"moving columns of {self._name}", task, nbytes, inputs, result)
        job.ask_result()
        return job

    def submit_join(self, move: Move, packed: torch.Tensor) -> None:
        """Take over the state of the columns that join the tier; after `submit_leave`, whose slots they get.

        Args:
            move: the columns that change tier.
            packed: [n, packed_columns] int32 on the device.
        """
        arriving, transfer = self._runtime.fetch(packed, self._runtime.memory.transient(packed.shape, packed.dtype))
        self._runtime.traffic.migrated_bytes += arriving.nbytes
        task = Unpack(self._host, move.change.slots, arriving)
        self._submit(f"moving columns of {self._name}", task, 2 * arriving.nbytes, [transfer])

    def rename(self, move: Move) -> None:
        """Let the slots stand for the columns that joined; after `submit_window`."""
        self.slot_columns.numpy()[move.change.slots.numpy()] = move.change.to_deferred.numpy()
        for bucket, part in zip(self.buckets, move.buckets, strict=True):
            if part is not None:
                bucket.columns = part.columns.clone()  # in memory of its own: the move's is that of all weights

    def _closing(self, closing: Hyper) -> Hyper | None:
        return closing if self._runtime.deferred_update == "mean" else None

    def _update_bytes(self, elements: int, entries: list[LogEntry]) -> int:
        """Memory traffic of a host update: fp32 state read and written, gradients read, result written."""
        state = 8 * (1 + len(self.state.moments))
        return elements * (state + sum([entry.pieces[0].element_size() for entry in entries]) + self._dtype.itemsize)

    def _submit(
        self,
        name: str,
        task: Task,
        nbytes: int,
        inputs: list[Transfer],
        result: torch.Tensor | None = None,
        places: Sequence[Extents] = (),
        not_before: int = 0,
    ) -> Job:
        runtime = self._runtime
        runtime.log.promise(places)

        def done() -> None:
            if runtime.ledger is not None and isinstance(task, Update):
                runtime.ledger.apply_on_host(self._name, task)
            runtime.log.give_back(places)

        job = Job(
            name,
            runtime.device,
            task,
            nbytes=nbytes,
            inputs=inputs,
            result=result,
            after=done,
            not_before=not_before,
        )
        runtime.device.charge_thread(jobs=1)
        return runtime.engine.submit(job)


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


def _transfers(entries: list[LogEntry]) -> list[Transfer]:
    return [transfer for entry in entries for transfer in entry.transfers()]
