"""What the grid and the daemon's runs come to."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from longrun.grid import Grid
from longrun.scene import PHASES
from longrun.tuned import COST_SHARE, GRANT_S, spent
from zftune.tuner.space import Setting

LEAST_GAP, LEAST_RECOVERED = 0.20, 0.70


@dataclass(frozen=True, slots=True)
class Fixed:
    """What the grid says of settings that do not change, and of an oracle that changes them with the phases."""

    oracle: Mapping[str, Setting]
    """By phase: the fastest that is allowed and fits."""
    unconstrained: Mapping[str, Setting]
    """By phase: the fastest that fits, if the budget is not looked at."""
    best: Setting
    """The fastest for the whole run of those that are allowed and fit in all phases."""
    oracle_s: float
    best_s: float
    steps: Mapping[str, int]
    """By phase."""

    @property
    def gap(self) -> float:
        """Share of the best fixed setting's time that the oracle saves."""
        return 1 - self.oracle_s / self.best_s


def fixed(grid: Grid, first_steps: int) -> Fixed:
    """Oracle and best fixed setting for a scripted run.

    Args:
        grid: measured.
        first_steps: of the first phase.
    """
    cells, steps = grid.cells, {phase.name: phase.steps(first_steps) for phase in PHASES}
    settings = list(next(iter(cells.values())))

    def fastest(phase: str, *, within: bool) -> Setting:
        fitting = [one for one in settings if cells[phase][one].fits and (grid.allowed(one) or not within)]
        return min(fitting, key=lambda one: cells[phase][one].step_ms)

    def seconds(setting: Setting) -> float:
        return sum(count * cells[name][setting].step_ms for name, count in steps.items()) / 1e3

    oracle = {name: fastest(name, within=True) for name in cells}
    always = [one for one in settings if grid.allowed(one) and all(cells[name][one].fits for name in cells)]
    best = min(always, key=seconds)
    oracle_s = sum(count * cells[name][oracle[name]].step_ms for name, count in steps.items()) / 1e3
    unconstrained = {name: fastest(name, within=False) for name in cells}
    return Fixed(oracle, unconstrained, best, oracle_s, seconds(best), steps)


@dataclass(frozen=True, slots=True)
class Recovery:
    """What one run of the daemon's came to."""

    seconds: float
    recovered: float
    """Share of the gap between the best fixed setting and the oracle."""
    by_phase_s: Mapping[str, float]
    spent_s: float
    allowed_s: float
    reopened: int
    steps_over: int
    """Steps with a peak of device memory above what may be used."""


def recovery(run: Mapping[str, Any], of: Fixed, limit_bytes: int) -> Recovery:
    """Judge a run.

    Args:
        run: the figures that `tuned` gave.
        of: oracle and best fixed setting.
        limit_bytes: what may be used of device memory.
    """
    step_ms, begins = run["step_ms"], run["begins"]
    seconds = sum(step_ms) / 1e3
    ends = [*(begin - 1 for begin in begins[1:]), len(step_ms)]
    by_phase = {
        phase.name: sum(step_ms[begin - 1 : end]) / 1e3 for phase, begin, end in zip(PHASES, begins, ends, strict=True)
    }
    spent_s, elapsed_s = spent(run["decisions"])
    marks = [*run["peaks"], (len(step_ms) + 1, 0)]
    over = sum(end - begin for (begin, peak), (end, _) in itertools.pairwise(marks) if peak > limit_bytes)
    return Recovery(
        seconds=seconds,
        recovered=(of.best_s - seconds) / (of.best_s - of.oracle_s),
        by_phase_s=by_phase,
        spent_s=spent_s,
        allowed_s=max(GRANT_S, COST_SHARE * elapsed_s),
        reopened=sum(one["kind"] == "reopen" for one in run["decisions"]),
        steps_over=over,
    )


def verdicts(of: Fixed, recoveries: Sequence[Recovery], grid: Grid) -> list[tuple[str, bool]]:
    """Each promise, and whether it was kept."""
    binding = [name for name, one in of.unconstrained.items() if not grid.allowed(one)]
    kept = [
        (f"an oracle saves {of.gap:.1%} of the best fixed setting's time, wanted {LEAST_GAP:.0%}", of.gap >= LEAST_GAP),
        (f"the quality budget forbids the fastest setting in {len(binding)} of {len(PHASES)} phases", bool(binding)),
    ]
    for seed, one in enumerate(recoveries):
        kept += [
            (
                f"seed {seed}: the daemon recovers {one.recovered:.0%} of the gap, wanted {LEAST_RECOVERED:.0%}",
                one.recovered >= LEAST_RECOVERED,
            ),
            (
                f"seed {seed}: exploring cost {one.spent_s:.2f} s, allowed were {one.allowed_s:.2f} s",
                one.spent_s <= one.allowed_s,
            ),
        ]
    return kept
