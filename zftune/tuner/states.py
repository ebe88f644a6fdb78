"""What a search asks for, what it is told, and where it stands. Plain data."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field, replace
from typing import Generic, Literal, TypeVar

from zftune.store.types import Decision, TrialState
from zftune.text import number
from zftune.tuner.scores import Gain, Pace, Sample, departure, in_a_row, too_slow
from zftune.tuner.space import Forecast, Setting

Named = TypeVar("Named", bound=Hashable)
Role = Literal["start", "explore", "a1", "b", "a2", "hold"]
"""What a measurement is for: the starting point, a look at a setting, a comparison, or nothing but waiting."""
OF_INCUMBENT: tuple[Role, ...] = ("start", "a1", "a2", "hold")
Purpose = Literal["gain", "tie"]
Sampler = Literal["gp", "tpe", "random", "none"]
AT_S = "at_s"
"""In the details of a remark that is written down later: what the process that trains had counted when it was made."""
LEARNING_RATE = "learning_rate"
UNSEARCHED = "unsearched"
"""In a run's settings: of its first training, at its highest; in those of a remark: of the one that goes on."""
TRAINED_ON = "trained_on"
"""In those of a remark: the tuning ended, and the training did not."""
LIFE = "life"
"""In those of a step to earlier updates: in which life of its run, before anything was measured in it."""
LATE = "late"
"""In the same: the trial whose updates came later, which is tried again."""
TOKENS = "tokens"
"""In those of a decision to begin again: how many a step has from here on; elsewhere that is no reason for it."""
COMPARED_AGAIN = "compared_again"
"""In those of a comparison: it measured anew what the best so far gains over its reference (see `Gains`)."""
REFERENCES = ("start", "reference")
"""Who proposes what the best so far gains over: the starting point, or what had to take its place."""


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
    sampler: Sampler = "gp"
    """"none": only what the planner proposes."""
    most_measurements: int = 24
    """Of an incumbent's times: A-B-A included."""
    patience: int = 8
    """Settings in a row that are tried and not adopted for their speed, before it stops."""
    cost_share: float = 0.03
    grant_s: float = 60.0
    grant_steps: int = 40
    hold: bool = False
    """Where exploring has cost what it may: wait for more time to pass, rather than stop."""
    watch: bool = False
    """When it has stopped: go on looking at step times, and search again where they change."""
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
    incumbent_step_ms: float | None = None
    """For the abort rule, and while nothing but the incumbent runs for its end where times change; None: it is not
    ended early."""
    allowance_s: float | None = None
    """Most time beyond the incumbent's, discarded steps included; None: no limit."""

    def abort_reason(
        self, discarded_ms: Sequence[float], steps_ms: Sequence[float], before_ms: float | None = None
    ) -> str | None:
        """Why the measurement must end early, from the discarded and the counted steps so far.

        `before_ms`: the incumbent's steps right before; None: as when it was measured.
        """
        if self.incumbent_step_ms is None:
            return None
        if self.role == "hold":
            factor = departure(steps_ms, self.setting.update_interval, self.incumbent_step_ms)
            return None if factor is None else f"steps take {factor:.2f} times what they took"
        usual_ms = before_ms or self.incumbent_step_ms
        factor = too_slow(steps_ms, self.setting.update_interval, usual_ms)
        if factor is not None:
            when = "right before it, in the median" if before_ms else "when that was measured last"
            return f"its steps take {factor:.2f} times the {number(usual_ms)} ms that the best so far took {when}"
        done = len(discarded_ms) + len(steps_ms)
        excess_s = (sum(discarded_ms) + sum(steps_ms) - done * usual_ms) / 1e3
        if self.allowance_s is None or excess_s <= self.allowance_s:
            return None
        return f"{excess_s:.1f} s more than the best so far would have taken is all that exploring may cost now"


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

    status: Literal["measured", "aborted", "void", "crashed"]
    steps_ms: tuple[float, ...] = ()
    """Of the steps that count, in order."""
    discarded_ms: tuple[float, ...] = ()
    tokens: int = 1
    """Of a step."""
    device_bytes: int | None = None
    """Peak; None: not measured."""
    host_bytes: int | None = None
    reason: str = ""
    """Why it was not measured to its end."""
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
    before_ms: float | None = None
    """Of a challenger: what a step of the incumbent took right before it, in the median; None: too few were seen."""

    @property
    def seconds(self) -> float:
        """Of all its steps."""
        return (sum(self.steps_ms) + sum(self.discarded_ms)) / 1e3

    @property
    def step_count(self) -> int:
        """All its steps."""
        return len(self.steps_ms) + len(self.discarded_ms)


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
    """A setting that was thought of, and what became of it."""

    number: int
    setting: Setting
    source: str
    """Who proposed it: "start", "planner", "search", "preset" or "reference"."""
    state: TrialState = TrialState.PLANNED
    reason: str = ""
    forecast: Forecast | None = None
    constraint: float = 0.0
    """Above 0: it is not allowed, by this share of a limit."""
    samples: list[Sample] = field(default_factory=list)
    """Valid ones since times changed last."""
    device_bytes: int | None = None
    host_bytes: int | None = None
    pace: Pace | None = None
    """Of its last measurement."""


