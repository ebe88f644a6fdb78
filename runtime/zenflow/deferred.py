"""The deferred tier of one weight: its state on the host, the window's log, and the jobs that apply it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from zenflow.control import StepControl
from zenflow.device import Transfer
from zenflow.host import Job, LogEntry, apply_entries
from zenflow.layout import WeightPlan
from zenflow.rules import AdamWHyper
from zenflow.runtime import Runtime
from zenflow.selection import Move
from zenflow.state import ColumnState

Ahead = tuple[torch.Tensor, Transfer]
"""A closing step's gradient of the columns that leave the tier, [n, rows], sent ahead of the rest."""


@dataclass(slots=True)
class Bucket:
    """A range of the weight's slots that is moved and updated as a unit."""

    index: int
    """b, counted over the whole model."""
    low: int
    high: int
    columns: torch.Tensor
    """[high - low] int64 on the device: the deferred column in each slot."""
    log: list[LogEntry] = field(default_factory=list)
    free_rows: list[torch.Tensor] = field(default_factory=list)
    """Host memory of log entries that were applied."""
    result: torch.Tensor | None = None
    sent: Transfer | None = None
    """The last copy out of `result`; it must be over before `result` changes."""


@dataclass(slots=True)
class BucketJob:
    """A bucket's window on its way through host and link."""

    bucket: Bucket
    columns: torch.Tensor
    """[n] int64 on the device: where the result belongs."""
    job: Job
    entries: list[LogEntry]
    gradients: Transfer
    """The last of the gradients that the job waits for."""


