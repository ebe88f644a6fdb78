"""What stands beside the speed of a training: its loss, fresh gradients, and what late updates cost. Needs no torch."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean, linear_regression, median
from typing import TYPE_CHECKING, Any, Literal

from zftune import words
from zftune.text import number

if TYPE_CHECKING:
    from zenflow import StepStats

Trend = Literal["falling", "rising", "level", "unknown"]
LEAST_FOR_TREND = 8
"""Losses, below which noise and trend cannot be told apart."""
_ERRORS = 2.0
_FAR_BELOW = 0.25
"""Of the gradient energy: by so much less than what is assumed, a coverage is worth a warning."""
_LATE = ("topk_ratio", "update_interval", "apply_lag")
_PUBLISHED_COVERAGE, _PUBLISHED_TOPK = 0.889, 0.01
EXPECTED_LOSS_PERCENT: Mapping[str, float] = {"exact": 0.0, "published": 0.3, "loose": 1.2}
"""Most that late updates may add to the loss of a long run, by quality, where it is known how far weights move in a
step; less where `MOST_LATE_STEPS` is what ends them."""
MOST_LATE_STEPS = 8.0
"""Of a mean staleness: no study has looked at later updates, however little the weights move."""
GUESSED_LATE_STEPS: Mapping[str, float] = {"exact": 0.0, "published": 4.5, "loose": 8.5}
"""By quality, the mean staleness that costs no more where late weights are guessed: windows of 8 and 16 steps that
close by turns."""
GUESSED_LATE_PERCENT = 5.0
"""Of their norm, by which weights that are guessed moved at most where studies found that to be so (study 003)."""
_LOSS_OF_A_PERCENT = 10.2
"""Percent of the loss at most for late updates by 1% of the weights; it grows with the square (study 003)."""
_LOSS_OF_A_PERCENT_OF_THE_RUN = 1.3
"""Percent of the loss at most for updates that are late by 1% of the run's steps; it comes on top (study 023)."""
_SHORT_RUN_STEPS = 1000
_FEW_LOSSES = 7
_BEFORE = 32
_SPIKE_STEPS = 4
_SPIKE_FACTOR = 1.5
_SPIKE_WIDTHS = 6.0
_SPIKE_FLOOR = 0.02
"""Absolute: a loss that has converged to nearly nothing may rise by so much."""
"""Of which a quarter is one."""
MOST_MEASURED_LOSS_PERCENT = 35
"""Percent of the loss at most that late updates have cost a fine-tuning (study 003); no bound was tested above."""


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
        what = words.TRENDS[self.trend]
        return f"{figure(self.first, self.error)} → {figure(self.last, self.error)}{noise}, {what}"


def summarized(count: int) -> str:
    """What the first and the last figure are of so many losses, in words."""
    return "means of the first and the last quarter" if count > _FEW_LOSSES else "the first and the last"


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
        error: of it; None: not known, so that three digits are shown.
    """
    if not error or not math.isfinite(error):
        return f"{value:.3g}"
    digits = -math.floor(math.log10(error))
    return f"{value:.{min(6, digits)}f}" if digits > 0 else f"{round(value, digits):.0f}"


class LossGuard:
    """Looks at the loss of each step, in order."""

    def __init__(self) -> None:
        self._losses: deque[float] = deque(maxlen=_BEFORE + _SPIKE_STEPS)

    def forget(self) -> None:
        self._losses.clear()

    def add(self, loss: float) -> str | None:
        """Take a step's loss; a reason where training goes wrong, else None.

        A spike is one where the last steps all lie far above the trend before them: one odd batch is none.
        """
        if not math.isfinite(loss):
            return f"the loss is {loss}"
        self._losses.append(loss)
        if len(self._losses) < _BEFORE + _SPIKE_STEPS:
            return None
        losses = list(self._losses)
        before, recent = losses[:_BEFORE], min(losses[_BEFORE:])
        slope, intercept = linear_regression(range(_BEFORE), before)
        expected = intercept + slope * _BEFORE
        middle = median(before)
        width = 1.4826 * median(abs(one - middle) for one in before)
        least = max(_SPIKE_FACTOR * expected, expected + _SPIKE_FLOOR, middle + _SPIKE_WIDTHS * width)
        if expected <= 0 or recent <= least:
            return None
        return (
            f"the loss of the last {_SPIKE_STEPS} steps is at least {recent:.3g}, the trend before was {expected:.3g}"
        )


def went_wrong(step: int, reason: str) -> str:
    """What the guard reports: training goes on, with the settings at the start."""
    return (
        f"Training goes on with the settings at the start, and is tuned no more: at step {step} {reason}. The last "
        f"good checkpoint is the newest from before step {max(1, step - _SPIKE_STEPS + 1)}."
    )


def assumed_coverage(topk_ratio: float) -> float:
    """Share of the gradient's energy in the top columns, where nobody has measured it.

    A power law through the one published point, 88.9% in the top 1% (DeepSpeed ZenFlow blog, figure 5, one layer): an
    assumption.
    """
    exponent = math.log(_PUBLISHED_COVERAGE) / math.log(_PUBLISHED_TOPK)
    return 0.0 if topk_ratio <= 0 else float(topk_ratio**exponent)


@dataclass(frozen=True, slots=True)
class MeasuredCoverage:
    """The same as measured at some ratios, and between them on straight lines. Plain data, so that it can be sent."""

    ratios: tuple[float, ...]
    shares: tuple[float, ...]

    def __call__(self, topk_ratio: float) -> float:
        from numpy import interp

        return float(interp(topk_ratio, self.ratios, self.shares))


def movement_percent(steps: Iterable[StepStats]) -> float | None:
    """How far the deferred weights move in a step, in percent of their norm, over several steps; None: not measured."""
    known = [(one.change_norm, one.weight_norm) for one in steps if one.change_norm is not None and one.weight_norm]
    change, weights = (math.fsum(norms[part] ** 2 for norms in known) for part in (0, 1))
    return 100 * math.sqrt(change / weights) if weights else None


def rates(groups: Iterable[Mapping[str, Any]]) -> tuple[float, ...]:
    """The learning rate of each of an optimizer's groups, as it is now."""
    return tuple(float(group["lr"]) for group in groups)


