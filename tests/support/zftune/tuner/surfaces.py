"""Response surfaces that nobody has seen, and a driver that runs a search on one."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from zftune.store.store import Store
from zftune.store.types import Hardware, Key, Model
from zftune.tuner.record import MachineInfo, Recording
from zftune.tuner.search import Search, SearchOptions
from zftune.tuner.space import Forecast, Setting, Space, space_for
from zftune.tuner.states import Outcome, Request, UnmeasuredSteps

TOKENS = 64
HERE = MachineInfo(hardware=Hardware(hw_id="b" * 16), usable_cores=8.0, versions={})


def recording_of(store: Store, here: MachineInfo = HERE, **more: Any) -> Recording:
    """Of a made-up training; `more` is of its key."""
    found = {"model_id": "a" * 16, "micro_batch": 1, "sequence": 64, **more}
    key = Key(
        **found, hw_id=here.hardware.hw_id, backend="zenflow", stage=0, dtype="bfloat16", world_size=1,
        checkpointing=False, quality="published",
    )  # fmt: skip
    return Recording(store, key, Model(model_id=key.model_id, dtype=key.dtype), here)


def coverage(topk_ratio: float) -> float:
    return float(topk_ratio**0.15) if topk_ratio > 0 else 0.0


@dataclass
class Surface:
    """Step time in ms: compute, link and host side by side, with a contention that the planner does not know."""

    compute: float
    link: float
    host: float
    select: float
    contention: float
    best_threads: float
    unknown: float

    @classmethod
    def random(cls, seed: int, unknown: float = 0.3) -> Surface:
        draw = np.random.default_rng(seed)
        return cls(
            compute=100.0,
            link=float(draw.uniform(10, 140)),
            host=float(draw.uniform(100, 900)),
            select=float(draw.uniform(10, 200)),
            contention=float(draw.uniform(0, 0.25)),
            best_threads=float(draw.uniform(2, 8)),
            unknown=unknown,
        )

    def planner_ms(self, setting: Setting) -> float:
        deferred = (1 - setting.topk_ratio) * setting.offload_ratio
        gpu = self.compute + self.select * (
            setting.topk_ratio * setting.offload_ratio + 0.3 * (1 - setting.offload_ratio)
        )
        host = deferred * self.host * (28 + 4 * setting.update_interval) / 32 / setting.update_interval
        link = deferred * self.link * (1 + 1 / setting.update_interval)
        if not setting.overlap_step:
            return gpu + host + link
        return max(gpu, link, host * (1 + 0.3 / setting.apply_lag))

    def ms(self, setting: Setting) -> float:
        threads = setting.host_threads or 8
        wave = 0.04 * math.sin(7 * setting.topk_ratio + setting.update_interval)
        slow = self.contention * abs(math.log(threads / self.best_threads))
        return self.planner_ms(setting) * (1 + self.unknown * (wave + slow))

    def forecast(self, setting: Setting) -> Forecast:
        memory = round(1e9 * (1 + setting.topk_ratio + (1 - setting.offload_ratio)))
        return Forecast(self.planner_ms(setting), memory, 10**9)

    def space(self, start: Setting) -> Space:
        return space_for(start, "published", coverage=coverage, threads=(2, 4, 6, 8), offload_ratios=(0.8, 0.9, 1.0))

    def best_ms(self, start: Setting) -> float:
        return min(self.ms(setting) for setting in self.space(start).settings())


@dataclass
class Driver:
    """Trains on a surface, one step after the other, with lognormal noise."""

    surface: Surface
    noise: float
    random: np.random.Generator
    requests: list[Request] = field(default_factory=list)
    outcomes: list[Outcome] = field(default_factory=list)
    fault: Callable[[Request], Outcome | None] = lambda request: None
    change_s: float = 0.0
    """What a change of knobs takes beyond a step."""
    within: Callable[[Search], None] = lambda search: None
    """Looks at the search after each outcome."""

    def run(self, search: Search, most: int = 1000) -> None:
        for _ in range(most):
            request = search.next()
            if request is None:
                return
            outcome = self.fault(request) or self.measure(request)
            if self.change_s and self.requests and self.requests[-1].setting != request.setting:
                late_s = self.change_s + self.surface.ms(self.requests[-1].setting) / 1e3
                outcome = replace(outcome, between=UnmeasuredSteps(late_s=late_s, late_steps=1))
            self.requests.append(request)
            self.outcomes.append(outcome)
            search.tell(outcome)
            self.within(search)

    def measure(self, request: Request) -> Outcome:
        discarded: list[float] = []
        steps: list[float] = []
        for index in range(request.discard + request.steps):
            step = self.surface.ms(request.setting) * math.exp(self.noise * self.random.standard_normal())
            (discarded if index < request.discard else steps).append(step)
            if request.ends_early(discarded, steps):
                break
        return Outcome("measured", tuple(steps), tuple(discarded), TOKENS)


START = Setting(topk_ratio=0.1, update_interval=4, apply_lag=4)


def make(seed: int, noise: float, *, sampler: str = "belief", **options: object) -> tuple[Search, Driver]:
    surface = Surface.random(seed)
    space = surface.space(START)
    planned = sorted(space.settings(), key=surface.planner_ms)[:1]
    search = Search(
        space,
        START,
        surface.forecast,
        planned,
        SearchOptions(seed=seed, sampler=sampler, **options),  # type: ignore[arg-type]
    )
    return search, Driver(surface, noise, np.random.default_rng(seed + 10_000))


class Recorded:
    """A search that is written down, and its training on a surface; one measurement at a time."""

    def __init__(self, store: Store, number: int, *, seed: int = 3) -> None:
        self.search, driver = make(seed, 0.01, sampler="random")
        self.driver = replace(driver, random=np.random.default_rng(number))
        self.recording = recording_of(store)
        found = self.recording.begin(self.search)
        assert found is not None
        self.recorder = found

    def choose(self) -> Request:
        request = self.search.next()
        assert request is not None
        assert self.recorder.before(self.search, request) is None
        return request

    def tell(self, request: Request) -> None:
        outcome = self.driver.measure(request)
        self.search.tell(outcome)
        self.recorder.after(self.search, request, outcome)
        assert self.recorder.notices == []
