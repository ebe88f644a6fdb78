"""What a search asks for, what it is told, and all that it knows. Plain data."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from zftune.store.types import TrialState
from zftune.tuner.evidence import BlockNoise, Gain
from zftune.tuner.pace import Pace
from zftune.tuner.space import Forecast, Setting

Role = Literal["start", "explore", "a1", "b", "a2", "hold"]
"""What a measurement is for: the first blocks of the search, a challenger's first look, the blocks of a unit
(incumbent, challenger, incumbent), or none: the incumbent runs."""
OF_INCUMBENT: tuple[Role, ...] = ("start", "a1", "a2", "hold")
Sampler = Literal["belief", "gp", "tpe", "random", "none"]
AT_S = "at_s"
"""In the details of a remark that is written down later: what the process that trains had counted when it was made."""
LEARNING_RATE = "learning_rate"
UNSEARCHED = "unsearched"
"""In a run's settings: knobs that no search changes, where they are not the defaults."""
TRAINED_ON = "trained_on"
"""In the details of a remark: the tuning ended, and the training did not."""
FAR_SLOWER = 3.0
"""Times the incumbent's: a block that is so slow is ended early, and counts."""
LEAST_STEPS = 8
_NEWEST = 5


@dataclass(frozen=True, slots=True)
class BarredSetting:
    """One that is not tried again: a training did not survive it, or somebody rolled it back."""

    setting: Setting
    kind: Literal["crash", "rollback"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchOptions:
    """How a search proceeds."""

    seed: int = 0
    sampler: Sampler = "belief"
    most_measurements: int | None = None
    """Blocks at most; None: no limit but what exploring may cost."""
    cost_share: float = 0.01
    """Of the elapsed time that exploring may cost, if that is more than `cost_floor_s`."""
    cost_floor_s: float = 108.0
    hold: bool = False
    """Where nothing is worth a unit or can be paid now: rest, rather than stop."""
    watch: bool = False
    """Where the limit on measurements is reached: rest, too, as the daemon does, whose commands are still taken."""
    thinking_s: float | None = None
    """In simulated time, how long a thought takes; None: as long as it really did."""
    barred: tuple[BarredSetting, ...] = ()


@dataclass(frozen=True, slots=True)
class Request:
    """Train so many steps under a setting, whole windows, after `discard` steps that do not count."""

    setting: Setting
    role: Role
    trial: int
    discard: int
    steps: int
    block: int = 0
    """Steps of each block; 0: all are one."""
    slow_ms: float | None = None
    """A first block whose steps take more than this on average has no second one."""
    allowance_s: float | None = None
    """Most time beyond the incumbent's, discarded steps included; None: no limit."""
    incumbent_step_ms: float | None = None

    def ends_early(self, discarded_ms: Sequence[float], steps_ms: Sequence[float]) -> bool:
        """Whether the steps so far are enough: they are far slower than the incumbent's."""
        usual_ms, done = self.incumbent_step_ms, len(steps_ms)
        if usual_ms is None or done < LEAST_STEPS or done % self.setting.update_interval:
            return False
        mean_ms = statistics.fmean(steps_ms)
        if mean_ms > FAR_SLOWER * usual_ms or (done == self.block and mean_ms > (self.slow_ms or mean_ms)):
            return True
        excess_s = (sum(discarded_ms) + sum(steps_ms) - (len(discarded_ms) + done) * usual_ms) / 1e3
        return self.allowance_s is not None and excess_s > self.allowance_s


@dataclass(frozen=True, slots=True)
class UnmeasuredSteps:
    """Steps that belong to no measurement: the next one is being chosen, or knobs change.

    `seconds` are of those under the incumbent; the others are another setting's, with the step that changed to it.
    """

    seconds: float = 0.0
    late_s: float = 0.0
    late_steps: int = 0


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of a request."""

    status: Literal["measured", "void", "crashed"]
    steps_ms: tuple[float, ...] = ()
    discarded_ms: tuple[float, ...] = ()
    tokens: int = 1
    moves: tuple[bool, ...] = ()
    """Which steps that count selected or exchanged columns; (): none is known to."""
    taken_ms: tuple[float, ...] = ()
    """What other processes took from the training thread in each step that counts; (): not known."""
    device_bytes: int | None = None
    reason: str = ""
    between: UnmeasuredSteps = UnmeasuredSteps()
    """What came before its first step, since the outcome before."""
    called_off: bool = False
    """Void because it was no longer wanted, such as in a pause: that does not speak against measuring it again."""
    pace: Pace | None = None
    ranks_ms: tuple[float, ...] = ()
    """Step of each of several ranks without its waits in collectives; (): not known."""
    movement_percent: float | None = None
    """How far a step moves the deferred weights, at the schedule's highest learning rate; None: not measured."""
    movement_rate: float | None = None
    """That rate, or the current one if the schedule is past it; None: not known, or one for each of several groups."""

    @property
    def seconds(self) -> float:
        return (sum(self.steps_ms) + sum(self.discarded_ms)) / 1e3

    @property
    def step_count(self) -> int:
        return len(self.steps_ms) + len(self.discarded_ms)

    @property
    def own_ms(self) -> tuple[float, ...]:
        """Steps without what other processes took; (): not known."""
        return tuple(ms - taken for ms, taken in zip(self.steps_ms, self.taken_ms, strict=False))


@dataclass(frozen=True, slots=True)
class Remark:
    """A finding beside the search, and when it was made; `at_s` is by the count of the process that trains."""

    reason: str
    at_s: float
    at_unix_s: float
    step: int = 0


@dataclass(slots=True)
class ExplorationCost:
    """Time of challengers beyond the incumbent's for the same steps, changes of knobs included, and its limit: a share
    of the elapsed time.
    """

    share: float
    floor_s: float
    spent_s: float = 0.0
    elapsed_s: float = 0.0
    changes_s: list[float] = field(default_factory=list)

    def add(self, seconds: float, steps: int, incumbent_step_s: float | None) -> None:
        """Count time of steps; `incumbent_step_s` None: the incumbent itself ran."""
        self.elapsed_s += seconds
        if incumbent_step_s is not None:
            self.spent_s += max(0.0, seconds - steps * incumbent_step_s)

    def changed(self, seconds: float, steps: int, incumbent_step_s: float) -> None:
        """Learn what a change of knobs and back costs; arguments as of `add`."""
        self.changes_s = [*self.changes_s[1 - _NEWEST :], max(0.0, seconds - steps * incumbent_step_s)]

    @property
    def change_s(self) -> float:
        """What a change of knobs costs, on average of the last; 0: not known yet."""
        return statistics.fmean(self.changes_s) if self.changes_s else 0.0

    @property
    def allowed_s(self) -> float:
        return max(self.floor_s, self.share * self.elapsed_s)


@dataclass(slots=True)
class Trial:
    """One visit of a setting, and what became of it."""

    number: int
    setting: Setting
    source: str
    """Who proposed it: "start", "planner", "search", "preset" or "reference"."""
    state: TrialState = TrialState.PLANNED
    reason: str = ""
    forecast: Forecast | None = None
    constraint: float = 0.0
    """Above 0: it is not allowed, by this share of a limit."""
    params: dict[str, int] = field(default_factory=dict)
    """As the study has it: which choice of each dimension."""
    value: float | None = None
    """Logarithm of its time over the start's, once its visit is over; None: not known."""
    incumbent: int = 0
    """The trial that it was compared with."""
    gains: list[float] = field(default_factory=list)
    blocks: int = 0
    log_us: float = 0.0
    """Mean of its blocks' values: logarithms of microseconds per token."""
    device_bytes: int | None = None

    def keep(self, values: Sequence[float]) -> None:
        total = self.blocks * self.log_us + sum(values)
        self.blocks += len(values)
        self.log_us, self.state = total / self.blocks, TrialState.MEASURED


@dataclass(frozen=True, slots=True)
class Block:
    """Values of one block: logarithms of the mean step in ms; `own` is without what other processes took from the
    training thread, if that is known.
    """

    wall: float
    own: float | None = None


@dataclass(frozen=True, slots=True)
class Opening:
    """The incumbent is measured: its noise is not known yet, or nothing of it is."""

    voids: int = 0
    kind: Literal["opening"] = "opening"


@dataclass(frozen=True, slots=True)
class Choosing:
    """What to compare next is not decided yet."""

    kind: Literal["choosing"] = "choosing"


@dataclass(frozen=True, slots=True)
class Unit:
    """Incumbent, challenger, incumbent."""

    trial: int
    size: int
    before: Block | None = None
    blocks: tuple[Block, ...] = ()
    is_look: bool = False
    """Whether it is the first of this pair: one block of the challenger."""
    voids: int = 0
    kind: Literal["unit"] = "unit"


@dataclass(frozen=True, slots=True)
class Resting:
    """Nothing is worth a unit (`is_idle`), or none can be paid yet: the incumbent runs for so many steps."""

    steps: int
    is_idle: bool = False
    kind: Literal["resting"] = "resting"


@dataclass(frozen=True, slots=True)
class Stopped:
    """The search is over; `final`: for a later training of the run, too."""

    final: bool = False
    kind: Literal["stopped"] = "stopped"


State = Opening | Choosing | Unit | Resting | Stopped


@dataclass(slots=True)
class Pair:
    """All units of a challenger against one incumbent."""

    incumbent: Setting
    challenger: Setting
    order: int
    """Which challenger of the search it was, from 1: the test's error is shared out by it."""
    gains: list[float] = field(default_factory=list)
    own: list[float] = field(default_factory=list)
    """The same without what other processes took; empty: not known."""
    weights: list[float] = field(default_factory=list)
    """1: a whole unit; less where the challenger had one block."""


@dataclass(frozen=True, slots=True)
class Lesson:
    """One observation: `challenger`'s time was below `incumbent`'s by `gain`, a difference of logarithms. Both are
    places in the pool.
    """

    incumbent: int
    challenger: int
    gain: float
    variance: float


@dataclass(frozen=True, slots=True)
class Adoption:
    """A setting that took the incumbent's place for its speed; `gain` is a difference of logarithms."""

    trial: int
    replaced: int
    gain: float
    error: float


@dataclass(slots=True)
class Book:
    """Trials by number, the first of them the starting point, and which of them is the incumbent."""

    trials: list[Trial]
    barred: list[BarredSetting] = field(default_factory=list)
    adoptions: list[Adoption] = field(default_factory=list)
    """All of them, but for those that were rolled back."""
    chain: list[Adoption] = field(default_factory=list)
    """Those since `reference`, which made the incumbent what it is."""
    incumbent_number: int = 0
    reference_number: int = 0
    tokens: int = 1
    log_us: float | None = None
    """Of the incumbent's newest block, a logarithm of microseconds per token; None: not measured."""
    gain: Gain | None = None
    """Of the incumbent over the reference; None: it is that."""

    @property
    def incumbent(self) -> Trial:
        return self.trials[self.incumbent_number]

    @property
    def reference(self) -> Setting:
        """What the incumbent gains over: the starting point, or what had to take its place."""
        return self.trials[self.reference_number].setting

    @property
    def incumbent_step_ms(self) -> float:
        """Step time of its newest block; 0 before it was measured."""
        return 0.0 if self.log_us is None else math.exp(self.log_us) * self.tokens / 1e3

    def step_ms(self, trial: Trial) -> float | None:
        """Mean step time of a trial's blocks; None: it has none."""
        return math.exp(trial.log_us) * self.tokens / 1e3 if trial.blocks else None

    def why_barred(self, setting: Setting) -> Literal["crash", "rollback"] | None:
        """Why a setting is never tried again; None: it may be."""
        return next((one.kind for one in self.barred if one.setting == setting), None)

    def adopt(self, trial: Trial, adoption: Adoption) -> None:
        self.adoptions.append(adoption)
        self.chain.append(adoption)
        self.incumbent_number = trial.number
        if trial.setting == self.reference:
            self.reference_number = trial.number
            self.chain.clear()
        self.log_us = trial.log_us

    def move_to(self, trial: Trial) -> None:
        """Make a trial the incumbent that was not compared with the one before: gains are over it from here on."""
        self.incumbent_number = self.reference_number = trial.number
        self.chain.clear()
        self.log_us = None

    def roll_back(self) -> Trial:
        """Make the setting before the last adoption the incumbent again; the one that was adopted is barred."""
        last = self.adoptions.pop()
        barred = self.trials[last.trial]
        if self.chain and self.chain[-1] == last:
            self.chain.pop()
            self.incumbent_number, self.log_us = last.replaced, None
        else:
            self.move_to(self.trials[last.replaced])
        self.barred.append(BarredSetting(barred.setting, "rollback"))
        return barred

    def crash(self, trial: Trial, reason: str) -> None:
        self.barred.append(BarredSetting(trial.setting, "crash"))
        trial.state, trial.reason = TrialState.CRASHED, reason


@dataclass(slots=True, kw_only=True)
class SearchState:
    """All that a search knows: it goes on from here as if it had never been interrupted."""

    book: Book
    cost: ExplorationCost
    state: State = field(default_factory=Opening)
    planned: list[Setting] = field(default_factory=list)
    wanted: list[tuple[Setting, str]] = field(default_factory=list)
    movement: tuple[float, float | None] | None = None
    """The newest that bounds lateness, in percent of the weights, and its learning rate; None: not measured."""
    ranks_ms: tuple[float, ...] = ()
    """Of the newest measurement that tells; (): not known."""
    pairs: list[Pair] = field(default_factory=list)
    pool: list[Setting] = field(default_factory=list)
    """What something is believed of; it only grows."""
    lessons: list[Lesson] = field(default_factory=list)
    noise: BlockNoise = field(default_factory=BlockNoise)
    own_noise: BlockNoise = field(default_factory=BlockNoise)
    last: Block | None = None
    """The incumbent's block that ended the unit before, if nothing came between."""
    is_open: bool = False
    """Whether the visit of the last trial goes on."""
    measurements: int = 0
    rests: int = 0
    surprises: int = 0
    pace: Pace | None = None
    """Of the incumbent when the planner was asked last."""
    paces: list[Pace] = field(default_factory=list)

    def pair(self, challenger: Setting) -> Pair:
        both = self.book.incumbent.setting, challenger
        found = next((pair for pair in self.pairs if (pair.incumbent, pair.challenger) == both), None)
        if found is None:
            self.pairs.append(found := Pair(*both, order=len(self.pairs) + 1))
        return found
