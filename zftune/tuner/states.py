"""What a search asks for, what it is told, and all that it knows. Plain data."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from zftune.store.types import TrialState
from zftune.tuner.blocks import BlockNoise
from zftune.tuner.cost import ExplorationCost
from zftune.tuner.evidence import Gain
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
"""In a run's settings: of its first training, at its highest; in those of a remark: of the one that goes on."""
TRAINED_ON = "trained_on"
"""In those of a remark: the tuning ended, and the training did not."""
REFERENCES = ("start", "reference")
"""Who proposes what the best so far gains over: the starting point, or what had to take its place."""
FAR_SLOWER = 3.0
"""Times the incumbent's: a block that is so slow is ended early, and counts."""
LEAST_STEPS = 8
"""Of a block that is ended early."""


@dataclass(frozen=True, slots=True)
class BarredSetting:
    """One that is not tried again."""

    setting: Setting
    kind: Literal["crash", "rollback"]
    """A training did not survive it, or somebody rolled it back."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchOptions:
    """How a search goes on."""

    seed: int = 0
    sampler: Sampler = "belief"
    """"none": only what the planner proposes."""
    most_measurements: int | None = None
    """Blocks at most; None: no limit but what exploring may cost."""
    cost_share: float = 0.01
    """Of the elapsed time that exploring may cost, beyond `cost_floor_s`."""
    cost_floor_s: float = 108.0
    hold: bool = False
    """Where nothing is worth a unit or can be paid now: rest, rather than stop."""
    watch: bool = False
    """Where the limit on measurements is reached: rest, too, as the daemon does, whose commands are still taken."""
    thinking_s: float | None = None
    """In simulated time, how long a thought takes; None: as long as it really did."""
    barred: tuple[BarredSetting, ...] = field(default=())
    """In earlier runs: never tried."""


@dataclass(frozen=True, slots=True)
class Request:
    """Train so many steps under a setting."""

    setting: Setting
    role: Role
    trial: int
    """Its number in the search."""
    discard: int
    """Steps after the change that do not count: the first window."""
    steps: int
    """Steps that count: whole windows."""
    block: int = 0
    """Steps of each block; 0: all are one."""
    slow_ms: float | None = None
    """A first block whose steps take more than this on average has no second one; None: all steps are taken."""
    allowance_s: float | None = None
    """Most time beyond the incumbent's, discarded steps included; None: no limit."""
    incumbent_step_ms: float | None = None
    """What the incumbent takes; None: not known, or it runs itself."""

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
    """Steps that belong to no measurement: somebody thinks, or a change of knobs is under way."""

    seconds: float = 0.0
    """Of those under the incumbent."""
    late_s: float = 0.0
    """Of those that a setting that is not the incumbent took: the step that changed to it, and those after its
    measurement."""
    late_steps: int = 0
    """How many of the latter."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of a request."""

    status: Literal["measured", "void", "crashed"]
    steps_ms: tuple[float, ...] = ()
    """Of the steps that count, in order."""
    discarded_ms: tuple[float, ...] = ()
    tokens: int = 1
    """Of a step."""
    moves: tuple[bool, ...] = ()
    """Which steps that count selected or exchanged columns; (): none is known to."""
    taken_ms: tuple[float, ...] = ()
    """What other processes took from the training thread in each step that counts; (): not known."""
    device_bytes: int | None = None
    """Peak; None: not measured."""
    host_bytes: int | None = None
    reason: str = ""
    """Why it was not measured."""
    between: UnmeasuredSteps = UnmeasuredSteps()
    """What came before its first step, since the outcome before."""
    called_off: bool = False
    """Void because nobody wanted it any more, such as in a pause: that does not speak against measuring it again."""
    pace: Pace | None = None
    """What the steps that count showed of the machine; None: nothing."""
    ranks_ms: tuple[float, ...] = ()
    """What a step took each of several ranks without its waits in collectives; (): not known."""
    movement_percent: float | None = None
    """How far a step moves the deferred weights, at the schedule's highest learning rate; None: not measured."""
    movement_rate: float | None = None
    """That rate, or the one that held where it falls already; None: not known, or one for each of several groups."""

    @property
    def seconds(self) -> float:
        """Of all its steps."""
        return (sum(self.steps_ms) + sum(self.discarded_ms)) / 1e3

    @property
    def step_count(self) -> int:
        """All its steps."""
        return len(self.steps_ms) + len(self.discarded_ms)

    @property
    def own_ms(self) -> tuple[float, ...]:
        """Steps without what other processes took; (): not known."""
        return tuple(ms - taken for ms, taken in zip(self.steps_ms, self.taken_ms, strict=False))


