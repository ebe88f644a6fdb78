"""What the runs say: excess over the synchronous run, intervals over seeds, where rules cross, what predicts harm."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from convergence.setting import Method, Regime, Setting, published

# Quantiles at 97.5% of Student's t with n - 1 degrees of freedom, for n = 2 to 10.
T_975 = {2: 12.706, 3: 4.303, 4: 3.182, 5: 2.776, 6: 2.571, 7: 2.447, 8: 2.365, 9: 2.306, 10: 2.262}
HURTS_PERCENT = 0.3

Runs = Mapping[str, Mapping[str, Any]]
"""Figures by a setting's key."""


@dataclass(frozen=True, slots=True)
class Interval:
    """A mean with its 95% confidence interval; the interval of one value is not known."""

    mean: float
    half: float | None
    n: int

    @property
    def low(self) -> float:
        return self.mean - (self.half or 0.0)

    @property
    def high(self) -> float:
        return self.mean + (self.half or 0.0)


def interval(values: Sequence[float]) -> Interval:
    """Student's t interval of the mean of 1 to 10 values."""
    if len(values) == 1:
        return Interval(values[0], None, 1)
    half = T_975[len(values)] * statistics.stdev(values) / math.sqrt(len(values))
    return Interval(statistics.fmean(values), half, len(values))


def loss(runs: Runs, setting: Setting) -> float | None:
    """A run's held-out loss; None where it did not run or did not end well."""
    found = runs.get(setting.key, {}).get("held_out")
    return None if found is None or not math.isfinite(found) else float(found)


def excess_percent(runs: Runs, setting: Setting) -> float | None:
    """How much higher a run's loss is than the synchronous run's of the same seed, in percent of that."""
    late, synchronous = loss(runs, setting), loss(runs, setting.synchronous())
    return None if late is None or synchronous is None else 100.0 * (late - synchronous) / synchronous


def over_seeds(runs: Runs, setting: Setting, seeds: Iterable[int]) -> Interval | None:
    """Paired excess in percent over the seeds that are there; None if there are none."""
    found = [excess_percent(runs, replace(setting, seed=seed)) for seed in seeds]
    values = [value for value in found if value is not None]
    return interval(values) if values else None


def crossing(points: Iterable[tuple[float, float]]) -> float | None:
    """Where a quantity over the learning rate first rises through 0, between two rates on a logarithmic scale.

    Args:
        points: learning rate and quantity.

    Returns:
        The rate with two digits; None if it does not rise through 0.
    """
    for (low, before), (high, after) in itertools.pairwise(sorted(points)):
        if before <= 0 < after:
            share = -before / (after - before)
            return float(f"{math.exp(math.log(low) + share * math.log(high / low)):.1e}")
    return None


def hurting_rate(runs: Runs, regime: Regime, rates: Iterable[float], lag: int = 4) -> float | None:
    """From which learning rate on replay at S = 4 is more than `HURTS_PERCENT` above the synchronous run."""
    found = ((lr, excess_percent(runs, published(regime, "replay", lr, lag=lag))) for lr in rates)
    return crossing((lr, excess - HURTS_PERCENT) for lr, excess in found if excess is not None)


def rule_rate(runs: Runs, regime: Regime, rates: Iterable[float]) -> float | None:
    """From which learning rate on replay at S = L = 4 is worse than the mean."""
    both: tuple[Method, ...] = ("replay", "mean")
    found = ((lr, [loss(runs, published(regime, rule, lr)) for rule in both]) for lr in rates)
    return crossing((lr, pair[0] - pair[1]) for lr, pair in found if pair[0] is not None and pair[1] is not None)


def ranks(values: Sequence[float]) -> list[float]:
    """Rank of each value, from 1; equal values share the mean of theirs."""
    ordered = sorted(values)
    return [statistics.fmean((ordered.index(v) + 1, len(ordered) - ordered[::-1].index(v))) for v in values]


def rank_correlation(a: Sequence[float], b: Sequence[float]) -> float:
    """Spearman's coefficient."""
    return statistics.correlation(ranks(a), ranks(b))


def separation(values: Sequence[float], hurts: Sequence[bool]) -> float | None:
    """Chance that a setting that hurts has the larger value than one that does not; 1 tells them apart, 0.5 nothing.

    None if all are of one kind. (The area under the ROC curve; Mann and Whitney's U over the number of pairs.)
    """
    bad = [value for value, bad in zip(values, hurts, strict=True) if bad]
    good = [value for value, bad in zip(values, hurts, strict=True) if not bad]
    if not bad or not good:
        return None
    won = sum((b > g) + 0.5 * (b == g) for b in bad for g in good)
    return won / (len(bad) * len(good))


def at_staleness(probes: Mapping[str, Mapping[str, float]], name: str, staleness: float) -> float:
    """A probed quantity at a staleness, between the distances that were measured (linear; 0 at 0)."""
    known = [(0.0, 1.0 if name == "cosine" else 0.0), *sorted((float(d), found[name]) for d, found in probes.items())]
    for (low, before), (high, after) in itertools.pairwise(known):
        if low <= staleness <= high:
            return before + (after - before) * (staleness - low) / (high - low)
    raise ValueError(f"staleness is {staleness}; it must be at most {known[-1][0]:g}, the farthest distance")


def early(probed: Mapping[str, Any], name: str, staleness: float, places: Iterable[int]) -> float | None:
    """Mean of a quantity over some places of the probing run; None where nothing was measured."""
    found = [probed["probes"].get(str(place)) for place in places]
    values = [at_staleness(at, name, staleness) for at in found if at]
    return statistics.fmean(values) if values else None
