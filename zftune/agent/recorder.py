"""From the crossings of hooks to steps: phases that add up, waits by cause, device events. Imports no torch."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Protocol

if TYPE_CHECKING:
    from zenflow.device import Device


class EventBackend(Protocol):
    """Where marks come from; called by the training thread only."""

    has_stream: bool
    """Whether marks time a device stream, so that a wait on it is a stall."""
    source: str
    """What a report calls the origin of the times."""

    def mark(self) -> Any:
        """Record the point that the compute stream has been given work up to."""

    def passed(self, mark: Any) -> bool:
        """Whether a mark has been reached; never blocks."""

    def elapsed_ms(self, begin: Any, end: Any) -> float:
        """Milliseconds between two marks that have both been passed; negative if `end` came first."""


class StreamBackend(EventBackend, Protocol):
    """One that knows a compute stream among others."""

    @property
    def device(self) -> Device | None:
        """The device of the stream; None without one."""

    def on_compute_stream(self) -> bool:
        """Whether what is queued now, a mark too, goes to the compute stream."""


class WallClock:
    """No device stream: a mark is the time at which it was made."""

    device = None
    has_stream = False
    source = "wall clock"

    def __init__(self, clock_ns: Callable[[], int] = time.monotonic_ns) -> None:
        self.mark = clock_ns

    def passed(self, mark: int) -> bool:
        return True

    def elapsed_ms(self, begin: int, end: int) -> float:
        return (end - begin) / 1e6

    def on_compute_stream(self) -> bool:
        return True


class DeviceEvents:
    """Marks of an accelerator: CUDA events, or times of the emulated one."""

    has_stream = True
    source = "event"

    def __init__(self, device: Device) -> None:
        self.device = device
        self.mark = device.mark
        self.passed = device.passed
        self._elapsed_s = device.elapsed_s
        self._current_stream = device.current_stream
        self._compute_stream = device.current_stream()

    def elapsed_ms(self, begin: Any, end: Any) -> float:
        return 1e3 * self._elapsed_s(begin, end)

    def on_compute_stream(self) -> bool:
        return self._current_stream() == self._compute_stream


Phase = Literal["data", "backward", "optimizer"]
Lane = Literal["data", "forward", "backward", "optimizer", "other"]
Cause = Literal["host", "h2d", "d2h", "select", "comm", "data"]
LANES: tuple[Lane, ...] = ("data", "forward", "backward", "optimizer", "other")

_DIGITS = 6  # of a millisecond: nanoseconds
_DRAIN_POLLS, _DRAIN_POLL_S = 400, 0.005


@dataclass(slots=True)
class StepRow:
    """One step: from the end of an optimizer step to the end of the next. Times are milliseconds if not said."""

    index: int
    """Counted from the first optimizer step that the process took (0, which has no known beginning)."""
    measured: bool
    begin_ns: int
    """By the training thread's clock."""
    end_ns: int
    step_ms: float
    """On the device's timeline where there is one."""
    phases_ms: dict[Lane, float]
    spans: list[tuple[Lane, float, float]]
    stall_ms: dict[Cause, float] | None
    """Idle time of the stream that each cause's waits made; None without a stream."""
    hidden_ms: float | None
    """What the training thread waited beyond that."""
    waits_ms: dict[Cause, float]
    """What the training thread waited, by its clock."""
    overhead_ms: float
    """The hooks' own time, as far as it was charged."""
    tokens: int | None = None
    loss: float | None = None
    """Mean over its backward passes, or of what the script logged; None: not known. May be not a number."""
    loss_source: str | None = None
    runtime: dict[str, Any] | None = None


@dataclass(slots=True)  # frozen would be three times as slow to make
class _Point:
    ns: int
    mark: Any


@dataclass(slots=True)
class _Step:
    index: int
    begin: _Point
    end: _Point | None = None
    phases: list[tuple[Phase, _Point, _Point]] = field(default_factory=list)
    waits: list[tuple[Cause, _Point, _Point]] = field(default_factory=list)
    overhead_ns: int = 0


