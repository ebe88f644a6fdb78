"""Order on the simulated CUDA device: streams, events, and who has used which memory."""

from __future__ import annotations

import ctypes
import os
import sys
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Literal, NamedTuple

import torch

import zenflow.device
from zenflow.host.tasks import ReadMasters, Task, Unpack, Update

if TYPE_CHECKING:
    from tests.support.zenflow.simulated_cuda import SimulatedCuda

Kind = Literal["race", "freed", "host", "pageable", "temporary", "unregistered", "mixed"]
Span = tuple[int, int]
"""Addresses of host memory, the second behind its end."""
Clock = dict[int, int]
"""Of each stream, by its number, the last operation that comes before something."""

DEVICE = torch.device("privateuseone", 0)
_POISON = 0xFF
_RUNTIME = str(Path(zenflow.device.__file__).parent) + os.sep

_running: SimulatedCuda | None = None


def running() -> SimulatedCuda:
    """The simulation that lasts."""
    assert _running is not None, "no simulated_cuda() lasts any more"
    return _running


def run(gpu: SimulatedCuda | None) -> None:
    """Begin a simulation, or end it."""
    global _running
    assert gpu is None or _running is None, "one simulation lasts already"
    _running = gpu


class Problem(NamedTuple):
    """Something that a GPU may not do as the program needs it."""

    kind: Kind
    text: str
    where: str
    """Lines of the runtime, the innermost first."""


@dataclass(slots=True)
class Counts:
    """What one part of the steps gave the device."""

    launches: Counter[str] = field(default_factory=Counter)
    """By operation of torch, or kernel of Triton."""
    copies: Counter[str] = field(default_factory=Counter)
    """Between host and device: "d2h", "h2d"."""
    events_made: int = 0
    events_recorded: int = 0
    waits: Counter[str] = field(default_factory=Counter)
    """What made the host wait for the device, other than an event: operation, and where."""


def runtime_lines(limit: int = 6) -> str:
    found: list[str] = []
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and len(found) < limit:
        if frame.f_code.co_filename.startswith(_RUNTIME):
            found.append(f"{frame.f_code.co_filename.removeprefix(_RUNTIME)}:{frame.f_lineno}")
        frame = frame.f_back
    return " < ".join(found)


# --- streams and events ---------------------------------------------------------------------------------------------


class Stream:
    """Stands for `torch.cuda.Stream`."""

    def __init__(self, device: object = None, **_: object) -> None:
        self._gpu = gpu = running()
        self.number = len(gpu.streams)
        self.cuda_stream = self.number
        self.device = DEVICE
        if device is None:
            gpu.use_context()
        self.last = 0
        """Number of the last operation."""
        self.clock: Clock = {}
        self.freed: list[Clock] = []
        """What was given back since the last launch: the next one may get it."""
        self._late: deque[tuple[int, Clock, Callable[[], object]]] = deque()
        gpu.streams.append(self)

    def wait_stream(self, other: Stream) -> None:
        event = Event()
        event.record(other)
        self.wait_event(event)

    def wait_event(self, event: Event) -> None:
        with self._gpu.lock:
            merge(self.clock, event.after)

    def record_event(self, event: Event | None = None) -> Event:
        event = event or Event()
        event.record(self)
        return event

    def synchronize(self) -> None:
        self._gpu.wait_for(self, "Stream.synchronize")

    def query(self) -> bool:
        with self._gpu.lock:
            return all(self._gpu.seen.get(stream, 0) >= number for stream, number in self.reached().items())

    def reached(self) -> Clock:
        """All that is ordered before what comes next."""
        return {**self.clock, self.number: self.last}

    def launch(self) -> int:
        """One operation more, after all that the host has waited for."""
        self._gpu.raise_last_error()
        merge(self.clock, self._gpu.seen)
        freed, self.freed = self.freed, []
        for uses in freed:
            for other, number in uses.items():
                if number > self.clock.get(other, 0):
                    text = f"stream {self.number} may give a kernel what was freed while stream {other} uses it"
                    self._gpu.report("freed", text)
        self.last += 1
        self.clock[self.number] = self.last
        return self.last

    def postpone(self, number: int, run: Callable[[], object]) -> None:
        """Let an operation run when something has waited for it."""
        self._late.append((number, dict(self.clock), run))

    def settle(self, upto: int) -> None:
        """Run the copies up to one of them, each after those that are ordered before it."""
        while self._late and self._late[0][0] <= upto:
            _, clock, run = self._late.popleft()
            self._gpu.settle({stream: number for stream, number in clock.items() if stream != self.number})
            run()