def at_full_rate(
    percent: float | None, groups: Sequence[Mapping[str, Any]], before: Sequence[float] = ()
) -> float | None:
    """A movement as it will be where the learning rate is at its highest: a warm-up begins with small steps.

    Args:
        percent: as it is now; None: not measured.
        groups: the optimizer's, with what a scheduler keeps in them of its highest rate, if there is one.
        before: `rates` some steps ago: those that have fallen since were at their highest before.

    Returns:
        None where it is not known, as with a rate of 0.
    """
    factor = 1.0
    if _fell(groups, before):
        return percent
    for group in groups:
        rate, highest = float(group["lr"]), highest_rate((group,))
        if highest > rate:
            factor = max(factor, highest / rate) if rate > 0 else math.inf
    return None if percent is None or math.isinf(factor) else percent * factor


def rate_at_full(groups: Sequence[Mapping[str, Any]], before: Sequence[float] = ()) -> float | None:
    """The learning rate that `at_full_rate` tells a movement at, of several the highest; None: there are no groups."""
    return max(rates(groups) if _fell(groups, before) else (highest_rate([group]) for group in groups), default=None)


def _fell(groups: Sequence[Mapping[str, Any]], before: Sequence[float]) -> bool:
    return any(now < was for now, was in zip(rates(groups), before, strict=False))


def highest_rate(groups: Iterable[Mapping[str, Any]]) -> float:
    """The learning rate at its highest, as far as a scheduler keeps it.

    Args:
        groups: the optimizer's; what is no number there, such as a "max_lr" of None, is not known.
    """
    return max(_rate(group.get(name)) for group in groups for name in ("lr", "initial_lr", "max_lr"))


def _rate(value: Any) -> float:
    try:
        return float(value)  # of a tensor, too
    except (TypeError, ValueError):
        return 0.0


def late_percent(movement: float, topk_ratio: float, staleness_steps: float) -> float:
    """By how much of their norm weights move before late updates arrive, in percent.

    Args:
        movement: percent in a step.
        topk_ratio: share of the columns that are never late.
        staleness_steps: mean, of the others.
    """
    return movement * (1 - topk_ratio) * staleness_steps


def expected_loss_percent(
    late: float, late_steps: float = 0.0, run_steps: float = math.inf, *, guesses: bool = False
) -> float:
    """Most that late updates are expected to add to the loss, in percent of it: the bounds of studies 003 and 023.

    Args:
        late: as of `late_percent`.
        late_steps: (1 - k) times the mean staleness.
        run_steps: of the whole training; infinite: so many that the delay itself costs nothing.
        guesses: whether late weights are guessed (`ZenFlowConfig.guesses`).
    """
    if guesses and late <= GUESSED_LATE_PERCENT:
        for quality, most_steps in GUESSED_LATE_STEPS.items():
            if late_steps <= most_steps:
                return EXPECTED_LOSS_PERCENT[quality]
    return _LOSS_OF_A_PERCENT * late**2 + _LOSS_OF_A_PERCENT_OF_THE_RUN * 100 * late_steps / run_steps


