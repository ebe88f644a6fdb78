"""Every setting of the grid in every phase, measured for real: its step time, and its peak of device memory."""

from __future__ import annotations

import random
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from longrun.scene import BASE, PHASES, START, Phase
from longrun.training import Training
from zftune.tuner.setup import device_limit
from zftune.tuner.space import Coverage, Setting, space_for

_SETTLING_WINDOWS = 2
_SELECTING_STEPS = 4 * BASE.longest_window


@dataclass(frozen=True, slots=True)
class Cell:
    """One setting in one phase."""

    step_ms: float
    peak_bytes: int
    fits: bool
    """Whether it leaves as much device memory free as must stay free."""


@dataclass(frozen=True, slots=True)
class Grid:
    """What was measured, by phase and setting, and which settings the quality budget allows."""

    cells: Mapping[str, Mapping[Setting, Cell]]
    cost: Mapping[Setting, float]
    """(1 - coverage) x mean staleness, in steps."""
    budget: float

    def allowed(self, setting: Setting) -> bool:
        """Whether it is within the budget."""
        return self.cost[setting] <= self.budget * (1 + 1e-9)


def measured(settings: Sequence[Setting], least_steps: int) -> Grid:
    """Measure them in one training, in random order, each with all phases one after the other.

    Args:
        settings: of the grid.
        least_steps: of a measurement.
    """
    order = list(settings)
    random.Random(0).shuffle(order)  # so that what a change of knobs leaves behind looks like no effect of a knob
    cells: dict[str, dict[Setting, Cell]] = {phase.name: {} for phase in PHASES}
    with Training(seed=0) as training:
        for _ in range(_SELECTING_STEPS):
            training.step()
        coverage = _coverage(training)
        for setting in order:
            for phase in PHASES:
                cells[phase.name][setting] = _cell(training, setting, phase, least_steps)
    space = space_for(START, "published", coverage=coverage)
    return Grid(cells, {setting: space.cost(setting) for setting in settings}, space.budget)


def _coverage(training: Training) -> Coverage:
    curves = [one.coverage_curve for one in training.since(0, wait=True) if one.coverage_curve is not None]
    curve = curves[-1]
    return lambda topk_ratio: curve.at(topk_ratio) or 0.0


def _cell(training: Training, setting: Setting, phase: Phase, least_steps: int) -> Cell:
    """Whole windows, once the setting has settled."""
    training.enter(phase)
    interval = setting.update_interval
    first = training.optimizer.set_knobs(**setting.knobs()) + _SETTLING_WINDOWS * interval
    while training.optimizer.steps < first:
        training.step()
    training.device.reset_peak_bytes()
    for _ in range(interval * max(2, -(-least_steps // interval))):
        training.step()
    times = [one.step_ms for one in training.since(first, wait=True) if one.step_ms is not None]
    peak, limit = training.device.peak_bytes() or 0, device_limit(training.optimizer) or 0
    return Cell(round(statistics.fmean(times), 4), peak, peak <= limit)