class Event:
    """Stands for `torch.cuda.Event`: made once, and recorded as often as one likes."""

    def __init__(self, enable_timing: bool = False, blocking: bool = False, **_: object) -> None:
        self._gpu = gpu = running()
        self._timed = enable_timing
        self._passed = True
        self._at_s: float | None = None
        self.after: Clock = {}
        gpu.counts().events_made += 1

    def record(self, stream: Stream | None = None) -> None:
        gpu = self._gpu
        with gpu.lock:
            stream = stream or gpu.current_stream()
            merge(stream.clock, gpu.seen)
            self.after, self._passed, self._at_s = stream.reached(), False, time.perf_counter()
            gpu.counts().events_recorded += 1

    def wait(self, stream: Stream | None = None) -> None:
        (stream or self._gpu.current_stream()).wait_event(self)

    def synchronize(self) -> None:
        with self._gpu.lock:
            self._gpu.let_host_see(self.after)
            self._passed = True

    def query(self) -> bool:
        gpu = self._gpu
        with gpu.lock:
            passed = self._passed or all(gpu.seen.get(stream, 0) >= number for stream, number in self.after.items())
            if not passed and gpu.chance.random() < gpu.arrival:
                self.synchronize()
                passed = True
            self._passed = passed
            return passed

    def elapsed_time(self, end: Event) -> float:
        for event in (self, end):
            if not event._timed or event._at_s is None or not event.query():
                raise RuntimeError("CUDA error: an event was made without timing, not recorded, or is not passed yet")
        assert self._at_s is not None
        assert end._at_s is not None
        return 1e3 * (end._at_s - self._at_s)


def merge(clock: Clock, other: Mapping[int, int]) -> None:
    for stream, number in other.items():
        if number > clock.get(stream, 0):
            clock[stream] = number


# --- memory of the device -------------------------------------------------------------------------------------------


class Block:
    """A block of the caching allocator: who made it, and who has used it since."""

    __slots__ = ("__weakref__", "_gpu", "_made_on", "_reads", "_write", "nbytes", "recorded")

    def __init__(self, gpu: SimulatedCuda, nbytes: int) -> None:
        self._gpu = gpu
        self._made_on = gpu.current_stream().number
        self._reads: Clock = {}
        self._write: tuple[int, int] | None = None
        self.nbytes = nbytes
        self.recorded: set[int] = set()
        gpu.allocated_bytes += nbytes
        gpu.peak_bytes = max(gpu.peak_bytes, gpu.allocated_bytes)

    def used(self, stream: Stream, number: int, operation: str, *, writes: bool) -> None:
        """Check an operation that was launched against those before it."""
        before = [self._write] if self._write is not None else []
        before += list(self._reads.items()) if writes else []
        for other, theirs in before:
            if theirs > stream.clock.get(other, 0):
                verb = "writes" if writes else "reads"
                text = f"{operation} on stream {stream.number} {verb} what stream {other} uses without order"
                self._gpu.report("race", text)
        if writes:
            self._write, self._reads = (stream.number, number), {}
        else:
            self._reads[stream.number] = number

    def filled(self, stream: Stream, number: int) -> None:
        """An operation made it."""
        if self._write is None:
            self._write = stream.number, number

    def __del__(self) -> None:
        # The allocator may hand it to the next kernel of its own stream; of others it asks only those recorded.
        self._gpu.allocated_bytes -= self.nbytes
        uses = [*self._reads.items(), *([self._write] if self._write is not None else [])]
        foreign = {stream: number for stream, number in uses if stream not in (self._made_on, *self.recorded)}
        if foreign:
            self._gpu.streams[self._made_on].freed.append(foreign)


# --- memory of the host ---------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Flight:
    """A copy that the host has not waited for."""

    stream: int
    number: int
    span: Span
    writes: bool
    """The host's memory."""
    where: str
    kept: torch.Tensor | None
    """Memory of torch's own allocator, which does not give a block to others before that."""


def span_of(tensor: torch.Tensor) -> Span:
    return tensor.data_ptr(), tensor.data_ptr() + tensor.numel() * tensor.element_size()


def unowned(tensor: torch.Tensor) -> torch.Tensor:
    """The same host memory, which may be given up as if nobody knew this tensor; contiguous."""
    buffer = (ctypes.c_byte * tensor.nbytes).from_address(tensor.data_ptr())
    return torch.frombuffer(buffer, dtype=tensor.dtype).view(tensor.shape)


def meet(one: Span, other: Span) -> bool:
    return one[0] < other[1] and other[0] < one[1]


def lies_in(span: Span, spans: Iterable[Span]) -> bool:
    return any(low <= span[0] and span[1] <= high for low, high in spans)


def poison(tensor: torch.Tensor) -> None:
    tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8).fill_(_POISON)  # contiguous


def spans_of(task: Task) -> tuple[list[Span], list[Span]]:
    """Of what copies reach, the host memory that a task reads and what it writes."""
    if isinstance(task, ReadMasters):
        return [span_of(task.weights)], []
    if isinstance(task, Unpack):
        return [span_of(task.packed)], []
    assert isinstance(task, Update)
    entries = [entry for part in task.parts for entry, _ in part.entries]
    reads = [span_of(piece) for entry in entries for piece in entry.gradient.pieces()]
    reads += [span_of(entry.control.values) for entry in entries if entry.control is not None]
    return reads, [span_of(one) for one in (task.weights, task.packed) if one is not None]
