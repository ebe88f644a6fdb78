"""A run's rows in the order in which they were written: what was measured, what was decided, and by which figures.

Nothing is decided again: who the incumbent was and how much was gained follows from the decisions as they stand.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from zftune.explain.words import identity
from zftune.store.account import Account
from zftune.store.types import Decision, Measurement, TrialRecord, TrialState
from zftune.tuner.scores import Gain, Sample, relative_error, score, spread
from zftune.tuner.states import COMPARED_AGAIN, OF_INCUMBENT, TOKENS, TRAINED_ON, Gains, gain_of
from zftune.words import ERAS

if TYPE_CHECKING:
    from zftune.store.store import Store

_NEWEST = 3  # measurements of a setting that count, as in the search
_CLOCK_S = 1e-5  # a wall clock in seconds is not more exact than this
_UNFINISHED = (TrialState.ABORTED, TrialState.CRASHED, TrialState.VOID)


@dataclass(slots=True)
class Era:
    """A part of a search in which step times are comparable: it ends where they change and the search begins again."""

    number: int
    """0, 1, .. in its run."""
    reason: str = ""
    """Why the search began again; "" for the first."""
    cause: str = ""
    """The same as a word of `zftune.words.ERAS`; "" for the first."""
    at_s: float = 0.0
    """When it did, on the search's clock."""
    at_unix_s: float | None = None
    measurements: int = 0
    """That count; those of the incumbent while waiting left out."""
    settings: set[int] = field(default_factory=set)
    """The first trials of the settings of these measurements: those that were cut short, too."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """One measurement; times are of the search's clock, which runs while steps are taken."""

    number: int
    """1, 2, .. in its run."""
    trial: int
    role: str
    status: str
    """"measured", "aborted", "void" or "crashed"."""
    reason: str | None
    """Why it does not count, or not to its end."""
    steps: int
    """That count."""
    seconds: float
    """Of all its steps, discarded ones too."""
    ended_s: float
    """Since the search began."""
    step_ms: float | None
    error_ms: float | None
    """Standard error of it."""
    noise: float | None
    """Relative standard deviation of single steps."""
    incumbent: int
    """Trial that was the incumbent."""
    incumbent_step_ms: float | None
    era: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Decided:
    """One decision, and the measurements since the one before it."""

    decision: Decision
    at_s: float
    """Since the search began, on its clock."""
    incumbent: int
    """Trial that was the incumbent before it."""
    measured: tuple[int, ...]
    """Numbers of measurements."""
    undecided: tuple[int, ...]
    """Where a run goes on: those that its training before had made, and that nothing was decided by."""
    era: int
    """That it was made in; a decision to begin again opens the next one."""


