"""The recorder on a scripted clock and a scripted stream: what it finds is worked out by hand."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import pytest

from zenflow.device import CpuDevice
from zftune.agent.recorder import Cause, DeviceEvents, EventBackend, Phase, Recorder, StepRow, WallClock


@contextlib.contextmanager
def phase(recorder: Recorder, name: Phase) -> Iterator[None]:
    """A phase; "data" is a wait too."""
    recorder.enter(name)
    try:
        yield
    finally:
        recorder.leave(name)


@contextlib.contextmanager
def waiting(recorder: Recorder, cause: Cause) -> Iterator[None]:
    recorder.enter_wait(cause)
    try:
        yield
    finally:
        recorder.leave_wait()


@dataclass
class Script:
    """A training thread's clock, and a stream that may lie behind it."""

    ms: float = 0.0
    behind_ms: float = 0.0
    """How much work the stream still has."""
    reached: bool = True
    """Whether the stream passes marks at all."""
    has_stream: bool = True
    source: str = "script"
    marks: int = 0

    def clock_ns(self) -> int:
        return round(self.ms * 1e6)

    def mark(self) -> float:
        self.marks += 1
        return self.ms + self.behind_ms

    def passed(self, mark: float) -> bool:
        return self.reached and mark <= self.ms

    def elapsed_ms(self, begin: float, end: float) -> float:
        return end - begin

    def go(self, ms: float) -> None:
        self.ms += ms
        self.behind_ms = max(0.0, self.behind_ms - ms)

    def launch(self, ms: float) -> None:
        self.behind_ms += ms


@dataclass
class Run:
    script: Script = field(default_factory=Script)
    rows: list[StepRow] = field(default_factory=list)
    depth: int = 0
    warmup: int = 0
    steps: int | None = None
    backend: EventBackend | None = None
    recorder: Recorder = field(init=False)

    def __post_init__(self) -> None:
        self.recorder = Recorder(
            self.backend or self.script,
            self.rows.append,
            clock_ns=self.script.clock_ns,
            depth=self.depth,
            warmup=self.warmup,
            steps=self.steps,
        )
        self.recorder.end_step()

    def phase(self, name: str, ms: float) -> None:
        with phase(self.recorder, name):  # type: ignore[arg-type]
            self.script.go(ms)

    def step(self) -> None:
        self.phase("data", 1)
        self.script.go(2)
        self.phase("backward", 3)
        self.script.go(4)
        self.phase("optimizer", 5)
        self.script.go(6)
        self.recorder.end_step()


def wall(script: Script) -> WallClock:
    return WallClock(script.clock_ns)


def test_phases_fill_the_step() -> None:
    run = Run()
    run.step()
    (row,) = run.rows
    assert (row.index, row.measured, row.begin_ns, row.end_ns, row.step_ms) == (1, True, 0, 21_000_000, 21)
    assert row.phases_ms == {"data": 1, "forward": 2, "backward": 3, "optimizer": 5, "other": 10}
    assert row.spans == [
        ("data", 0, 1),
        ("forward", 1, 3),
        ("backward", 3, 6),
        ("other", 6, 10),
        ("optimizer", 10, 15),
        ("other", 15, 21),
    ]


def test_on_the_wall_clock_there_is_no_stall() -> None:
    script = Script()
    run = Run(script, backend=wall(script))
    run.step()
    (row,) = run.rows
    assert (row.stall_ms, row.hidden_ms) == (None, None)
    assert row.waits_ms == {"data": 1}
    assert row.phases_ms["forward"] == 2


def test_a_gap_is_forward_only_where_backward_follows() -> None:
    run = Run()
    run.script.go(1)
    run.phase("backward", 1)  # no data before it: forward began with the step
    run.phase("data", 1)
    run.script.go(2)
    run.phase("backward", 1)
    run.script.go(4)
    run.phase("optimizer", 1)
    run.phase("data", 1)  # of a validation that nothing follows
    run.script.go(8)
    run.recorder.end_step()
    assert run.rows[0].phases_ms == {"data": 2, "forward": 3, "backward": 2, "optimizer": 1, "other": 12}


