"""A run's rows in the order in which they were written: what was measured, what was decided, and by which figures.

Nothing is decided again: who the incumbent was and how much was gained follows from the decisions as they stand.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from zftune.explain.account import Account
from zftune.store.types import Decision, Measurement, TrialRecord
from zftune.tuner.scores import Gain, Sample, score, spread
from zftune.tuner.states import OF_INCUMBENT

_NEWEST = 3  # measurements of a setting that count, as in the search
_OF_MEDIAN = 1.2533  # standard error of a median over that of a mean, for a normal distribution
_CLOCK_S = 1e-5  # a wall clock in seconds is not more exact than this
_ROUNDED_S = 2e-3  # decisions keep their times in milliseconds


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Decided:
    """One decision, and the measurements since the one before it."""

    decision: Decision
    trial: int | None
    at_s: float
    """Since the search began, on its clock."""
    incumbent: int
    """Trial that was the incumbent before it."""
    measured: tuple[int, ...]
    """Numbers of measurements."""


class Replay:
    """What the rows have told so far."""

    def __init__(self) -> None:
        self.measured: list[Measured] = []
        self.decided: list[Decided] = []
        self.account = Account()
        self.incumbent = 0
        """Trial."""
        self.start_step_ms: float | None = None
        """Of the incumbent when the search began."""
        self.measurements = 0
        """That the search counts: since times changed last."""
        self.reasons: dict[int, str] = {}
        """Why a trial was not measured to its end, the last time; by number."""
        self.last_unix_s = 0.0
        """When the last row was written."""
        self._gains: list[Gain] = []
        self._samples: dict[int, list[Sample]] = defaultdict(list)
        self._tokens = 1
        self._since: list[tuple[Measured, Sample | None]] = []

    @property
    def gain(self) -> Gain | None:
        """Of the incumbent over the starting point, from all adoptions; None: there was none."""
        if not self._gains:
            return None
        left = math.prod(1 - one.share for one in self._gains)
        return Gain(1 - left, left * math.sqrt(sum((one.error / (1 - one.share)) ** 2 for one in self._gains)))

    def _count(self, seconds: float, spent_s: float, incumbent_s: float) -> None:
        share = 0.0 if self.gain is None else self.gain.share
        self.account.add(seconds, spent_s=spent_s, incumbent_s=incumbent_s, gain=share)

    def go_on(self, seconds: float) -> None:
        """Count time that the incumbent trained for and no row tells of."""
        self._count(seconds, 0.0, seconds)

    def step_ms(self, trial: int) -> float | None:
        """Of a trial's newest measurements together; None: it has none that count."""
        samples = self._samples.get(trial)
        return score(samples) * self._tokens / 1e3 if samples else None

    def measure(self, trial: TrialRecord, row: Measurement) -> None:
        """Take in the next measurement."""
        status, discarded, tokens = _about(row)
        steps = list(row.steps_ms) or [row.step_ms] * row.steps
        seconds, count = (sum(steps) + sum(discarded)) / 1e3, len(steps) + len(discarded)
        incumbent_ms = self.step_ms(self.incumbent)
        self._between(row, incumbent_ms)
        challenged = row.role not in OF_INCUMBENT
        incumbent_s = seconds if incumbent_ms is None or not challenged else count * incumbent_ms / 1e3
        self._count(seconds, max(0.0, seconds - incumbent_s), incumbent_s)
        sample = Sample.of(steps, _interval(trial.knobs), tokens)
        sample_or_none = sample if sample.token_us else None
        if row.role != "hold":
            again = row.role == "start" and incumbent_ms is not None  # after a resumption
            self.measurements += status in ("measured", "aborted") and not again
            self._keep(trial.number, status, sample_or_none, tokens, row.void_reason)
        one = Measured(
            number=len(self.measured) + 1, trial=trial.number, role=row.role, status=status, reason=row.void_reason,
            steps=len(steps), seconds=seconds, ended_s=self.account.elapsed_s, incumbent=self.incumbent,
            incumbent_step_ms=self.step_ms(self.incumbent), **_figures(sample_or_none, tokens, [*steps, *discarded]),
        )  # fmt: skip
        self.measured.append(one)
        self._since.append((one, sample_or_none))
        self.last_unix_s = max(self.last_unix_s, _written(row))

    def _between(self, row: Measurement, incumbent_ms: float | None) -> None:
        """Count the steps before a measurement: under the incumbent, and under a setting on its way in or out."""
        seconds, late_s, late_steps = row.aggregates.get("between") or (0.0, 0.0, 0)
        self._count(seconds, 0.0, seconds)
        incumbent_s = late_s if not incumbent_ms else late_steps * incumbent_ms / 1e3
        self._count(late_s, max(0.0, late_s - incumbent_s), incumbent_s)

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

    def decide(self, decision: Decision, trial: int | None) -> None:
        """Take in the next decision."""
        details = decision.details
        before = self.incumbent
        elapsed_s, spent_s = (details.get(name, 0.0) for name in ("elapsed_s", "spent_s"))
        more_s = elapsed_s - self.account.elapsed_s
        if more_s > _ROUNDED_S:  # no measurement tells of it: the incumbent trained meanwhile
            cost_s = max(0.0, spent_s - self.account.spent_s)
            self._count(more_s, cost_s, more_s - cost_s)
        self._take_effect(decision, trial)
        self.decided.append(
            Decided(
                decision=decision, trial=trial, at_s=self.account.elapsed_s, incumbent=before,
                measured=tuple(one.number for one, _ in self._since),
            )
        )  # fmt: skip
        self._since.clear()
        self.last_unix_s = max(self.last_unix_s, decision.at_unix_s)

    def _take_effect(self, decision: Decision, trial: int | None) -> None:
        if decision.kind == "adopt" and trial is not None:
            self._gains.append(Gain(decision.details.get("gain", 0.0), decision.details.get("error", 0.0)))
            self._samples[trial] = self._new("b") or self._new("explore")
            self.incumbent = trial
        elif decision.kind == "start" and self.start_step_ms is None:
            self.start_step_ms = self.step_ms(self.incumbent)
        elif decision.kind == "memory" and trial is not None:
            self.incumbent = trial
        elif decision.kind == "guard":
            self._gains.clear()
            self.incumbent = 0
        elif decision.kind == "rollback":
            del self._gains[-1:]
            self.incumbent = int(decision.details.get("pinned", 0))
        elif decision.kind == "reopen":
            self._samples.clear()
            self._samples[self.incumbent] = self._new("start")
            self.measurements = 0

    def _new(self, role: str) -> list[Sample]:
        """Valid measurements since the last decision."""
        return [s for one, s in self._since if (one.role, one.status) == (role, "measured") and s is not None]