class Replay:
    """The state of a run after the rows so far."""

    def __init__(self, trials: Sequence[TrialRecord]) -> None:
        self.measured: list[Measured] = []
        self.decided: list[Decided] = []
        self.account = Account()
        """Of the run."""
        self.at_s = 0.0
        """How long the run had taken when the last row was written."""
        self.incumbent = 0
        """Trial."""
        self.start_step_ms: float | None = None
        """Of the incumbent when the search began."""
        self.eras = [Era(0)]
        self.measurements = 0
        """That count towards the search's limit: those of the last era."""
        self.reasons: dict[int, str] = {}
        """Why a trial was not measured to its end, the last time; by number."""
        self.ranks_ms: Sequence[float] = ()
        """Of each rank without its waits in collectives, of the newest measurement that tells; (): none does."""
        self.movement_percent: float | None = None
        """How far a step moves the deferred weights, by the newest measurement that tells; None: none does."""
        self.movement_rate: float | None = None
        """The learning rate that this is told at; None: not known."""
        self.peak_movement: tuple[float, float | None] | None = None
        """The largest movement that was measured, and the learning rate that it is told at; None: none was."""
        self.last_unix_s = 0.0
        """When the last row was written."""
        self._decisions: list[Decision] = []
        self._trials = trials
        self._settings = [identity(one.knobs) for one in trials]
        self._gains: Gains[Hashable] = Gains(self._settings[0] if trials else None)
        self._samples: dict[int, list[Sample]] = defaultdict(list)
        self._earlier: dict[int, float] = {}
        self._eras: dict[int, int] = {}
        self._tokens = 1
        self._since: list[tuple[Measured, Sample | None]] = []
        self._other_life = False
        """Whether what is known of the incumbent's times is of a training that has ended, as in the search."""

    @property
    def gain(self) -> Gain | None:
        """Of the incumbent over the starting point, or over what had to take its place; None: it is one of these."""
        return self._gains.gain

    @property
    def reference(self) -> dict[str, Any] | None:
        """The knobs that `gain` is over; None: those of the starting point."""
        number = self._settings.index(self._gains.reference)
        return dict(self._trials[number].knobs) if number else None

    @property
    def gain_era(self) -> int:
        """That the oldest part of `gain` was measured in."""
        return self.eras[-1].number - self._gains.age

    @property
    def trained_on(self) -> bool:
        """Whether the training went on when its tuning ended."""
        for one in reversed(self.decided):
            if TRAINED_ON in one.decision.details or one.decision.kind == "resume":
                return TRAINED_ON in one.decision.details
        return False

    def step_ms(self, trial: int) -> float | None:
        """Of a trial's newest measurements together; None: it has none that count in the last era."""
        samples = self._samples.get(trial)
        return score(samples) * self._tokens / 1e3 if samples else None

    def earlier_step_ms(self, trial: int) -> float | None:
        """Of a trial in the newest era that it was measured in; None: that is the last one, or there is none."""
        return None if self.step_ms(trial) is not None else self._earlier.get(trial)

    def era(self, trial: int) -> int:
        """That a trial was measured or decided about in last; of one that is still to be measured the last one."""
        return self._eras.get(trial, self.eras[-1].number)

    def reason(self, row: TrialRecord) -> str | None:
        """Why a trial was rejected, or not measured to its end; None: it was neither."""
        return row.reason or (self.reasons.get(row.number) if row.state in _UNFINISHED else None)

    def measure(self, trial: TrialRecord, row: Measurement) -> None:
        """Take in the next measurement."""
        status, tokens = row.aggregates["status"], max(1, row.aggregates["tokens"])
        steps = list(row.steps_ms)
        every = [*steps, *row.aggregates["discarded_ms"]]
        incumbent_ms = self.step_ms(self.incumbent)
        challenged = row.role not in OF_INCUMBENT
        self.at_s = max(self.at_s, row.aggregates.get("at_s", 0.0))
        self.ranks_ms = row.aggregates.get("ranks_ms", self.ranks_ms)
        if "movement_percent" in row.aggregates:
            self.movement_percent = row.aggregates["movement_percent"]
            self.movement_rate = row.aggregates.get("movement_rate")
            if self.peak_movement is None or self.movement_percent > self.peak_movement[0]:
                self.peak_movement = self.movement_percent, self.movement_rate
        sample = Sample.of(steps, _interval(trial.knobs), tokens)
        sample_or_none = sample if sample.token_us else None
        if row.role != "hold":
            again = row.role == "start" and incumbent_ms is not None  # after a resumption
            self.measurements += status in ("measured", "aborted") and not again
            if self._other_life and not challenged and status == "measured":
                self._samples[trial.number], self._other_life = [], False
            self._keep(trial.number, status, sample_or_none, tokens, row.void_reason)
        one = Measured(
            number=len(self.measured) + 1, trial=trial.number, role=row.role, status=status, reason=row.void_reason,
            steps=len(steps), seconds=sum(every) / 1e3, ended_s=self.at_s, incumbent=self.incumbent,
            incumbent_step_ms=self.step_ms(self.incumbent), era=self.eras[-1].number,
            **(_figures(None, tokens, ()) if status == "crashed" else _figures(sample_or_none, tokens, every)),
        )  # fmt: skip
        self.measured.append(one)
        self._eras[trial.number] = one.era
        self._count_in(self.eras[-1], one)
        if not (one.status == "crashed" and self._is_told(one)):
            self._since.append((one, sample_or_none))
        self.last_unix_s = max(self.last_unix_s, _written(row))

    def _is_told(self, crash: Measured) -> bool:
        """Whether a crash was written down as such when its training was found dead, and as a measurement later."""
        for at in range(len(self.decided) - 1, -1, -1):
            told = self.decided[at]
            if (told.decision.kind, told.decision.trial) == ("crash", crash.trial):
                known = {self.measured[number - 1].status for number in told.measured}
                if "crashed" not in known:
                    self.decided[at] = replace(told, measured=(*told.measured, crash.number))
                    return True
        return False

    def _keep(self, trial: int, status: str, sample: Sample | None, tokens: int, reason: str | None) -> None:
        if status == "measured" and sample is not None:
            self._tokens = tokens
            self._samples[trial] = [*self._samples[trial][1 - _NEWEST :], sample]
        elif status == "aborted":
            self._samples[trial] = [] if sample is None else [sample]
        elif status == "crashed":
            self._samples[trial] = []
        if status != "measured" and reason:
            self.reasons[trial] = reason

    def decide(self, decision: Decision) -> None:
        """Take in the next decision."""
        details, trial = decision.details, decision.trial
        self._decisions.append(decision)
        before = self.incumbent
        self.at_s = max(self.at_s, details.get("elapsed_s", 0.0))
        self._take_effect(decision)
        if trial is not None:
            self._eras[trial] = self.eras[-1].number
        since = () if decision.kind == "remark" else tuple(one.number for one, _ in self._since)
        behind, left = ((), since) if decision.kind == "resume" else (since, ())
        decided = Decided(
            decision=decision, at_s=self.at_s, incumbent=before, measured=behind, undecided=left,
            era=self.eras[-1].number,
        )  # fmt: skip
        self.decided.append(decided)
        if decision.kind != "remark":  # nothing follows from one, nor does it from what was measured
            self._since.clear()
        self.last_unix_s = max(self.last_unix_s, decision.at_unix_s)

    def _take_effect(self, decision: Decision) -> None:
        trial = decision.trial
        if decision.kind == "adopt" and trial is not None:
            looked = [] if self._new("a1") else self._new("explore")  # a comparison that began with the look
            self._samples[trial] = [*looked, *self._new("b")]
            self.incumbent = trial
            self._gains.adopt(self._settings[trial], gain_of(decision))
        elif COMPARED_AGAIN in decision.details:
            self._gains.compare_again(gain_of(decision))
        elif decision.kind == "start" and self.start_step_ms is None:
            self.start_step_ms = self.step_ms(self.incumbent)
        elif decision.kind in ("memory", "movement") and trial is not None:
            self._back_to(trial)
        elif decision.kind == "guard":
            self._back_to(0)
        elif decision.kind == "rollback":
            self._back_to(int(decision.details.get("pinned", 0)))
        elif decision.kind == "resume":
            self._other_life = True
        elif decision.kind == "reopen":
            self._begin_again(decision)

    def _back_to(self, trial: int) -> None:
        """Another incumbent, by no comparison."""
        self.incumbent = trial
        self._gains.move_to(self._settings[trial])

    def _begin_again(self, decision: Decision) -> None:
        """Open the next era. A measurement of the incumbent that showed it is its first, if the search keeps it."""
        for number in self._samples:
            step_ms = self.step_ms(number)
            if step_ms is not None:
                self._earlier[number] = step_ms
        kept = self._new("start")
        self._samples.clear()
        self._gains.begin_again()
        self._samples[self.incumbent] = kept
        self.measurements, self._other_life = 0, False
        before, era = (
            self.eras[-1],
            Era(len(self.eras), decision.reason, _cause(self._decisions), self.at_s, decision.at_unix_s),
        )
        self.eras.append(era)
        for one, sample in self._since if kept else ():
            if (one.role, one.status) == ("start", "measured") and sample is not None:
                moved = replace(one, era=era.number)
                self.measured[one.number - 1] = moved
                before.measurements -= _counts(moved)
                self._count_in(era, moved)

    def _count_in(self, era: Era, one: Measured) -> None:
        if _counts(one):
            era.measurements += 1
            era.settings.add(self._settings.index(self._settings[one.trial]))

    def _new(self, role: str) -> list[Sample]:
        """Valid measurements since the last decision."""
        return [s for one, s in self._since if (one.role, one.status) == (role, "measured") and s is not None]


