"""A small training on the CPU and a search over its knobs, for the tests of what happens beside its steps."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import cast

import torch
from torch import nn

from zenflow import StepStats, ZenFlowAdamW, ZenFlowConfig
from zenflow.device import Device
from zftune.quality import LossGuard, assumed_coverage
from zftune.store.account import Count
from zftune.tuner.curve import CurveBuilder
from zftune.tuner.executor import Losses, TuningContext, live_search
from zftune.tuner.record import StoreRecorder
from zftune.tuner.search import Search, SearchOptions
from zftune.tuner.setup import NoForecast
from zftune.tuner.space import Setting, space_for
from zftune.tuner.states import Outcome, Request, Sampler
from zftune.tuner.worker import Answer, DeskMaker, ThreadWorker

BEGIN = ZenFlowConfig(topk_ratio=0.1, update_interval=4, ledger=True, host_threads=1)
PLANNED = Setting(topk_ratio=0.2, update_interval=2, apply_lag=1, host_threads=1)
Make = Callable[..., "Scene"]


class SyncWorker(ThreadWorker):
    """Thinks at once, in the thread that asks."""

    def hand(self, outcome: Outcome | None, *, ask: bool = True) -> None:
        self._answer = self._think(outcome, ask=ask)

    def poll(self) -> Answer | None:
        answer, self._answer = self._answer, None
        return answer

    def guard(self, reason: str) -> None:
        self._answer = None
        self._search.guard(reason)


class Scene:
    """A small model that trains on the CPU, and a search over its knobs."""

    def __init__(
        self,
        *,
        most: int = 7,
        hold: bool = False,
        planned: Setting = PLANNED,
        guard: LossGuard | None = None,
        worker: DeskMaker = SyncWorker,
        sampler: Sampler = "belief",
        micro_batches: int = 1,
        disturbance: Callable[[], str | None] = lambda: None,
        device: Device | None = None,
    ) -> None:
        torch.manual_seed(0)
        self.module = nn.Sequential(nn.Linear(32, 64, bias=False), nn.Tanh(), nn.Linear(64, 8, bias=False))
        self.optimizer = ZenFlowAdamW(
            self.module.parameters(), lr=1e-5, config=BEGIN, module=self.module, device=device
        )
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(self.optimizer, lambda step: 1.0 / (1 + 0.01 * step))
        self.micro_batches = micro_batches
        self.history: dict[int, StepStats] = {}
        self.changes: list[tuple[int, Setting]] = []
        start = Setting.of(self.optimizer.config)
        self.search = Search(
            space_for(start, "published", coverage=assumed_coverage),
            start,
            NoForecast(1.0, start, has_memory=False),
            [planned],
            SearchOptions(sampler=sampler, most_measurements=most, hold=hold, watch=hold),
        )
        self.recorder = Recorder()
        scene = TuningContext(
            optimizer=self.optimizer,
            tokens=16,
            losses=None if guard is None else Losses(self.optimizer.device, guard),
            disturbance=disturbance,
            on_change=lambda step, knobs: self.changes.append((step, Setting.from_knobs(knobs))),
        )
        recorder = cast(StoreRecorder, self.recorder)  # all of it that a worker uses
        self.live = live_search(scene, self.search, recorder=recorder, worker=worker)

    def train(self, scale: float = 1.0) -> torch.Tensor:
        for _ in range(self.micro_batches):
            loss: torch.Tensor = self.module(torch.randn(16, 32)).square().mean() * scale
            loss.backward()
        self.optimizer.step()
        self.scheduler.step()
        self.optimizer.zero_grad()
        return loss

    def step(self, scale: float = 1.0) -> bool:
        going = self.live.on_step(self.train(scale))
        self.history |= {stats.step: stats for stats in self.optimizer.history()[-4:]}
        if going and self.live.request is None:
            time.sleep(0.01)  # these steps are so short that a thought would last for thousands of them
        return going

    def run(self, until: Callable[[], bool] = lambda: False) -> None:
        ends = time.monotonic() + 240
        while not until() and self.step():
            assert time.monotonic() < ends

    @property
    def knobs(self) -> Setting:
        return Setting.of(self.optimizer.config)


class Recorder:
    def __init__(self) -> None:
        self.told: list[tuple[Request, Outcome]] = []
        self.refuse = False
        self.open = threading.Event()
        """Whether anything can be written down."""
        self.open.set()
        self.fails_at = -1
        self.curve = CurveBuilder()

    def follow(self, counted: Callable[[], Count]) -> None:
        self.counted = counted

    def choose(self, search: Search) -> Request | None:
        return search.next()

    def hurry(self) -> None:
        pass

    def before(self, search: Search, request: Request) -> str | None:
        return "The disk is full." if self.refuse and request.role == "explore" else None

    def after(self, search: Search, request: Request, outcome: Outcome) -> None:
        self.open.wait(60)
        if len(self.told) == self.fails_at:
            raise ArithmeticError("a bug")
        self.told.append((request, outcome))


def assert_whole(scene: Scene, request: Request, outcome: Outcome) -> None:
    """The steps of a measurement are whole windows under its setting."""
    assert len(outcome.discarded_ms) == request.discard
    assert len(outcome.steps_ms) <= request.steps
    first = next(step for step, stats in scene.history.items() if stats.step_ms == outcome.steps_ms[0])
    closed = [scene.history[first + offset].closed for offset in range(len(outcome.steps_ms))]
    window = [False] * (request.setting.update_interval - 1) + [True]
    assert closed == window * (len(outcome.steps_ms) // request.setting.update_interval)
