"""Figures of a search: what a measurement is worth, how sure a gain is, what exploring costs, and when times change.

A step of a window often waits for what the others do not, so that the median of all steps would not see the stall.
The score is therefore a mean over the steps of a window, of each the median over the windows; where windows have one
step, that is the plain median.

The noise of a score, and of a mean, is what steps differ by at the same place of a window. Slow steps come in runs, so
that neighbours tell less than as many independent steps would: errors grow by their correlation. `zftune compare` and
the search use the same functions, so that they agree about the same two runs (studies/022-noise has the coverage).

Other work that comes and goes within seconds is noise between measurements, which no number of steps in one averages
out: what measurements of the same setting differ by, beyond their own noise, counts once for each measurement.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean, median

import numpy as np
from numpy.typing import NDArray
from torch import nn

from zenflow import StepStats
from zftune.planner.rates import Rates
from zftune.store.types import Ratios

OTHER_TIMES = 0.10
"""Of the incumbent's time: where a comparison's measurement of it differs by so much, times have changed."""
_BUSY_LINK = 0.05
"""Of a step: where it waits so long for gradients on their way, the link was busy all the time."""


@dataclass(frozen=True, slots=True)
class Load:
    """What steps showed of the work that a training has for the device and the host."""

    elements: int
    """Of the weights that could be offloaded."""
    busy_ms: float | None
    """Of a step without its stall; None where there was none that tells."""
    host_bytes: int
    """Memory traffic of all host updates."""
    host_ms: float
    """Their time."""

    @classmethod
    def of(cls, steps: Sequence[StepStats], module: nn.Module) -> Load:
        """From the steps of a warm-up."""
        busy = [busy_ms(one) for one in steps if one.step_ms and one.stall_ms is not None]
        return cls(
            elements=sum(one.numel() for one in module.parameters() if one.requires_grad and one.dim() >= 2),
            busy_ms=statistics.median(busy) if busy else None,
            host_bytes=sum(one.host_bytes for one in steps),
            host_ms=sum(one.host_ms for one in steps),
        )


def busy_ms(step: StepStats) -> float:
    """Of a step without what it waited because of offloading; what ranks wait for each other is in it."""
    offloading = sum(ms for cause, ms in (step.stall_ms or {}).items() if cause != "comm")
    return (step.step_ms or 0.0) - offloading


def ratios_of(load: Load, rates: Rates) -> Ratios | None:
    """Ratios of a training: as its steps show them, and where they do not, as its rates say. None: there are none.

    They are those of the whole model, of ranks that share it of each one's rows, whatever share of it the steps had on
    the host.
    """
    compute_ms = rates.compute_ms if load.busy_ms is None else load.busy_ms
    elements = load.elements / rates.ranks
    host_ms = _measured_host(load, rates).host_ms(elements, 1)
    if not compute_ms > 0:
        return None
    found = (host_ms / compute_ms, rates.down_ms(elements) / compute_ms)
    return Ratios(*found) if all(math.isfinite(one) and one > 0 for one in found) else None


def _measured_host(load: Load, rates: Rates) -> Rates:
    """With the bandwidth that the host's updates had: whatever limited them is in it."""
    if not load.host_bytes or not load.host_ms > 0:
        return rates
    return replace(rates, host_gbps=load.host_bytes / load.host_ms / 1e6, update_gelements_s=None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """What the steps of a measurement showed of the resources; None: nothing."""

    busy_ms: float | None = None
    """Of a step without its stall; what ranks wait for each other is in it."""
    host_gbps: float | None = None
    """Of the host's updates."""
    link_gbps: float | None = None
    """Of the gradients' way, known only where steps waited for it."""

    @classmethod
    def of(cls, steps: Sequence[StepStats]) -> Pace | None:
        """From the steps that count; None: they have no stream that would tell."""
        known = [(one, one.step_ms, one.stall_ms) for one in steps if one.step_ms and one.stall_ms is not None]
        if not known:
            return None
        total_ms = math.fsum(ms for _, ms, _ in known)
        waited_ms = math.fsum(stall.get("d2h", 0.0) for _, _, stall in known)
        sent = sum(one.d2h_bytes for one, _, _ in known)
        host_ms, host_bytes = math.fsum(one.host_ms for one, _, _ in known), sum(one.host_bytes for one, _, _ in known)
        return cls(
            busy_ms=math.fsum(busy_ms(one) for one, _, _ in known) / len(known),
            host_gbps=host_bytes / host_ms / 1e6 if host_bytes and host_ms > 0 else None,
            link_gbps=sent / total_ms / 1e6 if sent and waited_ms > _BUSY_LINK * total_ms else None,
        )


def changed(rates: Rates, before: Pace | None, now: Pace) -> Rates:
    """The rates of a machine, and the compute of a step, after a change that moved a setting's pace from `before` to
    `now`.
    """
    if before is None:
        return rates
    compute = _factor(now.busy_ms, before.busy_ms)
    host = _factor(now.host_gbps, before.host_gbps)
    arithmetic = rates.update_gelements_s
    link = 1.0
    if now.link_gbps is not None:  # both directions change together, as a bus does that is shifted down
        link = now.link_gbps / (before.link_gbps or rates.d2h_gbps)
    return replace(
        rates,
        forward_ms=rates.forward_ms * compute,
        backward_ms=rates.backward_ms * compute,
        host_gbps=rates.host_gbps * host,
        update_gelements_s=None if arithmetic is None else arithmetic * host,
        d2h_gbps=rates.d2h_gbps * link,
        h2d_gbps=rates.h2d_gbps * link,
    )


def differs(before: Sequence[Sample], sample: Sample, *, seed: int) -> bool:
    """Whether a measurement of the incumbent differs from those before it by more than `OTHER_TIMES`, a share."""
    if not before:
        return False
    found = gain(before, [sample], seed=seed)
    return abs(found.share) > max(OTHER_TIMES, 2 * found.error)


def _factor(now: float | None, before: float | None) -> float:
    return now / before if now and before else 1.0


LEAST_STEPS = 20
MOST_STEPS = 3 * LEAST_STEPS
"""Of a comparison's measurement, but for filling up windows."""
ABORT_FACTOR = 1.5
_LEAST_ABORTED = 8
LEAST_GAIN = 0.02
ERRORS = 2.0
"""Standard errors that count as noise."""
_RESAMPLES = 400
_LEAST_FOR_CORRELATION = 8
"""Steps: fewer do not show whether neighbours are alike."""
_MOST_CORRELATION = 0.9
_DEPARTURE = 0.15
"""Of the usual step time: steps that are all farther off than that are no noise."""
_DEPARTED_STEPS = 8
_LEAST_WINDOWS = 2
_NEWEST_CHANGES = 5

Array = NDArray[np.float64]


def steps_of(interval: int, least: int = LEAST_STEPS) -> int:
    """Steps of a measurement: whole windows of `interval` steps (S), at least two of them."""
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
        """From steps in order, the first of a window first; an incomplete last window is left out."""
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
    """Standard error of it."""
    counted: float | None = None
    """What of `share` counts as saved, where times have changed since parts of it were measured; None: all of it."""

    @property
    def saves(self) -> float:
        """Share of the time that counts as saved in a step that is taken now."""
        return self.share if self.counted is None else self.counted

    @property
    def reverse(self) -> Gain:
        """Of the other over this one."""
        left = 1 / (1 - self.share)
        return Gain(1 - left, left**2 * self.error)

    @property
    def beyond_noise(self) -> bool:
        """Whether the two differ by more than noise explains."""
        return abs(self.share) > ERRORS * self.error + 1e-9  # simulated times have rounding errors alone

    @property
    def tells(self) -> bool:
        """Whether its error leaves anything to be said: no setting saves more than all of the time."""
        return ERRORS * self.error <= 1

    @property
    def needed(self) -> float:
        """What it has to exceed for a change of settings."""
        return max(LEAST_GAIN, ERRORS * self.error)

    @property
    def holds(self) -> bool:
        """Whether it is worth a change."""
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


def spread(samples: Sequence[Sample]) -> float | None:
    """Relative noise of single steps: a standard deviation from the median absolute deviation. None: of one window."""
    if all(len(sample.token_us) == sample.interval for sample in samples):
        return None
    left = np.concatenate([_residuals(_joined([sample])).ravel() for sample in samples])
    return 1.4826 * float(np.median(np.abs(left - 1.0)))


def gain(
    before: Sequence[Sample], after: Sequence[Sample], *, seed: int, repeats: Sequence[Sequence[Sample]] = ()
) -> Gain:
    """How much faster `after` is than `before`, each measurements of one setting.

    `repeats`: measurements of the same setting each, which show how far such differ; none: only steps are noise.
    """
    left = score(after) / score(before)
    between = math.sqrt(_variance_between(repeats, seed=seed) * (1 / len(before) + 1 / len(after)))
    errors = relative_error(before, seed=seed), relative_error(after, seed=seed + 1), between
    return Gain(1.0 - left, left * math.hypot(*errors))


def relative_error(samples: Sequence[Sample], *, seed: int) -> float:
    """Standard error of a score as a share of it, by resampling the deviations of steps from their place's median.
    Needs two windows.
    """
    windows = _joined(samples)
    error = float(np.std(_resampled(windows, np.random.default_rng(seed)), ddof=1)) / _score(windows)
    return error * _of_correlation([_clipped(_residuals(sample.windows()).ravel() - 1.0) for sample in samples])


def error_of_mean(values: Sequence[float], interval: int) -> float | None:
    """Standard error of the mean of `values`, one for each step in order; None where there are fewer than two.

    Steps of a window of `interval` steps differ by their place in it, which is no noise. Where there are not two whole
    windows all steps are taken as alike, which gives a larger error.
    """
    if len(values) < 2:
        return None
    rows = len(values) // interval
    whole = np.asarray(values[: rows * interval] if rows >= 2 else values, dtype=np.float64)
    windows = whole.reshape(rows, interval) if rows >= 2 else whole.reshape(-1, 1)
    left = windows - windows.mean(axis=0)
    variance = float((left**2).sum()) / (left.size - left.shape[1])
    widths = left.std(axis=0)  # a place that varies more would hide how alike its neighbours are
    return math.sqrt(variance / len(values)) * _of_correlation([(left / np.where(widths > 0, widths, 1.0)).ravel()])


def steps_for(noise: float | None, interval: int) -> int:
    """Steps of a comparison's measurement, so that the gain's standard error is about 1%; filling a window up may
    exceed `MOST_STEPS`.

    `noise` is the relative standard deviation of single steps; None: not known.
    """
    of_median = 1.2533  # standard error of a median over that of a mean, for a normal distribution
    wanted = math.inf if noise is None else 1.5 * (of_median * noise / 0.01) ** 2  # two measurements against one
    return steps_of(interval, round(min(MOST_STEPS, max(LEAST_STEPS, wanted))))


def too_slow(steps_ms: Sequence[float], interval: int, incumbent_step_ms: float) -> float | None:
    """The abort rule: how many times the incumbent's the score of the windows so far is; None: at most 1.5 times."""
    step_ms = step_ms_of(steps_ms, interval)
    return None if step_ms is None or step_ms <= ABORT_FACTOR * incumbent_step_ms else step_ms / incumbent_step_ms


def step_ms_of(steps_ms: Sequence[float], interval: int) -> float | None:
    """Median step time over whole windows of S = `interval` steps; None: fewer than 8 steps, of which single ones may
    be slow.
    """
    whole = len(steps_ms) // interval * interval
    if whole < _LEAST_ABORTED:
        return None
    return fmean(median(steps_ms[place:whole:interval]) for place in range(interval))


def departure(steps_ms: Sequence[float], interval: int, usual_ms: float) -> float | None:
    """The factor by which the last windows' mean differs from `usual_ms` if all are slower, or all faster; else None.

    `steps_ms` begin with the first step of a window.
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


def _variance_between(repeats: Sequence[Sequence[Sample]], *, seed: int) -> float:
    """What scores of the same setting differ by, squared, beyond the noise of their steps: a method of moments."""
    squares, freedom = 0.0, 0
    for samples in repeats:
        count = len(samples)
        within = fmean(relative_error([one], seed=seed) ** 2 for one in samples)
        scores = [math.log(score([one])) for one in samples]
        squares += (count - 1) * ((statistics.variance(scores) if count > 1 else 0.0) - within)
        freedom += count - 1
    return max(0.0, squares / freedom) if freedom else 0.0


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


def _clipped(residuals: Array) -> Array:
    """Without far outliers, which a median does not follow either."""
    width = 3 * 1.4826 * float(np.median(np.abs(residuals)))
    clipped: Array = np.clip(residuals, -width, width)
    return clipped


def _of_correlation(series: Sequence[Array]) -> float:
    """By how much errors grow where neighbours are alike: sqrt((1 + r) / (1 - r)), as for an AR(1) process.

    An estimate of r from few steps is too small by about (1 + 4 r) / n (Kendall 1954), which is put right.
    """
    centred = [one - one.mean() for one in series]
    power = sum(float((one**2).sum()) for one in centred)
    steps = sum(map(len, centred)) / len(centred)
    if power == 0.0 or steps < _LEAST_FOR_CORRELATION:
        return 1.0
    found = sum(float((one[1:] * one[:-1]).sum()) for one in centred) / power
    correlation = min(max((steps * found + 1) / (steps - 4), 0.0), _MOST_CORRELATION)
    return math.sqrt((1 + correlation) / (1 - correlation))


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
        """Count time of steps, discarded ones too; `incumbent_step_s` None: the incumbent itself ran."""
        self.elapsed_s += seconds
        if incumbent_step_s is not None:
            self.spent_s += max(0.0, seconds - steps * incumbent_step_s)

    def catch_up(self, spent_s: float, elapsed_s: float) -> None:
        """Take in what others have counted: a search that was made anew from its rows does not know of the rest."""
        self.spent_s, self.elapsed_s = max(self.spent_s, spent_s), max(self.elapsed_s, elapsed_s)

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

    def add_all(self, steps_ms: Sequence[float], interval: int) -> bool:
        """Take in the whole windows of steps, from the first of a window; whether times have changed in one of them."""
        windows = (steps_ms[begin : begin + interval] for begin in range(0, len(steps_ms) - interval + 1, interval))
        changes = [self.add(sum(window) / interval) for window in windows]  # all of them are taken in
        return any(changes)

    def reset(self) -> None:
        """Forget what was usual."""
        self._usual.clear()
        self._up = self._down = 0.0


def describe(sample: Sample) -> tuple[float, float | None]:
    """A measurement's score and the median absolute deviation of its steps, microseconds per token; None: of one."""
    values = np.asarray(sample.token_us)
    deviation = float(np.median(np.abs(values - np.median(values)))) if len(values) > 1 else None
    return score([sample]), deviation