def replay(
    trials: Sequence[TrialRecord],
    measurements: Mapping[int, Sequence[Measurement]],
    decisions: Sequence[Decision],
) -> Replay:
    """Go through the rows of a run, in order; measurements are by trial id."""
    told = Replay(trials)
    rows = [(trial, row) for trial in trials for row in measurements.get(trial.trial_id, ())]
    rows.sort(key=lambda pair: pair[1].aggregates["sequence"])
    next_row = 0
    for decision in _in_order(decisions):
        while next_row < len(rows) and _written(rows[next_row][1]) <= decision.at_unix_s + _CLOCK_S:
            told.measure(*rows[next_row])
            next_row += 1
        told.decide(decision)
    for pair in rows[next_row:]:
        told.measure(*pair)
    return told


def _in_order(decisions: Sequence[Decision]) -> list[Decision]:
    """As they were made: a remark may have been written down at the end of its run. A clock that was set moves none."""
    found: list[Decision] = []
    for one in decisions:
        at = len(found)
        while one.kind == "remark" and at and found[at - 1].at_unix_s > one.at_unix_s:
            at -= 1
        found.insert(at, one)
    return found


def replayed(store: Store, run_id: str) -> tuple[list[TrialRecord], Replay]:
    """A run's trials, and what its rows tell.

    Raises:
        StoreError: the store could not be read.
    """
    trials = store.trials(run_id)
    measurements = {row.trial_id: store.measurements(row.trial_id) for row in trials}
    told = replay(trials, measurements, store.decisions(run_id))
    told.account = store.account(run_id) or told.account
    return trials, told