def loss_bound(long_run_percent: float, late_steps: float, *, guesses: bool = False) -> str:
    """What late updates may cost, in words."""
    if guesses and long_run_percent <= max(EXPECTED_LOSS_PERCENT.values()):
        return f"up to about {number(long_run_percent)}% of loss, since late weights are guessed"
    most, steps = MOST_MEASURED_LOSS_PERCENT, _SHORT_RUN_STEPS
    if long_run_percent > most:
        return f"possibly more than {most}% of loss, the most that was measured in fine-tuning; more from scratch"
    short = long_run_percent + expected_loss_percent(0.0, late_steps, _SHORT_RUN_STEPS)
    brief = f"{number(short)}%" if short <= most else f"possibly more than {most}%"
    long = f"up to about {number(long_run_percent)}% of loss in a long fine-tuning"
    return f"{long}, {brief} in one of {steps} steps; more from scratch"


def moved_in_a_step(percent: float, learning_rate: float | None) -> str:
    """How far the weights move, in words.

    Args:
        percent: of their norm.
        learning_rate: that it was measured with; None: not known.
    """
    rate = "" if learning_rate is None else f" at learning rate {learning_rate:.3g}".replace("e-0", "e-")
    return f"weights move {number(percent)}% in a step{rate}"


def selected_share(topk_ratio: float) -> float:
    """The share of the columns that are never late, in a coverage's place where movement is what counts."""
    return topk_ratio


def most_late_steps(quality: str, movement: float, *, guesses: bool = False) -> float:
    """The bound of a quality on (1 - `selected_share`) times the mean staleness, in steps.

    Args:
        movement: percent in a step.
        guesses: as of `expected_loss_percent`.
    """
    if guesses:
        return min(GUESSED_LATE_STEPS[quality], GUESSED_LATE_PERCENT / movement if movement > 0 else math.inf)
    most_percent = math.sqrt(EXPECTED_LOSS_PERCENT[quality] / _LOSS_OF_A_PERCENT)
    return min(MOST_LATE_STEPS, most_percent / movement) if movement > 0 else MOST_LATE_STEPS


def allowed_loss_percent(quality: str, movement: float, *, guesses: bool = False) -> tuple[float, str]:
    """What updates as late as a quality allows may add to the loss of a long run, and why no more; "": the quality.

    Args:
        movement: percent in a step.
        guesses: as of `expected_loss_percent`.
    """
    if guesses:
        return EXPECTED_LOSS_PERCENT[quality], ""
    steps = most_late_steps(quality, movement)
    capped = steps == MOST_LATE_STEPS
    why = f"no study has looked at updates that are later than {number(steps)} steps" if capped else ""
    return expected_loss_percent(movement * steps), why


def coverage_warning(
    measured: float | None, knobs: Mapping[str, Any], start: Mapping[str, Any] | None = None, *, tuned: bool = False
) -> str | None:
    """What to turn where the selected columns hold far less of the gradient than is assumed; None: nothing.

    Args:
        measured: share of the gradient energy in the selected columns; None: not known.
        start: of the search that adopted these; None: they are nobody's choice but the user's.
        tuned: whether a search is about to begin, which turns them.
    """
    ratio, interval = knobs.get("topk_ratio"), knobs.get("update_interval")
    synchronous = interval == 1 and knobs.get("overlap_step") is False
    if measured is None or synchronous or not isinstance(ratio, int | float) or not 0 < ratio < 1:
        return None
    assumed = assumed_coverage(ratio)
    if assumed - measured < _FAR_BELOW:
        return None
    adopted = _adopted(knobs, start)
    exact = "quality exact (update_interval 1 with overlap_step off)"
    shorter = "" if interval == 1 else "lower update_interval, "
    advice = f"Raise topk_ratio, {shorter}or use {exact}, and compare the losses."
    if tuned:
        advice = "The search tries only what the quality allows."
    elif adopted:
        advice = (
            f"The search adopted {adopted}, which its quality allows by what it measured: compare the losses with "
            f"those of {exact}."
        )
    return (
        f"The selected columns hold {measured:.0%} of the gradient energy, where {assumed:.0%} is assumed at "
        f"topk_ratio {ratio:g}: the rest reaches the weights late, which may cost loss. {advice}"
    )


def adopted_from(
    knobs: Mapping[str, Any], start: Mapping[str, Any], best: Mapping[str, Any]
) -> Mapping[str, Any] | None:
    """What a search began from, where it has adopted the knobs that hold; None: it has not."""
    return start if dict(knobs) == dict(best) != dict(start) else None


def coverage_advice(knobs: Mapping[str, Any], start: Mapping[str, Any] | None = None) -> str:
    """The advice of `coverage_warning`, in a few words."""
    adopted = _adopted(knobs, start)
    if adopted:
        return f"{adopted} was adopted within the quality, compare the losses with quality exact"
    return "raise topk_ratio" + ("" if knobs.get("update_interval") == 1 else ", lower update_interval")


def _adopted(knobs: Mapping[str, Any], start: Mapping[str, Any] | None) -> str:
    names = () if start is None else (name for name in _LATE if knobs.get(name) != start.get(name))
    return ", ".join(f"{name} {words.value(knobs.get(name))}" for name in names)
