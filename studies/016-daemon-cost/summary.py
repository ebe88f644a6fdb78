"""What the rounds say of the cost of each state, beside the same trainings without a tuner."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from rich.table import Table
from scipy.stats import ttest_1samp  # type: ignore[import-untyped]

ALLOWED_RATIO, ALLOWED_CORE = 1.01, 0.02
STEADY = ("frozen", "paused")
"""Where nothing is tried, so that all that a step costs more is the agent's and the daemon's."""
_CONTROL = "none"
_CORES = ("daemon_core", "agent_core", "thinkers_core")


def costs_of(rounds: Sequence[Mapping[str, Mapping[str, Any]]]) -> dict[str, dict[str, float]]:
    """Of each state: the ratio of step times over the control's of the same round, its 95% interval, shares of a core.

    The mean is geometric, the interval Student's, of the logarithms; where there is one round it is not known (nan).
    """
    found = {}
    for state in rounds[0]:
        known = [one for one in rounds if one[state]["ratio"] is not None]
        own = [math.log(one[state]["ratio"]) for one in known]
        if state != _CONTROL:
            own = [log - math.log(one[_CONTROL]["ratio"]) for log, one in zip(own, known, strict=True)]
        cores = {name: statistics.fmean(one[state][name] for one in rounds) for name in _CORES}
        found[state] = {
            "step_ms": statistics.fmean(one[state]["step_ms"] for one in known) if known else math.nan,
            "ratio": math.exp(statistics.fmean(own)) if own else math.nan,
            **_interval(own),
            **cores,
            "core": cores["daemon_core"] + cores["agent_core"],
        }
    return found


def holds(costs: Mapping[str, Mapping[str, float]]) -> bool:
    """Whether steps take at most 1% more in steady states, at the interval's end, and no state 2% of a core."""
    cheap = all(costs[state]["high"] <= ALLOWED_RATIO for state in STEADY)
    return cheap and all(one["core"] <= ALLOWED_CORE for one in costs.values())


def table_of(costs: Mapping[str, Mapping[str, float]], rounds: int) -> Table:
    """One line for each state."""
    table = Table(title=f"steps under a daemon to steps without one, real work on one thread, {rounds} rounds")
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


def _interval(logarithms: Sequence[float]) -> dict[str, float]:
    if len(logarithms) < 2:
        return {"low": math.nan, "high": math.nan}
    within = ttest_1samp(logarithms, 0.0).confidence_interval(0.95)
    return {"low": math.exp(within.low), "high": math.exp(within.high)}
