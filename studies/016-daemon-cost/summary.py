"""What the figures of the states say of the cost, beside those of two trainings without a tuner."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping
from typing import Any

from rich.table import Table
from scipy.stats import ttest_ind  # type: ignore[import-untyped]

ALLOWED_RATIO, ALLOWED_CORE = 1.01, 0.02
CONTROL = "none"


def costs_of(figures: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """Of each state: the ratio of step times beside the control's, its 95% interval, shares of a core.

    The interval is Welch's, of the logarithms of the rounds' ratios.
    """
    control = [math.log(ratio) for ratio in figures[CONTROL]["ratio_of_rounds"]]
    found = {}
    for state, one in figures.items():
        rounds = [math.log(ratio) for ratio in one["ratio_of_rounds"]]
        against = [0.0, 0.0] if state == CONTROL else control  # the control itself: beside what it should be
        low, high = (math.nan, math.nan)
        if len(rounds) > 1:
            within = ttest_ind(rounds, against, equal_var=False).confidence_interval(0.95)
            low, high = math.exp(within.low), math.exp(within.high)
        core = one["daemon_core"] + one["agent_core"]
        found[state] = {
            "step_ms": one["step_ms"]["median"],
            "ratio": math.exp(statistics.fmean(rounds) - statistics.fmean(against)) if rounds else math.nan,
            "low": low,
            "high": high,
            "daemon_core": one["daemon_core"],
            "agent_core": one["agent_core"],
            "core": core,
            "thinkers_core": one["thinkers_core"],
            "holds": high <= ALLOWED_RATIO and core <= ALLOWED_CORE,
        }
    return found


def table_of(costs: Mapping[str, Mapping[str, Any]]) -> Table:
    """One line for each state."""
    table = Table(title="steps under a daemon to steps without one, real work on one thread")
    for name in ("run", "step", "ratio", "95%", "daemon", "agent", "both", "thinking"):
        table.add_column(name, justify="right" if name != "run" else "left")
    for state, one in costs.items():
        shares = (one["daemon_core"], one["agent_core"], one["core"], one["thinkers_core"])
        table.add_row(
            state,
            f"{one['step_ms']:.1f} ms",
            f"{one['ratio']:.4f}",
            f"{one['low']:.4f} - {one['high']:.4f}",
            *(f"{share:.2%}" for share in shares),
        )
    return table
