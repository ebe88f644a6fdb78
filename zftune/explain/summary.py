"""A run as every screen and document shows it: what its search knows, its rows in order, and its account."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from zftune.store.account import Account
from zftune.store.types import Decision, Measurement, TrialRecord, TrialState
from zftune.tuner.evidence import Gain
from zftune.tuner.recorder import state_adapter
from zftune.tuner.states import OF_INCUMBENT, TRAINED_ON, SearchState

if TYPE_CHECKING:
    from zftune.store.store import Store

_CLOCK_S = 1e-5  # a wall clock in seconds is not more exact than this
_UNFINISHED = (TrialState.CRASHED, TrialState.VOID)


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """One measurement; times are of the search's clock, which runs while steps are taken."""

    number: int
    """1, 2, .. in its run."""
    trial: int
    role: str
    status: str
    """"measured", "void" or "crashed"."""
    reason: str | None
    """Why it does not count."""
    steps: int
    """That count."""
    seconds: float
    """Of all its steps, discarded ones too."""
    ended_s: float
    """Since the search began."""
    step_ms: float | None
    incumbent: int
    """Trial that was the incumbent."""
    incumbent_step_ms: float | None


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


@dataclass(slots=True, kw_only=True)
class RunSummary:
    """A run: `RunSummary.read` makes it."""

    trials: Sequence[TrialRecord]
    state: SearchState | None
    """What its search knows; None: it has not begun."""
    account: Account
    measured: list[Measured]
    decided: list[Decided]
    ranks_ms: Sequence[float] = ()
    """Of each rank without its waits in collectives, of the newest measurement that tells; (): none does."""
    movement_percent: float | None = None
    """How far a step moves the deferred weights, by the newest measurement that tells; None: none does."""
    movement_rate: float | None = None
    """The learning rate that this was measured at; None: not known."""
    peak_movement: tuple[float, float | None] | None = None
    """The largest movement that was measured, and its learning rate; None: none was."""

    @classmethod
    def read(cls, store: Store, run_id: str) -> RunSummary:
        """A run of a store.

        Raises:
            StoreError: the store could not be read.
        """
        trials = store.trials(run_id)
        rows = {row.trial_id: store.measurements(row.trial_id) for row in trials}
        found = store.search_state(run_id)
        state = None if found is None else state_adapter().validate_python(found)
        return cls.of(trials, rows, store.decisions(run_id), state, store.account(run_id) or Account())

    @classmethod
    def of(
        cls,
        trials: Sequence[TrialRecord],
        measurements: Mapping[int, Sequence[Measurement]],
        decisions: Sequence[Decision],
        state: SearchState | None,
        account: Account,
    ) -> RunSummary:
        """From rows; measurements are by trial id."""
        found = cls(trials=trials, state=state, account=account, measured=[], decided=[])
        rows = [(trial, row) for trial in trials for row in measurements.get(trial.trial_id, ())]
        rows.sort(key=lambda pair: pair[1].aggregates["sequence"])
        story, next_row = _Story(found), 0
        for decision in _in_order(decisions):
            while next_row < len(rows) and _written(rows[next_row][1]) <= decision.at_unix_s + _CLOCK_S:
                story.measure(*rows[next_row])
                next_row += 1
            story.decide(decision)
        for pair in rows[next_row:]:
            story.measure(*pair)
        return found

    @property
    def incumbent(self) -> int:
        """The trial whose knobs are the best so far."""
        return 0 if self.state is None else self.state.incumbent

    @property
    def gain(self) -> Gain | None:
        """Of the incumbent over the starting point, or over what had to take its place; None: it is one of these."""
        return None if self.state is None else self.state.gain

    @property
    def reference(self) -> dict[str, Any] | None:
        """The knobs that `gain` is over; None: those of the starting point."""
        number = 0 if self.state is None else self.state.reference
        is_start = not self.trials or self.trials[number].knobs == self.trials[0].knobs
        return None if is_start else dict(self.trials[number].knobs)

    @property
    def measurements(self) -> int:
        """That count."""
        return 0 if self.state is None else self.state.measurements

    @property
    def trained_on(self) -> bool:
        """Whether the training went on when its tuning ended."""
        for one in reversed(self.decided):
            if TRAINED_ON in one.decision.details or one.decision.kind == "resume":
                return TRAINED_ON in one.decision.details
        return False

    def step_ms(self, trial: int) -> float | None:
        """Mean of a trial's blocks; None: it has none."""
        if self.state is None or trial >= len(self.state.trials) or not self.state.trials[trial].blocks:
            return None
        return math.exp(self.state.trials[trial].log_us) * self.state.tokens / 1e3

    def reason(self, row: TrialRecord) -> str | None:
        """Why a trial was rejected, or not measured to its end; None: it was neither."""
        if row.reason or row.state not in _UNFINISHED:
            return row.reason
        return next((one.reason for one in reversed(self.measured) if one.trial == row.number and one.reason), None)


