"""Buckets: neighbouring weights whose deferred columns cross the link, and are updated, as a unit."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

import torch

from zenflow.device import Transfer
from zenflow.host.gradient_log import GradientLog
from zenflow.host.log_pool import Extents
from zenflow.host.memory import HostMemory
from zenflow.host.places import padded
from zenflow.host.tasks import HostGradient, LogEntry

Sample = tuple[torch.Tensor, torch.Tensor]
"""Some columns, [n] int64, and their masters, [n, rows] fp32."""
Kind = tuple[int, torch.dtype, bool]
"""Number of a bucket, dtype of its weights and whether they are stored transposed."""


@dataclass(slots=True, eq=False)
class Bucket:
    """What the parts of one bucket share."""

    kind: Kind
    numel: int = 0  # elements of all parts
    entry_bytes: int = 0  # that are planned for each entry of the log
    places: list[Extents] = field(default_factory=list)  # where the entries of the open window lie
    sent: Transfer | None = None
    """The last copy out of the results; it must be over before they change."""
    memory: Future[torch.Tensor] | None = None  # of the results, once somebody needs it
    memory_numel: int = 0
    beside_bytes: int = 0
    """Planned for each entry for what is sent a second time in one step."""
    moves: int = 0  # how often columns of its weights have changed tier


@dataclass(slots=True, eq=False)
class Part:
    """The columns of one weight that are in one bucket: a range of the weight's slots."""

    bucket: Bucket
    slots: range
    columns: torch.Tensor
    """[slots] int64 on the device: the deferred column in each slot."""
    start: int  # in the bucket's elements
    entry_bytes: int  # that are planned for each entry of the log
    log: list[LogEntry] = field(default_factory=list)
    ahead: bool = False
    """Whether the weights hold something else than the masters round to, once nothing is in flight."""
    guessed: bool = False
    """Whether they have been moved by a guess since the last close: what is in flight does not replace all of these."""
    sample: Sample | None = None
    """Of the masters as the last window left them; None: not known."""
    reading: tuple[Transfer, torch.Tensor] | None = None
    """The weights that the masters begin with, [slots, rows] in host memory, and what brings them there; None: once a
    window has been submitted."""

    result: tuple[torch.Tensor, torch.Tensor] | None = None
    """The memory of the bucket's results, and the last of its own in it, [n, rows]."""

    @property
    def index(self) -> int:
        """b: the bucket's number."""
        return self.bucket.kind[0]


@dataclass(slots=True, eq=False)
class Sent:
    """One place in the log with a step's gradients, not entries of it yet."""

    bucket: Bucket
    place: Extents
    transfer: Transfer
    parts: int  # how many of the gradients may still be used
    unused_bytes: int = 0  # of the others


@dataclass(slots=True, eq=False)
class SentPart:
    """One part's gradient on its way to the log."""

    sent: Sent
    gradient: HostGradient


class Buckets:
    """Owns the buckets of one split, and plans their room in the gradient log."""

    def __init__(self, log: GradientLog, memory: HostMemory) -> None:
        self._log = log
        self._memory = memory
        self._of: dict[Kind, Bucket] = {}
        self._older: dict[Kind, Bucket] = {}
        self._count = 1

    def begin(self, count: int) -> None:
        """Forget all buckets: every part joins anew one of `count`. Nothing is logged or in flight."""
        self._older, self._of, self._count = self._of, {}, count
        self._log.plan((), count)

    def join(self, kind: Kind, numel: int) -> tuple[Bucket, int]:
        """Make room for a part of so many elements; the bucket, and where in its elements the part begins."""
        bucket = self._of.setdefault(kind, Bucket(kind))
        start, bucket.numel = bucket.numel, bucket.numel + numel
        self.plan(bucket, padded(numel * kind[1].itemsize))
        return bucket, start

    def plan(self, bucket: Bucket, nbytes: int) -> None:
        """Plan more (padded) bytes for each entry of a bucket."""
        bucket.entry_bytes += nbytes
        self._log.plan([(kind[0], one.entry_bytes) for kind, one in self._of.items()], self._count)

    def plan_beside(self, bucket: Bucket, nbytes: int) -> None:
        """Plan for gradients that are sent a second time in one step, beside the first ones, as they may be again."""
        if nbytes > bucket.beside_bytes:
            self.plan(bucket, nbytes - bucket.beside_bytes)
            bucket.beside_bytes = nbytes

    def allocate(self) -> None:
        """Get memory for results where there is too little; where it has to be pinned, beside training.

        Raises MemoryError if the host has less; where it is got beside training, whoever needs it is told.
        """
        for kind, bucket in self._of.items():
            if bucket.memory is None or bucket.memory_numel < bucket.numel:
                older = self._older.get(kind)
                if older is not None and older.memory_numel == bucket.numel:
                    bucket.memory, bucket.sent = older.memory, older.sent
                else:
                    make = functools.partial(self._memory.empty, (bucket.numel,), kind[1], "staging")
                    bucket.memory = self._memory.beside(make)
                bucket.memory_numel = bucket.numel
        self._older = {}

    def result_of(self, bucket: Bucket) -> torch.Tensor:
        """[numel] in the model's dtype, in host memory: new weights on their way to the device."""
        if bucket.memory is None or bucket.memory_numel < bucket.numel:
            self.allocate()
        assert bucket.memory is not None
        return bucket.memory.result()


def transfers_of(entries: Sequence[LogEntry]) -> list[Transfer]:
    """What must have arrived before entries can be used, each once."""
    return list({id(one): one for entry in entries for one in entry.transfers()}.values())
