"""What the rounds say of the cost of each state, beside the same trainings without a tuner."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rich.table import Table
from scipy.stats import ttest_1samp  # type: ignore[import-untyped]

ALLOWED_SHARE, ALLOWED_CORE = 0.01, 0.02
_CONTROL = "none"
_CORES = ("daemon_core", "agent_core", "thinkers_core")


def costs_of(rounds: Sequence[Mapping[str, Mapping[str, Any]]]) -> dict[str, dict[str, float]]:
    """Of each state: the ratio of step times over the control's of the same round, with its 95% interval, and shares.

    The ratio of a round is the median of its blocks', or ("mean") that of their sums. Over rounds the mean is
    geometric, the interval Student's, of the logarithms; where there is one round it is not known (nan). "counted" is
    the share of its time that the thread that trains spends in the tuner, but for changes of knobs ("changing"), and
    all that the agent's thread takes of a core, as if it were waited for.
    """
    found = {}
    for state in rounds[0]:
        known = [one for one in rounds if one[state]["plain_ms"]]
        medians = _beside_control(known, state, _median)
        means = _beside_control(known, state, _mean)
        cores = {name: statistics.fmean(one[state][name] for one in rounds) for name in _CORES}
        plain_ms = [ms for one in known for ms in one[state]["plain_ms"]]
        found[state] = {
            "step_ms": statistics.median(plain_ms) if plain_ms else math.nan,
            "ratio": math.exp(statistics.fmean(medians)) if medians else math.nan,
            **_interval(medians),
            "mean_ratio": math.exp(statistics.fmean(means)) if means else math.nan,
            **{f"mean_{end}": value for end, value in _interval(means).items()},
            **cores,
            **_counted([one[state]["thread_share"] + one[state]["agent_core"] for one in rounds]),
            "changing": statistics.fmean(one[state]["changing_share"] for one in rounds),
            "core": cores["daemon_core"] + cores["agent_core"],
        }
    return found


def _beside_control(
    rounds: Sequence[Mapping[str, Mapping[str, Any]]], state: str, of: Callable[[Mapping[str, Any]], float]
) -> list[float]:
    """Logarithms, of each round."""
    own = [of(one[state]) for one in rounds]
    return own if state == _CONTROL else [log - of(one[_CONTROL]) for log, one in zip(own, rounds, strict=True)]


def _counted(shares: Sequence[float]) -> dict[str, float]:
    high = float(ttest_1samp(shares, 0.0).confidence_interval(0.95).high) if len(shares) > 1 else math.nan
    return {"counted": statistics.fmean(shares), "counted_high": high}


def _median(figures: Mapping[str, Any]) -> float:
    return statistics.median(
        math.log(under / plain) for under, plain in zip(figures["under_ms"], figures["plain_ms"], strict=True)
    )


def _mean(figures: Mapping[str, Any]) -> float:
    return math.log(sum(figures["under_ms"]) / sum(figures["plain_ms"]))


def holds(costs: Mapping[str, Mapping[str, float]]) -> bool:
    """Whether 1% of step time is kept, as counted and not contradicted by ratios, and 2% of a core; in all states."""
    served = [one for state, one in costs.items() if state != _CONTROL]
    counted = all(one["counted_high"] <= ALLOWED_SHARE for one in served)
    seen = not any(one["low"] > 1 + ALLOWED_SHARE for one in served)
    return counted and seen and all(one["core"] <= ALLOWED_CORE for one in costs.values())


def table_of(costs: Mapping[str, Mapping[str, float]], rounds: int) -> Table:
    """One line for each state."""
    table = Table(title=f"steps under a daemon to steps without one, real work on one thread, {rounds} rounds")
    shares = ("counted", "changing", "daemon", "agent", "both", "thinking")
    for name in ("run", "step", "ratio", "95%", "of means", "95%", *shares):
        table.add_column(name, justify="right" if name != "run" else "left")
    for state, one in costs.items():
        found = (one[name] for name in ("counted", "changing", "daemon_core", "agent_core", "core", "thinkers_core"))
        table.add_row(
            state,
            f"{one['step_ms']:.1f} ms",
            f"{one['ratio']:.4f}",
            f"{one['low']:.4f} - {one['high']:.4f}",
            f"{one['mean_ratio']:.4f}",
            f"{one['mean_low']:.4f} - {one['mean_high']:.4f}",
            *(f"{share:.2%}" for share in found),
        )
    return table


def _interval(logarithms: Sequence[float]) -> dict[str, float]:
    if len(logarithms) < 2:
        return {"low": math.nan, "high": math.nan}
    within = ttest_1samp(logarithms, 0.0).confidence_interval(0.95)
    return {"low": math.exp(within.low), "high": math.exp(within.high)}