class _Story:
    """Takes the rows of a run in order."""

    def __init__(self, summary: RunSummary) -> None:
        self._summary = summary
        self._at_s = 0.0
        self._incumbent = 0
        self._incumbent_ms: float | None = None
        self._since: list[int] = []

    def measure(self, trial: TrialRecord, row: Measurement) -> None:
        """Take in the next measurement."""
        summary, about = self._summary, row.aggregates
        every = [*row.steps_ms, *about["discarded_ms"]]
        self._at_s = max(self._at_s, about.get("at_s", 0.0))
        summary.ranks_ms = about.get("ranks_ms", summary.ranks_ms)
        if "movement_percent" in about:
            self._move(about["movement_percent"], about.get("movement_rate"))
        if about["status"] == "measured" and row.role in OF_INCUMBENT:
            self._incumbent_ms = row.step_ms
        mean_ms = sum(every) / len(every) if every else None
        one = Measured(
            number=len(summary.measured) + 1, trial=trial.number, role=row.role, status=about["status"],
            reason=row.void_reason, steps=row.steps, seconds=sum(every) / 1e3, ended_s=self._at_s,
            step_ms=row.step_ms or mean_ms, incumbent=self._incumbent, incumbent_step_ms=self._incumbent_ms,
        )  # fmt: skip
        summary.measured.append(one)
        self._since.append(one.number)

    def _move(self, percent: float, rate: float | None) -> None:
        summary = self._summary
        summary.movement_percent, summary.movement_rate = percent, rate
        if summary.peak_movement is None or percent > summary.peak_movement[0]:
            summary.peak_movement = percent, rate

    def decide(self, decision: Decision) -> None:
        """Take in the next decision."""
        before = self._incumbent
        self._at_s = max(self._at_s, decision.details.get("elapsed_s", 0.0))
        if decision.kind in ("adopt", "memory", "movement") and decision.trial is not None:
            self._incumbent = decision.trial
        elif decision.kind == "guard":
            self._incumbent = 0
        elif decision.kind == "rollback":
            self._incumbent = int(decision.details.get("pinned", 0))
        since = () if decision.kind == "remark" else tuple(self._since)
        self._summary.decided.append(Decided(decision=decision, at_s=self._at_s, incumbent=before, measured=since))
        if decision.kind != "remark":  # nothing follows from one, nor does it from what was measured
            self._since = []


def _in_order(decisions: Sequence[Decision]) -> list[Decision]:
    """As they were made: a remark may have been written down at the end of its run. A clock that was set moves none."""
    found: list[Decision] = []
    for one in decisions:
        at = len(found)
        while one.kind == "remark" and at and found[at - 1].at_unix_s > one.at_unix_s:
            at -= 1
        found.insert(at, one)
    return found


def _written(row: Measurement) -> float:
    """Wall clock at its end, when it was written down."""
    discarded_ms: list[float] = row.aggregates["discarded_ms"]
    return row.began_unix_s + (sum(row.steps_ms) + sum(discarded_ms)) / 1e3
