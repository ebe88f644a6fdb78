"""A search in a real training loop: real knobs, real step times, and no gradient lost."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from tests.zftune.tuner.surfaces import coverage
from zenflow import HostMemoryError, ZenFlowAdamW, ZenFlowConfig
from zftune.store.types import TrialState
from zftune.tuner.guard import LossGuard
from zftune.tuner.live import LiveSearch
from zftune.tuner.search import Search, SearchOptions
from zftune.tuner.settings import Setting
from zftune.tuner.space import Forecast, space_for
from zftune.tuner.states import Outcome, Request

BEGIN = ZenFlowConfig(topk_ratio=0.1, update_interval=4, ledger=True, host_threads=1)


class Scene:
    """A small model that trains on the CPU, and a search over its knobs."""

    def __init__(self, *, most: int = 7, guard: LossGuard | None = None) -> None:
        torch.manual_seed(0)
        self.module = nn.Sequential(nn.Linear(32, 64, bias=False), nn.Tanh(), nn.Linear(64, 8, bias=False))
        self.optimizer = ZenFlowAdamW(self.module.parameters(), lr=1e-3, config=BEGIN, module=self.module)
        start = Setting.of(self.optimizer.config)
        space = space_for(start, "published", coverage=coverage)
        planned = [Setting(topk_ratio=0.2, update_interval=2, apply_lag=1, host_threads=1)]
        self.search = Search(
            space,
            start,
            lambda setting: Forecast(1.0),
            planned,
            SearchOptions(sampler="random", most_measurements=most),
        )
        self.recorder = Recorder()
        self.live = LiveSearch(self.optimizer, self.search, tokens=16, recorder=self.recorder, guard=guard)

    def step(self, scale: float = 1.0) -> bool:
        loss = self.module(torch.randn(16, 32)).square().mean() * scale
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return self.live.on_step(loss)


class Recorder:
    def __init__(self) -> None:
        self.told: list[tuple[Request, Outcome]] = []
        self.refuse = False

    def before(self, search: Search, request: Request) -> str | None:
        return "The disk is full." if self.refuse and request.role == "explore" else None

    def after(self, search: Search, request: Request, outcome: Outcome) -> None:
        self.told.append((request, outcome))


def test_knobs_follow_the_search_windows_are_whole_and_no_gradient_is_lost() -> None:
    scene = Scene()
    closed: dict[int, list[bool]] = {}
    for _ in range(1500):
        request = scene.live.request
        going = scene.step()
        if request is not None and scene.live.request is request and len(scene.live._discarded) == request.discard:
            assert Setting.of(scene.optimizer.config) == request.setting
        if not going:
            break
    assert scene.search.next() is None
    scene.step()  # the last change holds
    assert Setting.of(scene.optimizer.config) == scene.search.book.incumbent.setting
    history = {stats.step: stats for stats in scene.optimizer.history(wait=True)}
    assert {request.role for request, _ in scene.recorder.told} >= {"start", "explore"}
    for request, outcome in scene.recorder.told:
        if outcome.status != "measured":
            continue
        assert len(outcome.discarded_ms) == request.discard
        assert len(outcome.steps_ms) == request.steps
        first = next(step for step, stats in history.items() if stats.step_ms == outcome.steps_ms[0])
        closed[first] = [history[first + offset].closed for offset in range(request.steps)]
        window = [False] * (request.setting.update_interval - 1) + [True]
        assert closed[first] == window * (request.steps // request.setting.update_interval)
    scene.optimizer.flush()
    balances = scene.optimizer.ledger()
    assert balances
    for balance in balances.values():
        assert balance.balanced


def test_a_setting_that_the_runtime_refuses_is_never_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    scene = Scene(most=5)
    real = scene.optimizer.set_knobs

    def set_knobs(**knobs: Any) -> int:
        if knobs["topk_ratio"] == 0.2:
            raise HostMemoryError("the host has too little memory")
        return real(**knobs)

    monkeypatch.setattr(scene.optimizer, "set_knobs", set_knobs)
    while scene.step():
        pass
    trial = scene.search.book.trials[1]
    assert trial.state is TrialState.CRASHED
    assert trial.reason == "the host has too little memory"


def test_where_nothing_can_be_written_down_nothing_is_tried() -> None:
    scene = Scene()
    scene.recorder.refuse = True
    while scene.step():
        pass
    assert scene.search.notes[-1].reason == "The disk is full."
    assert {request.role for request, _ in scene.recorder.told} == {"start"}


def test_the_guard_ends_it_where_the_loss_is_not_finite() -> None:
    scene = Scene(guard=LossGuard())
    while scene.search.measurements < 1:
        assert scene.step()
    assert not scene.step(scale=float("inf"))
    assert scene.search.notes[-1].kind == "guard"
    assert "the loss is inf" in scene.search.notes[-1].reason
    scene.step()
    assert Setting.of(scene.optimizer.config) == scene.search.book.trials[0].setting


def test_the_guard_knows_spikes_from_odd_batches() -> None:
    losses = [3.0 - 0.01 * step + 0.05 * (step % 3) for step in range(80)]
    guard = LossGuard()
    assert [guard.add(loss) for loss in losses] == [None] * 80
    assert guard.add(9.0) is None  # one odd batch
    assert guard.add(2.2) is None
    found = [guard.add(6.0) for _ in range(6)]
    assert found[0] is None
    reason = next(one for one in found if one is not None)
    assert reason.startswith("the loss of the last 4 steps is at least 6")
