"""A scripted GPU and training thread: kernels are queued, waits have a known length and cause, and time is a number."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field

from zftune.agent.recorder import Cause, Phase, Recorder, StepRow

LAUNCH_MS = 0.01
HOOK_MS = 0.004  # what recording an event costs the training thread
CAUSES = ("host", "h2d", "d2h", "select", "comm", "data")


@dataclass(slots=True)
class ScriptedGpu:
    """An in-order compute stream behind a training thread, both on one clock in milliseconds.

    It is the recorder's event backend. What the waits cost is worked out apart from any event, from the intervals in
    which the stream has nothing to do.
    """

    now_ms: float = 1.0
    """The training thread's clock."""
    free_ms: float = 0.0
    """When the stream will be through with what it has."""
    busy: list[tuple[float, float]] = field(default_factory=list)
    waits: list[tuple[str, float, float]] = field(default_factory=list)
    """Cause, and the interval in which the stream could go no further because of it."""
    has_stream: bool = True
    source: str = "scripted"

    def mark(self) -> float:
        self.now_ms += HOOK_MS
        return max(self.now_ms, self.free_ms)

    def passed(self, mark: float) -> bool:
        return self.now_ms >= mark

    def elapsed_ms(self, begin: float, end: float) -> float:
        return end - begin

    def clock_ns(self) -> int:
        return round(1e6 * self.now_ms)

    def launch(self, milliseconds: float) -> None:
        """Queue a kernel."""
        self.now_ms += LAUNCH_MS
        begin = max(self.now_ms, self.free_ms)
        self.free_ms = begin + milliseconds
        self.busy.append((begin, self.free_ms))

    def wait_for(self, mark: float) -> None:
        """The training thread waits until the stream has got there: it runs ahead, but not without bound."""
        self.now_ms = max(self.now_ms, mark)

    def synchronize(self) -> None:
        self.wait_for(self.free_ms)

    def block(self, cause: str, milliseconds: float) -> None:
        """The training thread waits, and so can give the stream nothing."""
        begin = self.now_ms
        self.now_ms += milliseconds
        self.waits.append((cause, begin, self.now_ms))

    def join(self, cause: str, milliseconds: float) -> None:
        """The stream waits for another one that takes so long from now; the training thread goes on."""
        until = self.now_ms + milliseconds
        self.waits.append((cause, self.now_ms, until))
        self.free_ms = max(self.free_ms, until)

    def stalls_ms(self) -> dict[str, float]:
        """The truth: for each cause, how long the stream was idle within its waits."""
        found = dict.fromkeys(CAUSES, 0.0)
        taken = list(self.busy)
        for cause, begin, end in self.waits:
            found[cause] += end - begin - _covered(begin, end, taken)
            taken.append((begin, end))  # an idle moment has one cause: the wait that came first
        return found


def _covered(begin: float, end: float, intervals: Sequence[tuple[float, float]]) -> float:
    """How much of an interval others cover together."""
    covered, reached = 0.0, begin
    for first, last in sorted(intervals):
        if last > reached and first < end:
            covered += min(last, end) - max(first, reached)
            reached = min(last, end)
    return covered


@dataclass(frozen=True, slots=True)
class Waiting:
    """One wait of every step."""

    cause: str
    milliseconds: float
    by_stream: bool = False
    """The stream waits for another one; else the training thread does."""
    synchronized: bool = True
    """The stream has nothing left when it begins; else it works through its queue meanwhile."""


@dataclass(frozen=True, slots=True)
class Scenario:
    """What a step is made of."""

    name: str
    kind: str
    waits: tuple[Waiting, ...]
    jitter: float = 0.0
    """Sigma of the lognormal factor on every duration."""
    kernels: int = 12
    kernel_ms: float = 5.0


@dataclass(frozen=True, slots=True)
class Outcome:
    """Milliseconds per step."""

    step_ms: float
    truth_ms: dict[str, float]
    found_ms: dict[str, float]
    phases_off_ms: float
    """Largest difference of a step's phases from the step."""

    def errors(self) -> dict[str, float]:
        """By cause, as a share of the step."""
        return {cause: (self.found_ms[cause] - self.truth_ms[cause]) / self.step_ms for cause in CAUSES}


def play(scenario: Scenario, steps: int, seed: int) -> Outcome:
    """Run a scenario under the agent's recorder."""
    gpu, rows = ScriptedGpu(), list[StepRow]()
    recorder = Recorder(gpu, rows.append, clock_ns=gpu.clock_ns)
    chance = random.Random(seed)

    def about(milliseconds: float) -> float:
        return milliseconds * chance.lognormvariate(0, scenario.jitter)

    gpu.launch(scenario.kernels * scenario.kernel_ms)  # the step before
    _synchronize_for_data(scenario, gpu)
    recorder.end_step()  # the first step begins here
    for _ in range(steps):
        before_ms = gpu.free_ms
        _step(scenario, gpu, recorder, about)
        gpu.wait_for(before_ms)
    gpu.synchronize()
    recorder.drain()
    rows = rows[-steps:]
    found = {cause: sum((row.stall_ms or {}).get(cause, 0.0) for row in rows) / steps for cause in CAUSES}
    truth = {cause: total / steps for cause, total in gpu.stalls_ms().items()}
    off = max(abs(sum(row.phases_ms.values()) - row.step_ms) for row in rows)
    return Outcome(sum(row.step_ms for row in rows) / steps, truth, found, off)


@contextmanager
def _phase(recorder: Recorder, name: Phase) -> Iterator[None]:
    """A phase; "data" is a wait too."""
    recorder.enter(name)
    try:
        yield
    finally:
        recorder.leave(name)


@contextmanager
def _waiting(recorder: Recorder, cause: Cause) -> Iterator[None]:
    recorder.enter_wait(cause)
    try:
        yield
    finally:
        recorder.leave_wait()


def _step(scenario: Scenario, gpu: ScriptedGpu, recorder: Recorder, about: Callable[[float], float]) -> None:
    with _phase(recorder, "data"):
        for wait in scenario.waits:
            if wait.cause == "data":
                _wait(wait, gpu, recorder, about, inside=True)
    for _ in range(scenario.kernels // 3):
        gpu.launch(about(scenario.kernel_ms))
    with _phase(recorder, "backward"):
        for _ in range(scenario.kernels - scenario.kernels // 3):
            gpu.launch(about(scenario.kernel_ms))
    with _phase(recorder, "optimizer"):
        for wait in scenario.waits:
            if wait.cause != "data":
                _wait(wait, gpu, recorder, about, inside=False)
        gpu.launch(about(1.0))
    _synchronize_for_data(scenario, gpu)
    recorder.end_step()


def _synchronize_for_data(scenario: Scenario, gpu: ScriptedGpu) -> None:
    """A script that reads its loss at every step asks for the next batch with an empty queue."""
    if any(wait.cause == "data" and wait.synchronized for wait in scenario.waits):
        gpu.synchronize()


def _wait(
    wait: Waiting, gpu: ScriptedGpu, recorder: Recorder, about: Callable[[float], float], *, inside: bool
) -> None:
    if wait.synchronized and not inside:
        gpu.synchronize()
    with nullcontext() if inside else _waiting(recorder, wait.cause):
        (gpu.join if wait.by_stream else gpu.block)(wait.cause, about(wait.milliseconds))