class DeferredTier:
    """Owns the host state of the deferred columns. Slot i of `state` holds column `slot_columns[i]`."""

    def __init__(
        self, name: str, plan: WeightPlan, dtype: torch.dtype, columns: torch.Tensor, runtime: Runtime
    ) -> None:
        """Make room for columns; `read_masters` fills it.

        Args:
            name: the parameter's.
            plan: its split.
            dtype: its dtype.
            columns: [plan.deferred] int64, ascending.
            runtime: shared by all weights.
        """
        self._name = name
        self._rows = plan.rows
        self._dtype = dtype
        self._runtime = runtime
        self.slot_columns = columns
        masters = torch.zeros(plan.deferred, plan.rows, dtype=torch.float32, device="cpu")
        self.state = ColumnState(masters, runtime.rule.moments)
        self.buckets = [
            Bucket(plan.first_bucket + number, low, high, runtime.send_index(columns[low:high]))
            for number, (low, high) in enumerate(plan.bucket_slots)
        ]

    @property
    def host_bytes(self) -> dict[str, int]:
        """Host memory by use: state, log, staging."""
        rows = [entry.rows for bucket in self.buckets for entry in bucket.log]
        rows += [free for bucket in self.buckets for free in bucket.free_rows]
        results = [bucket.result for bucket in self.buckets if bucket.result is not None]
        return {
            "state": self.state.nbytes,
            "log": sum(tensor.nbytes for tensor in rows),
            "staging": sum(tensor.nbytes for tensor in results),
        }

    def read_masters(self, matrix: torch.Tensor, *, keep: bool) -> None:
        """Take the masters from the weights.

        Args:
            matrix: the weights, [rows, columns].
            keep: keep a master that rounds to its weight, so that an unchanged weight loses no precision.
        """
        state = self.state
        index = torch.cat([bucket.columns for bucket in self.buckets])
        weights, transfer = self._runtime.fetch(matrix.t().index_select(0, index))
        self._runtime.traffic.migrated_bytes += weights.nbytes

        def work() -> None:
            state.master.copy_(reread(state.master, weights) if keep else weights)

        self._submit(f"reading the masters of {self._name}", work, weights.nbytes + state.master.nbytes, [transfer])

    def log(self, matrix: torch.Tensor, step: int, hyper: AdamWHyper, control: StepControl | None) -> None:
        """Send a step's gradient to the host.

        Args:
            matrix: the gradient, [rows, columns].
            step: number of the step.
            hyper: the group's hyperparameters at that step.
            control: factor and skip flag.
        """
        for bucket in self.buckets:
            packed = matrix.t().index_select(0, bucket.columns)
            self._runtime.device.charge(2 * packed.nbytes)
            free = bucket.free_rows.pop() if bucket.free_rows else None  # the host engine may add to them meanwhile
            reusable = free is not None and free.dtype == packed.dtype
            rows, transfer = self._runtime.fetch(packed, free if reusable else None)
            self._runtime.traffic.d2h_bytes += packed.nbytes
            bucket.log.append(LogEntry(step, rows, transfer, hyper, None if control is None else control.host))

    # --- a close ---------------------------------------------------------------------------------------------------

    def submit_window(self, closing: AdamWHyper, move: Move | None, *, after_all_d2h: bool) -> list[BucketJob]:
        """Submit the logged window of every bucket and begin an empty log.

        Args:
            closing: hyperparameters of the closing step.
            move: columns that change tier at this close; their slots are passed over.
            after_all_d2h: start only when every gradient has arrived, as DeepSpeed does.
        """
        barrier = [self._runtime.last_d2h] if after_all_d2h and self._runtime.last_d2h is not None else []
        jobs = []
        for bucket in self.buckets:
            entries, bucket.log = bucket.log, []
            staying = None if move is None else _others(bucket, move.slots)
            if entries and (staying is None or len(staying)):
                jobs.append(self._submit_bucket(bucket, entries, closing, staying, barrier))
            else:
                bucket.free_rows.extend(entry.rows for entry in entries)
        return jobs

    def _submit_bucket(
        self,
        bucket: Bucket,
        entries: list[LogEntry],
        closing: AdamWHyper,
        staying: torch.Tensor | None,
        barrier: list[Transfer],
    ) -> BucketJob:
        runtime, everything = self._runtime, self.state
        if bucket.result is None:
            bucket.result = runtime.device.host_empty((bucket.high - bucket.low, self._rows), self._dtype)
        result = bucket.result if staying is None else bucket.result[: len(staying)]
        columns = bucket.columns if staying is None else runtime.send_index(self.slot_columns[staying])

        def work() -> None:
            if staying is None:
                state, rows = everything.slice(bucket.low, bucket.high), [entry.rows for entry in entries]
            else:
                state = everything.select(staying)
                rows = [entry.rows.index_select(0, staying - bucket.low) for entry in entries]
            apply_entries(state, runtime.rule, entries, rows, closing, runtime.deferred_update)
            if staying is not None:
                everything.restore(staying, state)
            result.copy_(state.master)
            bucket.free_rows.extend(entry.rows for entry in entries)

        inputs = _transfers(entries) + ([bucket.sent] if bucket.sent is not None else []) + barrier
        nbytes = _update_bytes(result.numel(), entries, self._dtype.itemsize)
        job = self._submit(f"updating {self._name}", work, nbytes, inputs, result)
        return BucketJob(bucket, columns, job, entries, barrier[-1] if barrier else entries[-1].transfer)

    def send_ahead(self, matrix: torch.Tensor, move: Move) -> Ahead:
        """Send the closing step's gradient of the columns that leave the tier, ahead of everything else.

        Args:
            matrix: the gradient, [rows, columns].
            move: the columns that change tier.
        """
        rows, transfer = self._runtime.fetch(matrix.t().index_select(0, self._runtime.send_index(move.to_selected)))
        self._runtime.traffic.migrated_bytes += rows.nbytes
        return rows, transfer

    def submit_leave(self, move: Move, closing: AdamWHyper, ahead: Ahead | None) -> Job:
        """Apply the window to the columns that leave the tier; before `submit_window`, which empties the log.

        Returns:
            The job whose result is their packed state, [n, packed_columns] int32.
        """
        runtime, everything = self._runtime, self.state
        result = runtime.device.host_empty((len(move.slots), everything.packed_columns), torch.int32)
        parts = [(bucket, list(bucket.log), *_members(bucket, move.slots)) for bucket in self.buckets]

        def work() -> None:
            for bucket, entries, positions, slots in parts:
                state = everything.select(slots)
                rows = [entry.rows.index_select(0, slots - bucket.low) for entry in entries]
                if ahead is not None:
                    rows[-1] = ahead[0].index_select(0, positions)
                apply_entries(state, runtime.rule, entries, rows, closing, runtime.deferred_update)
                result.index_copy_(0, positions, state.pack(torch.arange(len(slots), device="cpu")))

        arrived = [entries if ahead is None else entries[:-1] for _, entries, _, _ in parts]
        inputs = [transfer for entries in arrived for transfer in _transfers(entries)]
        if ahead is not None:
            inputs.append(ahead[1])
            inputs += [entries[-1].control.transfer for _, entries, _, _ in parts if entries[-1].control is not None]
        nbytes = sum(
            _update_bytes(len(slots) * self._rows, entries, self._dtype.itemsize) for _, entries, _, slots in parts
        )
        runtime.traffic.migrated_bytes += result.nbytes
        job = self._submit(f"moving columns of {self._name}", work, nbytes, inputs, result)
        job.ask_result()
        return job

    def submit_join(self, move: Move, packed: torch.Tensor) -> None:
        """Take over the state of the columns that join the tier; after `submit_leave`, whose slots they get.

        Args:
            move: the columns that change tier.
            packed: [n, packed_columns] int32 on the device.
        """
        arriving, transfer = self._runtime.fetch(packed)
        self._runtime.traffic.migrated_bytes += arriving.nbytes
        self._submit(
            f"moving columns of {self._name}",
            lambda: self.state.unpack(move.slots, arriving),
            2 * arriving.nbytes,
            [transfer],
        )

    def rename(self, move: Move) -> None:
        """Let the slots stand for the columns that joined; after `submit_window`."""
        self.slot_columns[move.slots] = move.to_deferred
        for bucket in self.buckets:
            if len(_members(bucket, move.slots)[0]):
                bucket.columns = self._runtime.send_index(self.slot_columns[bucket.low : bucket.high])

    def _submit(
        self,
        name: str,
        work: Callable[[], None],
        nbytes: int,
        inputs: list[Transfer],
        result: torch.Tensor | None = None,
    ) -> Job:
        job = Job(name, self._runtime.device, work, nbytes=nbytes, inputs=inputs, result=result)
        return self._runtime.engine.submit(job)


def reread(master: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """The weights in fp32, but the master where it rounds to its weight."""
    return torch.where(master.to(weights.dtype) == weights, master, weights.float())


def _members(bucket: Bucket, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Positions in `slots` of those in the bucket, and these slots."""
    positions = ((slots >= bucket.low) & (slots < bucket.high)).nonzero().squeeze(1)
    return positions, slots[positions]


def _others(bucket: Bucket, moved: torch.Tensor) -> torch.Tensor | None:
    """The bucket's slots that are not among `moved`; None where that is all of them."""
    slots = torch.arange(bucket.low, bucket.high, device="cpu")
    staying = slots[~torch.isin(slots, moved)]
    return None if len(staying) == len(slots) else staying


def _transfers(entries: list[LogEntry]) -> list[Transfer]:
    controls = [entry.control.transfer for entry in entries if entry.control is not None]
    return [entry.transfer for entry in entries] + controls


def _update_bytes(elements: int, entries: list[LogEntry], result_bytes: int) -> int:
    """Memory traffic of a host update: fp32 state read and written, gradients read, result written."""
    return elements * (24 + sum(entry.rows.element_size() for entry in entries) + result_bytes)
