"""What settings take without noise, and what the planner predicts: the truth that a search is judged by."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from statistics import fmean

from zftune.quality import assumed_coverage
from zftune.tuner.space import Forecast, Forecaster, Setting, Space, space_for

STEP_MS = 190.0


@dataclass(frozen=True)
class Scene:
    """A machine and a training."""

    name: str
    space: Space
    start: Setting
    planned: Sequence[Setting]
    """Best first by the planner."""
    times: Mapping[Setting, tuple[float, ...]]
    """Of each step of a window, ms."""
    forecast: Forecaster

    def mean(self, setting: Setting) -> float:
        """Mean step time without noise, ms."""
        return fmean(self.times[setting])

    @property
    def best_ms(self) -> float:
        """Of the fastest setting."""
        return min(map(fmean, self.times.values()))


@cache
def lift(gain: float, count: int = 8) -> Scene:
    """The start and settings that the planner names, all equal but for the third (of four the second)."""
    start = Setting(topk_ratio=0.1, update_interval=4, apply_lag=4, select_interval=16)
    space = space_for(start, "published", coverage=assumed_coverage)
    allowed = [one for one in space.settings() if one != start and one.offload_ratio == 1 and one.update_interval <= 4]
    planned = random.Random(0).sample(allowed, count)
    faster = planned[2 if count > 4 else 1]
    times = {one: STEP_MS * (1 - gain if one == faster else 1) for one in (start, *planned)}
    windows = {one: (ms,) * one.update_interval for one, ms in times.items()}
    predicted = {one: Forecast(STEP_MS * (0.97 + 0.01 * place)) for place, one in enumerate(planned)}
    return Scene(f"{gain:.0%}", space, start, planned, windows, lambda one: predicted.get(one, Forecast(STEP_MS)))
