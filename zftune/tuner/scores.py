"""Figures of a search: what a measurement is worth, how sure a gain is, what exploring costs, and when times change.

A step of a window often waits for what the others do not, so that the median of all steps would not see the stall.
The score is therefore a mean over the steps of a window, of each the median over the windows; where windows have one
step, that is the plain median.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

LEAST_STEPS = 20
MOST_STEPS = 3 * LEAST_STEPS
"""Of a comparison's measurement, but for filling up windows."""
ABORT_FACTOR = 1.5
LEAST_GAIN = 0.02
_RESAMPLES = 400
_DEPARTURE = 0.15
"""Of the usual step time: steps that are all farther off than that are no noise."""
_DEPARTED_STEPS = 8
_LEAST_WINDOWS = 2
_NEWEST_CHANGES = 5

Array = NDArray[np.float64]


def steps_of(interval: int, least: int = LEAST_STEPS) -> int:
    """Steps of a measurement: whole windows, at least two of them.

    Args:
        interval: S, steps of a window.
        least: steps at least.
    """
    return interval * max(2, -(-least // interval))


@dataclass(frozen=True, slots=True)
class Sample:
    """Measured times of whole windows, in order."""

    token_us: tuple[float, ...]
    """Of each step."""
    interval: int
    """S."""

    @classmethod
    def of(cls, steps_ms: Sequence[float], interval: int, tokens: int) -> Sample:
        """From steps; those of a window that is not whole are left out.

        Args:
            steps_ms: of a measurement, in order, from the first step of a window on.
            interval: S.
            tokens: of a step.
        """
        whole = len(steps_ms) // interval * interval
        return cls(tuple(1e3 * step / tokens for step in steps_ms[:whole]), interval)

    def windows(self) -> Array:
        """[windows, S] microseconds per token."""
        return np.asarray(self.token_us, dtype=np.float64).reshape(-1, self.interval)


@dataclass(frozen=True, slots=True)
class Gain:
    """How much faster one setting is than another."""

    share: float
    """Of the other's time that is saved; below 0: it is slower."""
    error: float
    """Bootstrap standard error of it."""

    @property
    def needed(self) -> float:
        """What it has to exceed to be believed."""
        return max(LEAST_GAIN, 2 * self.error)

    @property
    def holds(self) -> bool:
        """Whether it is believed."""
        return self.share > self.needed

    def __str__(self) -> str:
        return f"{100 * self.share:.1f} +/- {200 * self.error:.1f}%"


def in_a_row(gains: Sequence[Gain]) -> Gain | None:
    """The gain of the last over the first, where each is over the one before; None: there was none."""
    if not gains:
        return None
    left = math.prod(1 - one.share for one in gains)
    relative = math.sqrt(sum((one.error / (1 - one.share)) ** 2 for one in gains))
    return Gain(1 - left, left * relative)


def score(samples: Sequence[Sample]) -> float:
    """Microseconds per token of one setting's measurements together."""
    return _score(_joined(samples))


def spread(samples: Sequence[Sample]) -> float:
    """Relative noise of single steps: a standard deviation from the median absolute deviation."""
    left = np.concatenate([_residuals(_joined([sample])).ravel() for sample in samples])
    return 1.4826 * float(np.median(np.abs(left - 1.0)))


def gain(before: Sequence[Sample], after: Sequence[Sample], *, seed: int) -> Gain:
    """How much faster `after` is than `before`.

    Args:
        before: measurements of one setting.
        after: measurements of another one.
        seed: of the bootstrap.
    """
    old, new = _joined(before), _joined(after)
    random = np.random.default_rng(seed)
    shares = 1.0 - _resampled(new, random) / _resampled(old, random)
    return Gain(1.0 - _score(new) / _score(old), float(np.std(shares, ddof=1)))


def steps_for(noise: float, interval: int, *, error: float = 0.01, most: int = MOST_STEPS) -> int:
    """Steps of a comparison's measurement, so that the gain's standard error is about `error`.

    Args:
        noise: relative standard deviation of single steps.
        interval: S.
        error: wanted.
        most: steps, but for filling up windows.
    """
    of_median = 1.2533  # standard error of a median over that of a mean, for a normal distribution
    wanted = 1.5 * (of_median * noise / error) ** 2  # two measurements against one
    return steps_of(interval, round(min(most, max(LEAST_STEPS, wanted))))


def too_slow(steps_ms: Sequence[float], interval: int, incumbent_step_ms: float) -> float | None:
    """The abort rule: the first whole window whose mean exceeds 1.5 times the incumbent's; its factor, or None."""
    return next((factor for factor in _factors(steps_ms, interval, incumbent_step_ms) if factor > ABORT_FACTOR), None)


def departure(steps_ms: Sequence[float], interval: int, usual_ms: float) -> float | None:
    """Whether the last windows are all slower, or all faster, than is usual; their mean's factor, or None.

    Args:
        steps_ms: from the first step of a window on.
        interval: S.
        usual_ms: a step's time.
    """
    count = max(_LEAST_WINDOWS, -(-_DEPARTED_STEPS // interval))
    windows = len(steps_ms) // interval
    if windows < count:
        return None
    factors = _factors(steps_ms[(windows - count) * interval :], interval, usual_ms)
    all_beyond = min(factors) > 1 + _DEPARTURE or max(factors) < 1 - _DEPARTURE
    return sum(factors) / count if all_beyond else None


def _factors(steps_ms: Sequence[float], interval: int, usual_ms: float) -> list[float]:
    """Of each whole window's mean. Asked after each step of a training: NumPy would take ten times as long."""
    whole = range(0, len(steps_ms) - interval + 1, interval)
    return [sum(steps_ms[begin : begin + interval]) / interval / usual_ms for begin in whole]


def _joined(samples: Sequence[Sample]) -> Array:
    return np.concatenate([sample.windows() for sample in samples])


def _score(windows: Array) -> float:
    return float(np.median(windows, axis=0).mean())


def _residuals(windows: Array) -> Array:
    """Each step over the median of its place in the window, as wide as if that median were known for sure."""
    count = len(windows)
    left = windows / np.median(windows, axis=0)
    residuals: Array = 1.0 + (left - 1.0) * math.sqrt(count / (count - 1)) if count > 1 else left
    return residuals


def _resampled(windows: Array, random: np.random.Generator) -> Array:
    """[resamples] scores. Residuals are drawn from all places of the window: few windows have few of each."""
    residuals = _residuals(windows).ravel()
    drawn = random.choice(residuals, size=(_RESAMPLES, *windows.shape))
    scores: Array = (np.median(windows, axis=0) * np.median(drawn, axis=1)).mean(axis=1)
    return scores


@dataclass(slots=True)
class ExplorationCost:
    """What exploring has cost, and what it may: 3% of the elapsed time plus a grant.

    The cost of a trial is the positive part of its time less the incumbent's time for the same tokens. The changes to
    its knobs and back belong to it: they move state between device and host.
    """

    share: float = 0.03
    grant_s: float = 60.0
    grant_steps: int = 40
    """The grant is whichever is the longer of the two, so that slow steps can be explored too."""
    spent_s: float = 0.0
    elapsed_s: float = 0.0
    start_step_s: float = 0.0
    """Of the grant's steps: as they were when the search began. What slows a run down later grants no more."""
    _changes_s: deque[float] = field(default_factory=lambda: deque(maxlen=_NEWEST_CHANGES))

    def add(self, seconds: float, steps: int, incumbent_step_s: float | None) -> None:
        """Count time that passed.

        Args:
            seconds: of all steps, discarded ones too.
            steps: how many.
            incumbent_step_s: of the incumbent; None: it is the incumbent that ran.
        """
        self.elapsed_s += seconds
        if incumbent_step_s is not None:
            self.spent_s += max(0.0, seconds - steps * incumbent_step_s)

    def begin(self, step_s: float) -> None:
        """Take the incumbent's step time as the one that the search begins with, unless it has begun."""
        self.start_step_s = self.start_step_s or step_s

    def changed(self, seconds: float, steps: int, incumbent_step_s: float) -> None:
        """Learn what changes of knobs cost; the arguments are those of `add`, which counts them."""
        self._changes_s.append(max(0.0, seconds - steps * incumbent_step_s))

    @property
    def change_s(self) -> float:
        """What the change to a trial's knobs or back may cost: the most of the last few."""
        return max(self._changes_s, default=0.0)

    @property
    def allowed_s(self) -> float:
        """What may be spent, all in all."""
        return self.share * self.elapsed_s + max(self.grant_s, self.grant_steps * self.start_step_s)

    @property
    def left_s(self) -> float:
        """What may still be spent."""
        return self.allowed_s - self.spent_s


@dataclass(slots=True)
class ChangePoint:
    """A two-sided CUSUM test on the logarithm of window times.

    The first windows say what is usual. Then shifts beyond an allowance add up, and where the sum is too large to be
    noise, times have changed.
    """

    learn: int = 24
    """Windows that say what is usual."""
    least_shift: float = 0.02
    """Allowance at least: a shift as small as this is never called a change."""
    threshold: float = 10.0
    """In standard deviations of a window's time."""
    _usual: list[float] = field(default_factory=list)
    _up: float = 0.0
    _down: float = 0.0

    def add(self, window_ms: float) -> bool:
        """Take a window's mean step time; whether times have changed. After a change it learns anew."""
        value = math.log(window_ms)
        if len(self._usual) < self.learn:
            self._usual.append(value)
            return False
        middle, width = float(np.median(self._usual)), max(float(np.std(self._usual, ddof=1)), 0.005)
        allowance = max(1.5 * width, self.least_shift)
        self._up = max(0.0, self._up + value - middle - allowance)
        self._down = max(0.0, self._down + middle - value - allowance)
        if max(self._up, self._down) <= self.threshold * width:
            return False
        self.reset()
        return True

    def reset(self) -> None:
        """Forget what was usual."""
        self._usual.clear()
        self._up = self._down = 0.0


def describe(sample: Sample) -> tuple[float, float]:
    """A measurement's score and the median absolute deviation of its steps, microseconds per token."""
    values = np.asarray(sample.token_us)
    return score([sample]), float(np.median(np.abs(values - np.median(values))))