@pytest.mark.parametrize("inner", ["data", "backward", "optimizer"])
def test_only_the_outermost_phase_counts(inner: str) -> None:
    run = Run()
    with phase(run.recorder, "backward"):
        run.script.go(1)
        run.phase(inner, 2)
        run.script.go(4)
    run.recorder.end_step()
    assert run.rows[0].phases_ms == {"data": 0, "forward": 0, "backward": 7, "optimizer": 0, "other": 0}
    assert run.rows[0].waits_ms == {}


def test_what_is_entered_at_a_steps_end_goes_on_in_the_next() -> None:
    run = Run()
    with phase(run.recorder, "optimizer"), waiting(run.recorder, "host"):
        run.script.go(3)
        run.recorder.end_step()
        run.script.go(4)
    run.recorder.end_step()
    assert [(row.phases_ms["optimizer"], row.waits_ms["host"]) for row in run.rows] == [(3, 3), (4, 4)]


def test_a_phase_that_raises_is_left() -> None:
    run = Run()
    with contextlib.suppress(ValueError), phase(run.recorder, "backward"):
        run.script.go(2)
        raise ValueError
    run.script.go(1)
    run.recorder.end_step()
    assert run.rows[0].phases_ms["backward"] == 2


def test_leaving_what_was_not_entered_does_nothing() -> None:
    run = Run()
    run.recorder.leave("backward")
    run.recorder.leave_wait()
    run.step()
    assert run.rows[0].phases_ms["backward"] == 3


def test_what_comes_before_the_first_step_is_in_none() -> None:
    script, rows = Script(), list[StepRow]()
    recorder = Recorder(script, rows.append, clock_ns=script.clock_ns, depth=0)
    with phase(recorder, "data"):
        script.go(5)
    with phase(recorder, "optimizer"):
        script.go(5)
        recorder.end_step()
        script.go(1)
    recorder.end_step()
    (row,) = rows
    assert (row.step_ms, row.phases_ms["optimizer"], row.waits_ms) == (1, 1, {})


@pytest.mark.parametrize(
    ("queued_ms", "wait_ms", "stall_ms", "hidden_ms"), [(0, 10, 10, 0), (4, 10, 6, 4), (10, 10, 0, 10), (30, 10, 0, 10)]
)
def test_stall_is_what_the_streams_queue_does_not_hide(
    queued_ms: float, wait_ms: float, stall_ms: float, hidden_ms: float
) -> None:
    run = Run()
    run.script.launch(queued_ms)
    with waiting(run.recorder, "host"):
        run.script.go(wait_ms)
    run.script.go(100)
    run.recorder.end_step()
    (row,) = run.rows
    assert row.stall_ms == {"host": stall_ms}
    assert row.hidden_ms == hidden_ms
    assert row.waits_ms == {"host": wait_ms}


def test_a_wait_of_the_stream_alone_is_stall_that_nobody_waits_for() -> None:
    run = Run()
    with waiting(run.recorder, "comm"):
        run.script.launch(7)  # stands for waiting for another stream
    run.script.go(20)
    run.recorder.end_step()
    (row,) = run.rows
    assert (row.stall_ms, row.waits_ms, row.hidden_ms) == ({"comm": 7}, {"comm": 0}, 0)


def test_a_stall_that_nobody_waits_for_hides_no_other_wait() -> None:
    run = Run()
    run.script.launch(10)
    run.phase("data", 10)  # the stream is busy meanwhile
    with waiting(run.recorder, "comm"):
        run.script.launch(10)  # the stream waits, the thread does not
    run.script.go(40)
    run.recorder.end_step()
    (row,) = run.rows
    assert (row.stall_ms, row.hidden_ms) == ({"data": 0, "comm": 10}, 10)


def test_nested_waits_count_once_for_the_outermost() -> None:
    run = Run()
    for outer, inner in (("host", "comm"), ("comm", "comm")):
        with waiting(run.recorder, outer):  # type: ignore[arg-type]
            run.script.go(1)
            with waiting(run.recorder, inner):  # type: ignore[arg-type]
                run.script.go(2)
            run.script.go(4)
    with phase(run.recorder, "data"), waiting(run.recorder, "comm"):
        run.script.go(8)
    run.recorder.end_step()
    assert run.rows[0].waits_ms == {"host": 7, "comm": 7, "data": 8}


