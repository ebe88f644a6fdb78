"""Where the knobs that are asked for run already, nothing is changed, and what is measured begins with a window."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch

from tests.support.zftune.tuner.scene import PLANNED, Make, SyncWorker, assert_whole
from zftune.tuner.scores import Gain
from zftune.tuner.search import Search
from zftune.tuner.states import Comparing, Request, Trial
from zftune.tuner.worker import Answer, Withdraw


def test_to_watch_a_training_is_not_to_alter_it(make: Make) -> None:
    scene = make(most=1, watch=True)
    begin = torch.get_rng_state()
    scene.run(until=lambda: len(scene.recorder.told) == 3)
    assert {request.role for request, _ in scene.recorder.told} <= {"start", "hold"}
    assert scene.changes == []
    began, now = 1e-5, scene.optimizer.param_groups[0]["lr"]  # it falls with each step
    assert all(now < (outcome.movement_rate or 0.0) < began for _, outcome in scene.recorder.told[:2])
    for request, outcome in scene.recorder.told:
        if outcome.status == "measured":  # a hold ends early where this machine's times change
            assert_whole(scene, request, outcome)
    alone = make(most=1)
    torch.set_rng_state(begin)
    for _ in range(scene.optimizer.steps):
        alone.train()
    for one, other in zip(scene.module.parameters(), alone.module.parameters(), strict=True):
        assert torch.equal(one, other)


class StepLateDesk(SyncWorker):
    """Answers one step after it was handed something."""

    asked_before = False

    def poll(self) -> Answer | None:
        self.asked_before = not self.asked_before
        return None if self.asked_before else super().poll()


def test_what_is_seen_late_of_a_setting_before_begins_no_measurement(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every step of windows of one closes one, and is seen two steps later, when the incumbent's knobs are back."""
    scene = make(most=5, planned=replace(PLANNED, update_interval=1), worker=StepLateDesk)

    def compare(search: Search, trial: Trial, *_: object) -> None:
        search.state = Comparing(trial.number, "gain", 8)  # whether it is faster or not: the incumbent comes next

    monkeypatch.setattr(Search, "_explored", compare)
    monkeypatch.setattr(Request, "abort_reason", lambda *_: None)
    scene.run(until=lambda: len(scene.recorder.told) == 5)
    windows = [request.setting.update_interval for request, _ in scene.recorder.told]
    assert (1, 4) in itertools.pairwise(windows)
    for request, outcome in scene.recorder.told:
        if outcome.status == "measured":
            assert_whole(scene, request, outcome)


class RecallingDesk(SyncWorker):
    """Wants another incumbent when it is told to, and asks for nothing from then on."""

    wanted: Withdraw | None = None
    silent = False

    def recall(self) -> Withdraw | None:
        wanted, self.wanted = self.wanted, None
        self.silent = self.silent or wanted is not None
        return wanted

    def poll(self) -> Answer | None:
        return None if self.silent else super().poll()


def test_who_wants_other_knobs_meanwhile_gets_them(make: Make) -> None:
    scene = make(most=1, watch=True, worker=RecallingDesk)
    scene.run(until=lambda: scene.live._stays)
    worker = scene.live._worker
    assert isinstance(worker, RecallingDesk)
    worker.wanted = Withdraw("somebody rolls back", PLANNED, gain=Gain(0.25, 0.01))
    for _ in range(12):  # longer than the window whose end was waited for
        scene.step()
    assert scene.knobs == PLANNED
    assert [setting for _, setting in scene.changes] == [PLANNED]
    assert scene.live.gain == Gain(0.25, 0.01)
