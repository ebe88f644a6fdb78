"""The steps' records, from the open step to those that were resolved, and a timeline of a few of them.

The timeline is what the runtime's resources did, as spans on one time axis, recorded only where that is asked for: a
recorder notes marks and host clock readings while training goes on, and never waits; `timeline` turns them into
milliseconds afterwards. Marks lie on the device's clock and host work on the host's. A device whose clock is its own
(a GPU) is related to the host's by moments at which a mark was seen to be passed: each is an upper bound, the least of
them the best.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any, Literal

from zenflow.device import Device, Direction, HostSpan, Mark, Transfer
from zenflow.stats import StepRecord, StepStats, Traffic, Wait

Lane = Literal["compute", "d2h", "h2d", "host", "data", "comm", "stall"]
LANES: tuple[Lane, ...] = ("compute", "d2h", "h2d", "host", "data", "comm", "stall")
_RUNTIME_LANES: tuple[Lane, ...] = ("d2h", "h2d", "stall")
"""Lanes that a device with streams fills, if only with nothing."""


@dataclass(frozen=True, slots=True)
class Span:
    """Something that took time, in milliseconds since the recording began."""

    begin_ms: float
    end_ms: float
    label: str
    nbytes: int | None = None  # of a transfer


@dataclass(frozen=True, slots=True)
class Timeline:
    """Spans of whole steps, from the end of the step before the first to the end of the last."""

    first_step: int
    """Number of the first step, as in `StepStats`."""
    steps: int
    length_ms: float
    lanes: Mapping[Lane, Sequence[Span]]
    """By resource, in order of their beginnings. Copies and host work that began earlier begin at 0; those that went
    on later end after `length_ms`. A lane that nobody recorded is missing, one on which nothing happened is empty."""

    def document(self) -> dict[str, Any]:
        """The timeline as JSON: every span as [begin_ms, end_ms, label]."""
        return {
            "first_step": self.first_step,
            "steps": self.steps,
            "length_ms": self.length_ms,
            "lanes": {
                lane: [[round(span.begin_ms, 6), round(span.end_ms, 6), span.label] for span in spans]
                for lane, spans in self.lanes.items()
            },
        }


class TimelineRecorder:
    """Notes what happens from the next close of an update window on, for a number of steps (None: one whole window)."""

    def __init__(self, device: Device, steps: int | None) -> None:
        self._device = device
        self._steps = steps
        self._begin: Mark | None = None
        self._end: Mark | None = None
        self._first_step = 0
        self._waits: list[Sequence[Wait]] = []  # step by step
        self._phases: list[tuple[str, Mark, Mark]] = []
        self._transfers: list[tuple[Direction, Transfer]] = []
        self._host: list[tuple[Lane, str, HostSpan]] = []
        self._seen: list[tuple[Mark, float]] = []
        self._complete = False

    @property
    def over(self) -> bool:
        """Whether all steps have been taken."""
        return self._end is not None

    # --- what happens ----------------------------------------------------------------------------------------------

    def compute(self, label: str, begin: Mark, end: Mark) -> None:
        """Say what the compute stream was given between two marks of one step; stalls in between are taken out.

        `label` is such as "forward", "backward", "optimizer".
        """
        if not self._complete:  # the last step's marks may be told after its end
            self._phases.append((label, begin, end))

    def wall(self, lane: Lane, label: str, begin_s: float, end_s: float) -> None:
        """Say what another resource ("data" or "comm") did, in seconds of the device's clock."""
        if not self._complete:
            self._host.append((lane, label, HostSpan(begin_s, end_s)))

    def transferred(self, direction: Direction, transfer: Transfer) -> None:
        """Called by the device for every copy that it queues; any thread may call it."""
        self._transfers.append((direction, transfer))

    def worked(self, name: str, span: HostSpan) -> None:
        """Called by the host engine for every job that is done; any thread may call it."""
        self._host.append(("host", name, span))

    def passed(self, mark: Mark) -> None:
        """Called when a mark was just waited for."""
        self._seen.append((mark, self._device.clock.now()))

    def end_step(self, record: StepRecord) -> bool:
        """Called at the end of every step: whether nothing that belongs to the recorded ones can follow.

        Jobs go on after them, at longest until the close that comes next.
        """
        if self.over:
            self._complete = record.closed
            return self._complete
        if self._begin is None:
            if record.closed:
                self._begin, self._first_step = record.end, record.step + 1
            return False
        self._waits.append(record.waits)
        if len(self._waits) == self._steps or (self._steps is None and record.closed):
            self._end = record.end
        return False

    # --- afterwards ------------------------------------------------------------------------------------------------

    def timeline(self) -> Timeline | None:
        """The steps' spans, None until they are over; waits for the device to have passed them."""
        if not self.over:
            return None
        device = self._device
        now = device.mark()  # behind every mark that was told
        device.wait_for(now)
        self.passed(now)
        transfers, host = list(self._transfers), list(self._host)  # others may still be noted
        for _, transfer in transfers:
            transfer.wait()
        length_ms = self._ms(self._end)
        lanes: dict[Lane, list[Span]] = {lane: [] for lane in _RUNTIME_LANES if device.has_streams}
        lanes["compute"] = self._compute()
        if device.has_streams:
            lanes["stall"] = self._stalls()
            for direction, transfer in transfers:
                span = Span(self._ms(transfer.begin), self._ms(transfer.end), _size(transfer.nbytes), transfer.nbytes)
                lanes[direction].append(span)
        lanes.setdefault("host", [])
        origin_s = self._origin_s()
        for lane, label, work in host:
            span = Span(1e3 * (work.begin_s - origin_s), 1e3 * (work.end_s - origin_s), label)
            lanes.setdefault(lane, []).append(span)
        ordered: dict[Lane, list[Span]] = {
            lane: _within(lanes[lane], length_ms, clip=lane in ("compute", "stall")) for lane in LANES if lane in lanes
        }
        return Timeline(self._first_step, len(self._waits), length_ms, ordered)

    def _ms(self, mark: Mark) -> float:
        return 1e3 * self._device.elapsed_s(self._begin, mark)

    def _origin_s(self) -> float:
        """The beginning on the host's clock."""
        exact = self._device.host_time_s(self._begin)
        if exact is not None:
            return exact
        return min(seen_s - self._device.elapsed_s(self._begin, mark) for mark, seen_s in self._seen)

    def _stalls(self) -> list[Span]:
        spans = []
        for wait in (wait for waits in self._waits for wait in waits):
            at = self._ms(wait.begin)
            for cause, seconds in wait.by_cause(self._device).items():  # in the order in which they follow each other
                end = at + 1e3 * seconds
                if seconds > 0:
                    spans.append(Span(at, end, cause))
                at = end
        return spans

    def _compute(self) -> list[Span]:
        stalls = sorted(self._stalls(), key=_begin) if self._device.has_streams else []
        return [
            Span(begin, end, label)
            for label, first, last in self._phases
            if self._ms(first) >= 0  # else it is of the step before
            for begin, end in without(self._ms(first), self._ms(last), stalls)
        ]