@dataclass(slots=True)
class _Open:
    """What is entered now: only the outermost counts, the others are only counted."""

    name: Any = None
    begin: _Point | None = None
    depth: int = 0


class Runtime(Protocol):
    """Adds what the training's optimizer counted to a row."""

    def end_step(self, index: int) -> None:
        """A step has ended whose row follows, perhaps when the optimizer is no more."""

    def __call__(self, row: StepRow, *, last: bool) -> None:
        """Fill the row in place."""


class Recorder:
    """Records one training thread's steps. Never synchronises the device.

    What happens before the first `end_step()` belongs to no step. Whoever calls these methods from a hook charges the
    time of the whole hook.

    Args:
        emit: called with a step once its marks are passed, at the earliest `depth` steps later.
        depth: steps between a step and its row.
        warmup: steps before the first that is measured.
        steps: how many are measured; None: all.
    """

    def __init__(
        self,
        backend: EventBackend,
        emit: Callable[[StepRow], None],
        *,
        clock_ns: Callable[[], int] = time.monotonic_ns,
        depth: int = 2,
        warmup: int = 0,
        steps: int | None = None,
    ) -> None:
        self._backend = backend
        self._emit = emit
        self._clock_ns = clock_ns
        self._depth = depth
        self.first_index = max(1, warmup)
        self.last_index = math.inf if steps is None else self.first_index + steps - 1
        self._step: _Step | None = None
        self._closed: deque[_Step] = deque()
        self._phase = _Open()
        self._wait = _Open()

    @property
    def index(self) -> int:
        """Of the open step; 0 before the first `end_step()`."""
        return 0 if self._step is None else self._step.index

    @property
    def waits(self) -> bool:
        """Whether a wait is entered; any thread may ask."""
        return self._wait.depth > 0

    def charge(self, begin_ns: int) -> None:
        """Count the time since then as the hooks' own."""
        if self._step is not None:
            self._step.overhead_ns += self._clock_ns() - begin_ns

    def enter(self, name: Phase) -> None:
        """Begin a phase; inside another one this counts as part of that. "data" is a wait too."""
        phase = self._phase
        phase.depth += 1
        if phase.depth == 1:
            phase.name, phase.begin = name, self._point()
            if name == "data":
                self._begin_wait("data", phase.begin)

    def leave(self, name: Phase) -> None:
        phase = self._phase
        phase.depth = max(0, phase.depth - 1)
        if phase.depth == 0 and phase.begin is not None:
            point = self._point()
            if self._step is not None:
                self._step.phases.append((phase.name, phase.begin, point))
            if phase.name == "data":
                self._end_wait(point)
            phase.begin = None

    def enter_wait(self, cause: Cause) -> None:
        """Begin a wait; inside another one this counts as part of that.

        Device time between its marks is stall, wall time beyond it is hidden.
        """
        self._begin_wait(cause, self._point() if self._wait.depth == 0 else None)

    def leave_wait(self) -> None:
        """End a wait; without its `enter_wait` this does nothing."""
        self._end_wait(self._point() if self._wait.depth == 1 else None)

    def end_step(self) -> None:
        point = self._point()
        if self._step is not None:
            self._split(self._step, point)
            self._step.end = point
            self._closed.append(self._step)
        self._step = _Step(self.index + 1, point)
        self._emit_passed(self._depth)

    def drain(self) -> None:
        """Emit what is left, waiting up to two seconds for the device; for the end of a profile only."""
        for _ in range(_DRAIN_POLLS):
            self._emit_passed(0)
            if not self._closed:
                break
            time.sleep(_DRAIN_POLL_S)

    def forget(self) -> None:
        """Drop the open step and whatever is entered, without a row."""
        self._phase, self._wait = _Open(), _Open()
        if self._step is not None:
            self._step = _Step(self._step.index, self._point())

    def _point(self) -> _Point:
        return _Point(self._clock_ns(), self._backend.mark())

    def _begin_wait(self, cause: Cause, point: _Point | None) -> None:
        self._wait.depth += 1
        if self._wait.depth == 1:
            self._wait.name, self._wait.begin = cause, point

    def _end_wait(self, point: _Point | None) -> None:
        wait = self._wait
        wait.depth = max(0, wait.depth - 1)
        if wait.depth == 0 and wait.begin is not None and point is not None:
            if self._step is not None:
                self._step.waits.append((wait.name, wait.begin, point))
            wait.begin = None

    def _split(self, step: _Step, point: _Point) -> None:
        for open_, closed in ((self._phase, step.phases), (self._wait, step.waits)):
            if open_.begin is not None:
                closed.append((open_.name, open_.begin, point))
                open_.begin = point

    def _emit_passed(self, depth: int) -> None:
        while len(self._closed) > depth and self._is_passed(self._closed[0]):
            self._emit(self._resolve(self._closed.popleft()))

    def _is_passed(self, step: _Step) -> bool:
        points = [step.end, step.begin, *(point for _, *ends in (*step.phases, *step.waits) for point in ends)]
        return all(point is not None and self._backend.passed(point.mark) for point in points)

    def _resolve(self, step: _Step) -> StepRow:
        assert step.end is not None
        step_ms = max(0.0, self._elapsed_ms(step.begin, step.end))
        spans = self._spans(step, step_ms)
        phases_ms = dict.fromkeys(LANES, 0.0)
        for lane, begin, end in spans:
            phases_ms[lane] += end - begin
        stall: dict[Cause, float] = {}
        waits: dict[Cause, float] = {}
        hidden = 0.0
        for cause, first, last in step.waits:
            waited, stalled = (last.ns - first.ns) / 1e6, max(0.0, self._elapsed_ms(first, last))
            waits[cause] = waits.get(cause, 0.0) + waited
            stall[cause] = stall.get(cause, 0.0) + stalled
            hidden += max(0.0, waited - stalled)  # a stall that the thread did not wait for hides no other wait
        streams = self._backend.has_stream
        return StepRow(
            index=step.index,
            measured=self.first_index <= step.index <= self.last_index,
            begin_ns=step.begin.ns,
            end_ns=step.end.ns,
            step_ms=round(step_ms, _DIGITS),
            phases_ms={lane: round(value, _DIGITS) for lane, value in phases_ms.items()},
            spans=spans,
            stall_ms={cause: round(value, _DIGITS) for cause, value in stall.items()} if streams else None,
            hidden_ms=round(hidden, _DIGITS) if streams else None,
            waits_ms={cause: round(value, _DIGITS) for cause, value in waits.items()},
            overhead_ms=step.overhead_ns / 1e6,
        )

    def _spans(self, step: _Step, step_ms: float) -> list[tuple[Lane, float, float]]:
        """The phases and the gaps between them: a gap is forward where backward follows, else other."""
        spans: list[tuple[Lane, float, float]] = []
        reached = 0.0
        for name, first, last in step.phases:
            # Marks of one stream are in order but for their rounding.
            begin = min(step_ms, max(reached, self._elapsed_ms(step.begin, first)))
            end = min(step_ms, max(begin, self._elapsed_ms(step.begin, last)))
            _append(spans, "forward" if name == "backward" else "other", reached, begin)
            _append(spans, name, begin, end)
            reached = end
        _append(spans, "other", reached, step_ms)
        return spans

    def _elapsed_ms(self, begin: _Point, end: _Point) -> float:
        return self._backend.elapsed_ms(begin.mark, end.mark)


def _append(spans: list[tuple[Lane, float, float]], lane: Lane, begin: float, end: float) -> None:
    begin, end = round(begin, _DIGITS), round(end, _DIGITS)
    if end > begin:
        spans.append((lane, begin, end))
