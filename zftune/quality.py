"""What stands beside the speed of a training: its loss, and how much of the gradient is fresh. Needs no torch."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean
from typing import Any, Literal

from zftune.words import TRENDS

Trend = Literal["falling", "rising", "level", "unknown"]
LEAST_FOR_TREND = 8
"""Losses, below which noise and trend cannot be told apart."""
_ERRORS = 2.0
_FAR_BELOW = 0.25
"""Of the gradient energy: by so much less than what is assumed, a coverage is worth a warning."""
_PUBLISHED_COVERAGE, _PUBLISHED_TOPK = 0.889, 0.01


@dataclass(frozen=True, slots=True)
class LossSummary:
    """Of consecutive losses."""

    first: float
    """Mean of the first quarter."""
    last: float
    """Mean of the last quarter."""
    error: float | None
    """Two standard errors of either; None: there are too few losses to know."""
    trend: Trend
    """"level": the two differ by no more than their noise."""
    count: int

    def __str__(self) -> str:
        if self.trend == "unknown":
            return f"{figure(self.first, self.error)} → {figure(self.last, self.error)}"
        noise = f" ± {figure(self.error or 0.0, self.error)}"
        what = TRENDS[self.trend]
        return f"{figure(self.first, self.error)} → {figure(self.last, self.error)}{noise}, {what}"


def summary(losses: Sequence[float]) -> LossSummary | None:
    """What losses show; None where there are none.

    Noise is what neighbours differ by, so that a trend is none.

    Args:
        losses: finite ones, oldest first, each of one step or the mean of equally many.
    """
    if not losses:
        return None
    quarter = max(1, len(losses) // 4)
    first, last = fmean(losses[:quarter]), fmean(losses[-quarter:])
    if len(losses) < LEAST_FOR_TREND:
        return LossSummary(first, last, None, "unknown", len(losses))
    noise = math.sqrt(fmean((b - a) ** 2 for a, b in pairwise(losses)) / 2)
    error = _ERRORS * noise / math.sqrt(quarter)
    apart = abs(last - first) > math.sqrt(2) * error
    return LossSummary(first, last, error, ("rising" if last > first else "falling") if apart else "level", len(losses))


def figure(value: float, error: float | None) -> str:
    """A loss with no more digits than its error leaves: the digit that the error changes is the last one.

    Args:
        value: of the loss, or of an error.
        error: of it; None: not known, so that three digits are shown.
    """
    if not error or not math.isfinite(error):
        return f"{value:.3g}"
    digits = -math.floor(math.log10(error))
    return f"{value:.{min(6, digits)}f}" if digits > 0 else f"{round(value, digits):.0f}"


def assumed_coverage(topk_ratio: float) -> float:
    """Share of the gradient's energy in the top columns, where nobody has measured it.

    A power law through the one published point, 88.9% in the top 1% (DeepSpeed ZenFlow blog, figure 5, one layer): an
    assumption.
    """
    exponent = math.log(_PUBLISHED_COVERAGE) / math.log(_PUBLISHED_TOPK)
    return 0.0 if topk_ratio <= 0 else float(topk_ratio**exponent)


def coverage_warning(measured: float | None, knobs: Mapping[str, Any]) -> str | None:
    """What to turn where the selected columns hold far less of the gradient than is assumed; None: nothing.

    Args:
        measured: share of the gradient energy in the selected columns; None: not known.
        knobs: that it was measured under.
    """
    ratio, interval = knobs.get("topk_ratio"), knobs.get("update_interval")
    synchronous = interval == 1 and knobs.get("overlap_step") is False
    if measured is None or synchronous or not isinstance(ratio, int | float) or not 0 < ratio < 1:
        return None
    assumed = assumed_coverage(ratio)
    if assumed - measured < _FAR_BELOW:
        return None
    shorter = "" if interval == 1 else "lower update_interval, "
    return (
        f"The selected columns hold {measured:.0%} of the gradient energy, where {assumed:.0%} is assumed at "
        f"topk_ratio {ratio:g}: the rest reaches the weights late, which may cost loss. Raise topk_ratio, {shorter}or "
        "use quality exact (update_interval 1 with overlap_step off), and compare the losses."
    )
