"""How much faster one setting is than another, and whether that is enough to adopt it.

Adoption is a sequential test of "not faster": the ratio of likelihoods of a half-normal mixture over gains and of no
gain has an expectation of at most 1 whenever it is looked at, so it may be looked at after every unit. The j-th
challenger has an error of `WRONG` / (j (j + 1)), which sums to `WRONG` over all of them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

WRONG = 0.003
"""Nominal share of searches that adopt what is not faster."""
EFFECT = 0.05
"""Standard deviation of true gains in the mixture: the test is most powerful there."""
ERRORS = 2.0
"""Standard errors that are stated as noise."""


@dataclass(frozen=True, slots=True)
class Gain:
    """How much faster one setting is than another."""

    share: float
    """Of the other's time that is saved; below 0: it is slower."""
    error: float
    """Standard error of it."""

    @classmethod
    def of_log(cls, gain: float, error: float) -> Gain:
        """From a difference of logarithms and its standard error."""
        left = math.exp(-gain)
        return cls(1.0 - left, left * error)

    @property
    def saves(self) -> float:
        """Share of the time that counts as saved in a step that is taken now."""
        return self.share

    @property
    def beyond_noise(self) -> bool:
        """Whether the two differ by more than noise explains."""
        return abs(self.share) > ERRORS * self.error + 1e-9  # simulated times have rounding errors alone

    @property
    def holds(self) -> bool:
        """Whether it is faster beyond noise."""
        return self.share > 0 and self.beyond_noise

    def __str__(self) -> str:
        return f"{100 * self.share:.1f} +/- {200 * self.error:.1f}%"


def log_evidence(gains: Sequence[float], weights: Sequence[float], variance: float) -> float:
    """Logarithm of the likelihood ratio of "faster by some gain" over "not faster".

    Args:
        gains: of units, as differences of logarithms.
        weights: the variance of a gain is `variance` over its weight.
    """
    n = sum(weights)
    if n == 0:
        return 0.0
    mean = sum(weight * gain for weight, gain in zip(weights, gains, strict=True)) / n
    total = variance + n * EFFECT**2
    z = n * mean * EFFECT / math.sqrt(variance * total)
    share = 0.5 * math.erfc(-z / math.sqrt(2))
    if share <= 0:
        return -50.0
    return math.log(2 * share) + 0.5 * math.log(variance / total) + z**2 / 2


def needed_evidence(order: int) -> float:
    """What `log_evidence` has to reach for the challenger number `order`, from 1."""
    return math.log(order * (order + 1) / WRONG)
