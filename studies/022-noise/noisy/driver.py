"""Carries out a search's requests in simulated time: changes of knobs, discarded windows, steps while it thinks."""

from __future__ import annotations

from dataclasses import dataclass, field

from noisy.scenes import Scene
from zftune.emulation.noise import Noise, NoisyStep, NoisySteps
from zftune.tuner.search import Search, SearchOptions
from zftune.tuner.space import Setting
from zftune.tuner.states import Outcome, Request, UnmeasuredSteps

THINKING, LATE = 1, 2
"""Steps of the incumbent until the next request is there, and steps of a setting before its end is seen."""


@dataclass
class Course:
    """What became of one search."""

    incumbents: list[tuple[int, float]] = field(default_factory=list)
    """After which step, and the true time of what runs as the best from there on, ms."""
    adoptions: list[tuple[int, float]] = field(default_factory=list)
    """Step and true gain over what was replaced."""
    stated: float = 0.0
    """The gain that the search states at its end."""
    error: float = 0.0
    restarts: int = 0
    lost_steps: float = 0.0
    """By settings that are slower than the best so far, and by changes of knobs."""
    changes: int = 0

    def at(self, step: int) -> float:
        """True time of the best so far after a step, ms."""
        return [ms for after, ms in self.incumbents if after <= step][-1]


class Machine:
    """A training whose knobs change; `change_steps` is what a change costs, in steps of the start."""

    def __init__(self, scene: Scene, noise: Noise, seed: int, change_steps: float = 0.5) -> None:
        self.scene, self.applied = scene, scene.start
        self.steps = NoisySteps(noise, seed)
        self.taken = 0
        self.course = Course()
        self._place = self._since = 0
        self._change_steps, self._extra_ms = change_steps, 0.0
        self._best_ms = scene.mean(scene.start)
        self.adopted(scene.start)

    def step(self) -> NoisyStep:
        """Train a step."""
        window = self.scene.times[self.applied]
        found = self.steps.step(window[self._place % len(window)], len(window))
        self._place = (self._place + 1) % len(window)
        self._since += 1
        self.taken += 1
        self.course.lost_steps += max(0.0, self.scene.mean(self.applied) / self._best_ms - 1)
        extra_ms, self._extra_ms = self._extra_ms, 0.0
        return NoisyStep(found.ms + extra_ms, found.taken_ms, found.moves)

    def settle(self) -> float:
        """Train to the end of a window of the setting that runs, at least one of which is over then: seconds."""
        seconds, window = 0.0, len(self.scene.times[self.applied])
        while self._place or self._since < window:
            seconds += self.step().ms / 1e3
        return seconds

    def change(self, setting: Setting) -> None:
        """The next step begins a window, and costs what moving state costs."""
        if setting == self.applied:
            return
        self.applied, self._place, self._since = setting, 0, 0
        self.steps.close_window()
        self.course.changes += 1
        self.course.lost_steps += self._change_steps
        self._extra_ms = self._change_steps * self._best_ms

    def adopted(self, setting: Setting) -> None:
        """A setting is the best so far."""
        self._best_ms = self.scene.mean(setting)
        self.course.incumbents.append((self.taken, self._best_ms))


def measure(machine: Machine, request: Request, between: UnmeasuredSteps, late: bool) -> Outcome:
    """Carry out a request; `between` is what was counted since the one before."""
    seconds, late_s, late_steps = between.seconds, between.late_s, between.late_steps
    if request.setting != machine.applied:
        machine.change(request.setting)
        changing = machine.step().ms / 1e3  # the step that closes the window
        machine.steps.close_window()
        seconds, late_s, late_steps = (
            (seconds, late_s + changing, late_steps + 1) if late else (seconds + changing, late_s, late_steps)
        )
    else:
        seconds += machine.settle()
    discarded = [machine.step().ms for _ in range(request.discard)]
    steps: list[NoisyStep] = []
    while len(steps) < request.steps:
        steps.append(machine.step())
        if request.ends_early(discarded, [one.ms for one in steps]):
            break
    return Outcome(
        "measured",
        tuple(one.ms for one in steps),
        tuple(discarded),
        moves=tuple(one.moves for one in steps),
        taken_ms=tuple(one.taken_ms for one in steps),
        between=UnmeasuredSteps(seconds, late_s, late_steps),
    )


def search_once(
    scene: Scene,
    noise: Noise,
    seed: int,
    most_steps: int,
    options: SearchOptions | None = None,
    change_steps: float = 0.5,
) -> Course:
    """One search; it goes on until the training has taken `most_steps`."""
    machine = Machine(scene, noise, seed, change_steps)
    options = options or SearchOptions(seed=seed, hold=True, sampler="none")
    search = Search(scene.space, scene.start, scene.forecast, scene.planned, options)
    course, incumbent = machine.course, scene.start
    between = UnmeasuredSteps()
    while machine.taken < most_steps:
        request = search.next()
        if request is None:
            break
        search.tell(measure(machine, request, between, late=request.setting != incumbent))
        course.restarts += sum(note.kind == "reopen" for note in search.notes)
        search.notes[:] = [note for note in search.notes if note.kind == "start"]
        now = search.book.incumbent.setting
        if now != incumbent:
            course.adoptions.append((machine.taken, 1 - scene.mean(now) / scene.mean(incumbent)))
            machine.adopted(now)
        incumbent = now
        between = think(machine, incumbent)
    if search.book.gain is not None:
        course.stated, course.error = search.book.gain.share, search.book.gain.error
    return course


def think(machine: Machine, incumbent: Setting) -> UnmeasuredSteps:
    """A setting runs on until its end is seen, then the incumbent until there is an answer."""
    late_s, late = 0.0, 0
    if machine.applied != incumbent:
        for _ in range(LATE):
            late_s += machine.step().ms / 1e3
            late += 1
        machine.change(incumbent)
    seconds = sum(machine.step().ms for _ in range(THINKING)) / 1e3
    return UnmeasuredSteps(seconds, late_s, late)