def without(begin: float, end: float, stalls: Iterable[Span]) -> list[tuple[float, float]]:
    """What is left of an interval (milliseconds) when stalls are taken out; they are in order of their beginnings."""
    left = []
    for stall in stalls:
        if stall.begin_ms >= end:
            break
        if stall.begin_ms > begin:
            left.append((begin, stall.begin_ms))
        begin = max(begin, stall.end_ms)
    return [*left, (begin, end)] if begin < end else left


def _within(spans: Iterable[Span], length_ms: float, *, clip: bool) -> list[Span]:
    """Those that overlap the steps, none of which begins before them, nor ends after them if they are clipped."""
    most = length_ms if clip else math.inf
    inside = (span for span in spans if span.end_ms > 0 and span.begin_ms < length_ms)
    return sorted((Span(max(0.0, s.begin_ms), min(most, s.end_ms), s.label, s.nbytes) for s in inside), key=_begin)


def _begin(span: Span) -> float:
    return span.begin_ms


def _size(nbytes: int) -> str:
    for unit, factor in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if nbytes >= factor:
            return f"{nbytes / factor:.3g} {unit}"
    return f"{nbytes} bytes"


# Steps between a step and its statistics: resolving earlier could wait for the device.
_RESOLVE_LAG = 2
HISTORY_STEPS = 4096


class History:
    """Owns the record of the open step and turns closed ones into statistics, in order and without waiting."""

    def __init__(self, device: Device) -> None:
        self.open = StepRecord(step=0)
        """What happened since the end of the last step."""
        self._device = device
        self.last_end: Mark | None = None
        """Where the last step ended; None before the first."""
        self._closed: deque[StepRecord] = deque()
        self._resolved: deque[StepStats] = deque(maxlen=HISTORY_STEPS)
        self.recorder: TimelineRecorder | None = None
        self._recording = False

    def record(self, steps: int | None) -> TimelineRecorder:
        """Record so many steps (None: one window) from the next close on; an open one ends without a result."""
        self.recorder = self._device.observer = TimelineRecorder(self._device, steps)
        self._recording = True
        return self.recorder

    def stop_recording(self) -> None:
        """Note nothing more; what was recorded stays."""
        if self._recording:
            self._recording, self._device.observer = False, None

    def begin_step(self) -> None:
        """Resolve what can be, and bound the training thread's run-ahead to one step."""
        self._resolve(_RESOLVE_LAG)  # here, where the device has backward to work on
        if self.last_end is not None:
            self._device.wait_for(self.last_end)
            if self._recording and self.recorder is not None:
                self.recorder.passed(self.last_end)

    def end_step(self, step: int, traffic: Traffic) -> None:
        """Close the open record; `traffic` is that since the end of the last one."""
        record, self.open = self.open, StepRecord(step=step + 1)
        record.step, record.begin, record.end, record.traffic = step, self.last_end, self._device.mark(), traffic
        record.comm_s = self._device.comm_s()
        self._closed.append(record)
        self.last_end = record.end
        if self._recording and self.recorder is not None and self.recorder.end_step(record):
            self.stop_recording()

    def steps(self, *, wait: bool, after: int = 0) -> list[StepStats]:
        """The last steps that are resolved, oldest first, with a number above `after`: costs what these are.

        With `wait` it waits for the device, so that the newest step is among them.
        """
        for record in self._closed if wait else ():
            record.wait(self._device)
        self._resolve(0 if wait else _RESOLVE_LAG)
        found = list(takewhile(lambda stats: stats.step > after, reversed(self._resolved)))
        found.reverse()
        return found

    def of(self, step: int) -> StepStats | None:
        """The statistics of one step; None if they are not kept. Waits for the device to have passed its end."""
        while self._closed and self._closed[0].step <= step:
            record = self._closed.popleft()
            record.wait(self._device)
            self._resolved.append(record.resolve(self._device))
        newest = next((stats for stats in reversed(self._resolved) if stats.step <= step), None)
        return newest if newest is not None and newest.step == step else None

    def _resolve(self, lag: int) -> None:
        while len(self._closed) > lag and self._closed[0].ready(self._device):
            self._resolved.append(self._closed.popleft().resolve(self._device))
