"""The value of a block of steps, the noise of such values, and whether they prove that a setting is faster.

A block is a number of whole windows, at least as long as a selection period. Its value is the logarithm of the mean
step, in which a plain step counts for at most `CAP` medians: a rare hiccup says nothing about a setting. Steps that
select or exchange columns count in full, and so does the wait of each window: they are what the setting costs.

Adoption is a sequential test of "not faster": the ratio of likelihoods of a half-normal mixture over gains and of no
gain has an expectation of at most 1 whenever it is looked at, so it may be looked at after every unit. The j-th
challenger has an error of `WRONG` / (j (j + 1)), which sums to `WRONG` over all of them.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

BLOCK_STEPS = 16
"""Of a block, at least: a selection period."""
MOST_BLOCK_STEPS = 64
CAP = 2.5
WRONG = 0.003
"""Nominal share of searches that adopt a setting that is not faster."""
EFFECT = 0.05
"""Standard deviation of true gains in the mixture: the test is most powerful there."""
ERRORS = 2.0
"""Standard errors that are reported as noise."""


def block_steps(interval: int, wanted: int = BLOCK_STEPS) -> int:
    """Steps of a block: whole windows of `interval` steps, at least `wanted` within the bounds of a block."""
    return interval * -(-min(MOST_BLOCK_STEPS, max(BLOCK_STEPS, wanted)) // interval)


def block_value(steps_ms: Sequence[float], moves: Sequence[bool] = (), window: int = 1) -> float:
    """Logarithm of the winsorised mean step in ms; `moves` marks steps that selected or exchanged columns.

    Medians are over all steps, or over those of one place in each `window` where these are longer: there it waits.
    """
    middle, flags = statistics.median(steps_ms), moves or (False,) * len(steps_ms)
    usual = [max(middle, statistics.median(steps_ms[at::window])) for at in range(min(window, len(steps_ms)))]
    most = (CAP * usual[at % window] for at in range(len(steps_ms)))
    kept = (ms if full else min(ms, cap) for ms, full, cap in zip(steps_ms, flags, most, strict=True))
    return math.log(statistics.fmean(kept))


def block_values(steps_ms: Sequence[float], moves: Sequence[bool], size: int, window: int = 1) -> list[float]:
    """Values of consecutive blocks of `size` steps; a remainder at the end joins the last block."""
    cuts = [*range(0, size * max(1, len(steps_ms) // size), size), len(steps_ms)]
    return [block_value(steps_ms[begin:end], moves[begin:end], window) for begin, end in pairwise(cuts)]


@dataclass(slots=True)
class BlockNoise:
    """Variance of a block's value, pooled over all differences between values that should be equal."""

    squares: float = 0.0
    freedom: float = 0.0

    def add(self, difference: float, factor: float) -> None:
        """Take a difference whose variance is `factor` times that of a block."""
        self.squares += difference**2 / factor
        self.freedom += 1

    @property
    def variance(self) -> float:
        """The pooled estimate; a small floor where values are free of noise."""
        return max(1e-8, self.squares / self.freedom) if self.freedom else 1.0

    @property
    def cautious(self) -> float:
        """The same, enlarged by what few degrees of freedom may hide."""
        return self.variance * (1 + 8 / self.freedom) if self.freedom else 1.0


@dataclass(frozen=True, slots=True)
class Gain:
    """How much faster one setting is than another."""

    share: float
    """Of the other's time that is saved; below 0: it is slower."""
    error: float
    """Standard error of it."""

    @classmethod
    def of_log(cls, gain: float, error: float) -> Gain:
        left = math.exp(-gain)
        return cls(1.0 - left, left * error)

    @property
    def holds(self) -> bool:
        """Whether noise does not explain it."""
        return self.share > ERRORS * self.error + 1e-9  # simulated times have rounding errors alone

    def __str__(self) -> str:
        return f"{100 * self.share:.1f} +/- {200 * self.error:.1f}%"


def mean_gain(gains: Sequence[float], weights: Sequence[float], variance: float) -> tuple[float, float]:
    """Mean gain of units and its standard error; the variance of a gain is `variance` over its weight."""
    total = sum(weights)
    mean = sum(weight * gain for weight, gain in zip(weights, gains, strict=True)) / total
    return mean, math.sqrt(variance / total)


def log_evidence(gains: Sequence[float], weights: Sequence[float], variance: float) -> float:
    """Logarithm of the likelihood ratio of "faster by some gain" over "not faster"; arguments as of `mean_gain`."""
    n = sum(weights)
    if n == 0:
        return 0.0
    mean, _ = mean_gain(gains, weights, variance)
    total = variance + n * EFFECT**2
    z = n * mean * EFFECT / math.sqrt(variance * total)
    share = 0.5 * math.erfc(-z / math.sqrt(2))
    if share <= 0:
        return -50.0
    return math.log(2 * share) + 0.5 * math.log(variance / total) + z**2 / 2


def needed_evidence(order: int) -> float:
    """What `log_evidence` has to reach for the challenger number `order`, from 1."""
    return math.log(order * (order + 1) / WRONG)