def _written(row: Measurement) -> float:
    """Wall clock at its end, when it was written down."""
    discarded_ms: list[float] = row.aggregates["discarded_ms"]
    return row.began_unix_s + (sum(row.steps_ms) + sum(discarded_ms)) / 1e3


def _cause(decisions: Sequence[Decision]) -> str:
    """Why a search began again, by its decision to do so, the last one, and by what was decided just before."""
    if TOKENS in decisions[-1].details:
        return TOKENS
    before = decisions[-2].kind if len(decisions) > 1 else ""
    return before if before in ERAS else "times"


def _counts(one: Measured) -> bool:
    return one.role != "hold" and one.status in ("measured", "aborted")


def _interval(knobs: Mapping[str, Any]) -> int:
    value = knobs.get("update_interval")
    return value if isinstance(value, int) and value > 0 else 1


def _figures(sample: Sample | None, tokens: int, steps_ms: Sequence[float]) -> dict[str, float | None]:
    if sample is None:
        mean = sum(steps_ms) / len(steps_ms) if steps_ms else None
        return {"step_ms": mean, "error_ms": None, "noise": None}
    step_ms = score([sample]) * tokens / 1e3
    if len(sample.windows()) < 2:  # a single one shows no noise
        return {"step_ms": step_ms, "error_ms": None, "noise": None}
    return {"step_ms": step_ms, "error_ms": relative_error([sample], seed=0) * step_ms, "noise": spread([sample])}