def replay(
    trials: Sequence[TrialRecord], measurements: Mapping[int, Sequence[Measurement]], decisions: Sequence[Decision]
) -> Replay:
    """Go through the rows of a run.

    Args:
        trials: in order.
        measurements: by the trials' ids.
        decisions: in order.
    """
    told = Replay()
    by_id = {row.trial_id: row for row in trials}
    rows = [(trial, row) for trial in trials for row in measurements.get(trial.trial_id, ())]
    rows.sort(key=lambda pair: pair[1].aggregates.get("sequence", pair[1].began_unix_s))
    next_row = 0
    for decision in decisions:
        while next_row < len(rows) and _written(rows[next_row][1]) <= decision.at_unix_s + _CLOCK_S:
            told.measure(*rows[next_row])
            next_row += 1
        about = by_id.get(decision.trial_id) if decision.trial_id is not None else None
        told.decide(decision, None if about is None else about.number)
    for pair in rows[next_row:]:
        told.measure(*pair)
    return told


def _about(row: Measurement) -> tuple[str, list[float], int]:
    """Status, discarded steps and tokens of a step."""
    about: Mapping[str, Any] = row.aggregates
    status = about.get("status", "measured" if row.void_reason is None else "void")
    tokens = about.get("tokens") or (round(1e3 * row.step_ms / row.token_us) if row.token_us else 1)
    return status, list(about.get("discarded_ms", ())), max(1, tokens)


def _written(row: Measurement) -> float:
    """Wall clock at its end, when it was written down."""
    _, discarded, _ = _about(row)
    return row.began_unix_s + (sum(row.steps_ms) + sum(discarded)) / 1e3


def _interval(knobs: Mapping[str, Any]) -> int:
    value = knobs.get("update_interval")
    return value if isinstance(value, int) and value > 0 else 1


def _figures(sample: Sample | None, tokens: int, steps_ms: Sequence[float]) -> dict[str, float | None]:
    if sample is None:
        mean = sum(steps_ms) / len(steps_ms) if steps_ms else None
        return {"step_ms": mean, "error_ms": None, "noise": None}
    step_ms, noise = score([sample]) * tokens / 1e3, spread([sample])
    return {
        "step_ms": step_ms,
        "error_ms": _OF_MEDIAN * noise / math.sqrt(len(sample.token_us)) * step_ms,
        "noise": noise,
    }