@dataclass(frozen=True, slots=True)
class Choosing:
    """What to look at next is not decided yet."""


@dataclass(frozen=True, slots=True)
class Exploring:
    """A setting is measured for the first time."""

    trial: int
    voids: int = 0


@dataclass(frozen=True, slots=True)
class Comparing:
    """Incumbent, challenger, incumbent, and where that leaves it open once more challenger, incumbent."""

    trial: int
    purpose: Purpose
    steps: int
    """Of each measurement, at least."""
    before: tuple[Sample, ...] = ()
    """Of the incumbent."""
    after: tuple[Sample, ...] = ()
    """Of the challenger."""
    voids: int = 0

    @property
    def role(self) -> Role:
        """What is measured next."""
        if not self.before:
            return "a1"
        return "a2" if len(self.after) == len(self.before) else "b"


@dataclass(frozen=True, slots=True)
class MeasuringBaseline:
    """The incumbent has to be measured first."""

    voids: int = 0
    again: bool = False
    """Since training was ended and goes on, or others may take long for the times' fault: it does not count as one of
    the search's measurements."""
    then: Comparing | None = None
    """What comes next, with this as its first measurement; None: that is chosen then."""


@dataclass(frozen=True, slots=True)
class WaitingForBudget:
    """Exploring has cost what it may: the incumbent runs until more time has passed."""

    steps: int


@dataclass(frozen=True, slots=True)
class Stopped:
    """The search is over, unless times change."""

    reason: str
    final: bool = False
    """Also where they change."""


State = MeasuringBaseline | Choosing | Exploring | Comparing | WaitingForBudget | Stopped


@dataclass(frozen=True, slots=True)
class Adoption:
    """A setting that took the incumbent's place."""

    trial: int
    gain: Gain
    replaced: int
    """The trial that was the incumbent before: not always one that was adopted, see `TrialTable.move_to`."""


def gain_of(decision: Decision) -> Gain:
    """What a comparison has found, by what was written down of it."""
    return Gain(decision.details.get("gain", 0.0), decision.details.get("error", 0.0))


class Gains(Generic[Named]):
    """Gains of settings over the search's starting point, as far as they were measured.

    One that became the incumbent without a comparison, for the quality or for GPU memory, has no gain, unless it was
    adopted before and has its own. What is adopted after it gains over it. Neither it nor the starting point gains over
    itself: one that comes back, by a comparison in other times, has none.
    """

    def __init__(self, start: Named) -> None:
        self._rows: dict[Named, tuple[Named, tuple[tuple[Gain, int], ...]]] = {start: (start, ())}
        """By setting: what it was compared with, and each gain on the way from there with its era."""
        self._start = self._incumbent = start
        self._era = 0

    def adopt(self, setting: Named, found: Gain) -> None:
        """Take a setting as the incumbent, by its gain over the one before."""
        reference, gains = self._rows[self._incumbent]
        self._rows[setting] = (
            (setting, ()) if setting in (reference, self._start) else (reference, (*gains, (found, self._era)))
        )
        self._incumbent = setting

    def compare_again(self, found: Gain) -> None:
        """Update what the incumbent gains over `reference`; `found` is the reference's gain over the incumbent."""
        self._rows[self._incumbent] = (self.reference, ((found.reverse, self._era),))

    def move_to(self, setting: Named) -> None:
        """Take a setting as the incumbent that was not compared with the one before."""
        self._rows.setdefault(setting, (setting, ()))
        self._incumbent = setting

    @property
    def gain(self) -> Gain | None:
        """Of the incumbent over `reference`; None: it is that."""
        parts = self._rows[self._incumbent][1]
        whole = in_a_row([found for found, _ in parts])
        if whole is None or not self.age:
            return whole
        newest = in_a_row([found for found, era in parts if era == self._era])
        return replace(whole, counted=0.0 if newest is None else newest.share)

    @property
    def age(self) -> int:
        """How often the search began again since the oldest part of `gain` was measured."""
        return self._era - min((era for _, era in self._rows[self._incumbent][1]), default=self._era)

    def begin_again(self) -> None:
        """Times are others from here on."""
        self._era += 1

    @property
    def reference(self) -> Named:
        """What the incumbent was compared with: the starting point, or what had to take its place."""
        return self._rows[self._incumbent][0]
