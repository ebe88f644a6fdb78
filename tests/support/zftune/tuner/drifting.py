"""A world whose times and memory one may change while a search goes on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, cast

import numpy as np

from tests.support.zftune.tuner.surfaces import START, TOKENS, Driver, Surface, coverage
from zftune.tuner.scores import Pace
from zftune.tuner.search import Search, SearchOptions
from zftune.tuner.space import Forecast, Forecaster, Setting, space_for
from zftune.tuner.states import Outcome, Request, Stopped

FAST = Setting(topk_ratio=0.2, update_interval=4, apply_lag=4)


class World:
    """Three settings whose times and memory one may change, and a planner that learns of it."""

    def __init__(self, *, limit_bytes: int | None = None, **options: Any) -> None:
        self.factor = 1.0
        self.fast = 0.8
        self.tokens = TOKENS
        self.more_bytes = 0
        self.movement_percent: float | None = None
        self.learnt: list[tuple[Pace | None, Pace]] = []
        self.plan: list[Setting] = []
        world = self

        class Known(Surface):
            def ms(self, setting: Setting) -> float:
                return 100.0 * world.factor * (world.fast if setting.topk_ratio == FAST.topk_ratio else 1.0)

        self.known = Known(**vars(Surface.random(0)))
        space = space_for(START, "published", coverage=coverage, offload_ratios=(0.6, 0.8, 1.0))
        start = replace(START, offload_ratio=0.6) if limit_bytes is not None else START
        settings: dict[str, Any] = {"sampler": "none", "hold": True, "watch": True, **options}
        planned = [FAST] if limit_bytes is None else []
        self.search = Search(space, start, self.forecast, planned, SearchOptions(**settings), cast("Any", self))
        self.search.book.device_limit_bytes = limit_bytes
        self.driver = Driver(self.known, 0.01, np.random.default_rng(1))
        self.driver.fault = self.measure

    def measure(self, request: Request) -> Outcome:
        found = self.driver.measure(request)
        pace = Pace(busy_ms=100.0 * self.factor)
        peak = self.bytes_of(request.setting) + self.more_bytes
        moved = self.movement_percent
        found = replace(found, movement_percent=moved, movement_rate=2e-5 if moved else None)
        return replace(found, tokens=self.tokens, device_bytes=peak, pace=pace)

    @staticmethod
    def bytes_of(setting: Setting) -> int:
        return round(1000 * (1 - setting.offload_ratio * (1 - setting.topk_ratio)))

    def _predicted(self, setting: Setting) -> Forecast:
        return Forecast(100.0, self.bytes_of(setting))

    # What a planner is asked.

    @property
    def forecast(self) -> Forecaster:
        return self._predicted

    def learn(self, before: Pace | None, now: Pace) -> None:
        self.learnt.append((before, now))

    def planned(self) -> Sequence[Setting]:
        return self.plan

    def run(self, most: int) -> None:
        self.driver.run(self.search, most)

    def settle(self) -> None:
        for _ in range(40):
            if isinstance(self.search.state, Stopped):
                return
            self.run(1)
        raise AssertionError(self.search.state)

    @property
    def kinds(self) -> list[str]:
        return [note.kind for note in self.search.notes]