@dataclass(frozen=True, slots=True)
class Remark:
    """What was found out beside the search, and when."""

    reason: str
    """A sentence."""
    at_s: float
    """What the process that trains had counted by then."""
    at_unix_s: float
    step: int = 0
    """The last by then."""


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
    """Of its units, over that one."""
    blocks: int = 0
    log_us: float = 0.0
    """Mean of its blocks' values: logarithms of microseconds per token."""
    device_bytes: int | None = None
    host_bytes: int | None = None
    pace: Pace | None = None
    """Of its last measurement."""

    def keep(self, values: Sequence[float]) -> None:
        """Take in the values of its blocks."""
        for value in values:
            self.blocks += 1
            self.log_us += (value - self.log_us) / self.blocks
        self.state = TrialState.MEASURED


@dataclass(frozen=True, slots=True)
class Block:
    """Values of one block: logarithms of the mean step in ms."""

    wall: float
    own: float | None = None
    """The same without what other processes took from the training thread; None: not known."""


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
    """Steps of a block."""
    before: Block | None = None
    """Of the incumbent."""
    blocks: tuple[Block, ...] = ()
    """Of the challenger."""
    is_look: bool = False
    """Whether it is the first of this pair: one block of the challenger."""
    voids: int = 0
    kind: Literal["unit"] = "unit"


@dataclass(frozen=True, slots=True)
class Resting:
    """Nothing is worth a unit, or none can be paid: the incumbent runs."""

    steps: int
    """That are left of it."""
    reason: str = ""
    is_idle: bool = False
    """Whether nothing is worth a unit; else none can be paid yet."""
    kind: Literal["resting"] = "resting"


@dataclass(frozen=True, slots=True)
class Stopped:
    """The search is over."""

    reason: str
    final: bool = False
    """Also for a later training of the run."""
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
    adopted_after: int | None = None
    """How many units there were when it was adopted: the later ones are free of the winner's luck."""


@dataclass(frozen=True, slots=True)
class Adoption:
    """A setting that took the incumbent's place for its speed."""

    trial: int
    replaced: int
    gain: float
    """Difference of logarithms."""
    error: float


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchState:
    """All that a search knows: it goes on from here as if it had never been interrupted."""

    movement_percent: float | None
    """That bounds lateness; None: it was not measured."""
    movement_rate: float | None
    state: State
    trials: tuple[Trial, ...]
    incumbent: int
    reference: int
    """The trial that the incumbent's gain is over."""
    adoptions: tuple[Adoption, ...]
    chain: tuple[Adoption, ...]
    """The adoptions since the reference."""
    barred: tuple[BarredSetting, ...]
    tokens: int
    log_us: float | None
    """Of the incumbent's newest block; None: not measured."""
    gain: Gain | None
    """Of the incumbent over the reference; None: it is that."""
    pairs: tuple[Pair, ...]
    lessons: tuple[tuple[int, int, float, float], ...]
    """Incumbent and challenger by their places in the pool, gain and variance."""
    pool: tuple[Setting, ...]
    planned: tuple[Setting, ...]
    noise: BlockNoise
    own_noise: BlockNoise
    last: Block | None
    """The incumbent's block that ended the unit before, if nothing came between."""
    wanted: tuple[tuple[Setting, str], ...]
    """Settings to look at first, and who proposes them."""
    is_open: bool
    """Whether the visit of the last trial goes on."""
    measurements: int
    rests: int
    surprises: int
    cost: ExplorationCost
    pace: Pace | None
    """Of the incumbent when the planner was asked last."""
    paces: tuple[Pace, ...]
    """Of its newest blocks."""