def test_rows_come_when_their_marks_are_passed_and_not_before() -> None:
    run = Run(depth=2)
    seen: list[int] = []
    for _ in range(5):
        run.step()
        seen.append(len(run.rows))
    assert seen == [0, 0, 1, 2, 3]
    run.script.reached = False
    run.step()
    run.step()
    assert len(run.rows) == 3
    run.script.reached = True
    run.step()
    assert [row.index for row in run.rows] == [1, 2, 3, 4, 5, 6]
    run.recorder.drain()
    assert [row.index for row in run.rows] == list(range(1, 9))


def test_a_mark_that_is_behind_the_steps_end_holds_the_row_back() -> None:
    """Marks may be on several streams: the last one passed says nothing of the others."""

    class TwoStreams(Script):
        def passed(self, mark: float) -> bool:
            return mark != 2.0 or super().passed(mark + 1000)

    run = Run(TwoStreams())
    run.script.go(2)
    with waiting(run.recorder, "h2d"):
        run.script.go(1)
    run.recorder.end_step()
    assert run.rows == []


def test_draining_gives_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("zftune.agent.recorder._DRAIN_POLLS", 2)
    run = Run(depth=2)
    run.step()
    run.script.reached = False
    run.recorder.drain()
    assert run.rows == []


def test_which_steps_are_measured() -> None:
    run = Run(warmup=2, steps=3)
    for _ in range(6):
        run.step()
    assert [row.measured for row in run.rows] == [False, True, True, True, False, False]
    assert (run.recorder.first_index, run.recorder.last_index) == (2, 4)
    assert Recorder(run.script, run.rows.append, warmup=0, steps=3).last_index == 3


def test_forgetting_begins_the_step_again() -> None:
    run = Run()
    run.recorder.enter("optimizer")
    run.recorder.enter_wait("host")
    run.script.go(50)
    run.recorder.forget()
    run.step()
    (row,) = run.rows
    assert (row.index, row.step_ms, row.waits_ms) == (1, 21, {"data": 1})


def test_overhead_is_what_was_charged_in_the_step() -> None:
    run = Run()
    for milliseconds in (0.5, 2):
        began = run.script.clock_ns()
        run.script.go(milliseconds)
        run.recorder.charge(began)
    run.step()
    run.step()
    assert [row.overhead_ms for row in run.rows] == [2.5, 0]


def test_a_step_takes_few_marks() -> None:
    run = Run()
    before = run.script.marks
    run.step()
    assert run.script.marks - before == 7


@pytest.mark.parametrize("make", [wall, lambda script: script])
def test_rounding_keeps_the_sum(make: Callable[[Script], EventBackend]) -> None:
    script = Script(has_stream=True)
    run = Run(script, backend=make(script))
    causes: tuple[Cause, ...] = ("host", "h2d", "d2h", "select", "comm")
    for number in range(300):
        with phase(run.recorder, "backward" if number % 3 else "data"), waiting(run.recorder, causes[number % 5]):
            script.go(1 / 3 + number * 1e-5)
        script.go(1 / 7)
    run.recorder.end_step()
    (row,) = run.rows
    assert sum(row.phases_ms.values()) == pytest.approx(row.step_ms, abs=1e-5)
    assert row.spans[0][1] == 0
    assert row.spans[-1][2] == row.step_ms


def test_device_events_are_the_devices_own() -> None:
    device = CpuDevice()
    events, began_s = DeviceEvents(device), device.clock.now()
    first, second = events.mark(), events.mark()
    took_ms = 1000 * (device.clock.now() - began_s)
    assert events.passed(second)
    assert 0 <= events.elapsed_ms(first, second) <= took_ms
    assert events.elapsed_ms(second, first) <= 0
    assert events.elapsed_ms(1.0, 1.5) == 500
