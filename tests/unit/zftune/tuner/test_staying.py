"""Where the knobs that are asked for run already, nothing is changed, and what is measured begins with a window."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch

from tests.support.zftune.tuner.scene import PLANNED, Make, SyncWorker, assert_whole
from zftune.tuner.evidence import Gain
from zftune.tuner.executor import Block, Changing
from zftune.tuner.states import Request
from zftune.tuner.worker import Answer, Withdraw


def test_to_watch_a_training_is_not_to_alter_it(make: Make) -> None:
    scene = make(most=1, hold=True)
    begin = torch.get_rng_state()
    scene.run(until=lambda: len(scene.recorder.told) == 1)
    assert {request.role for request, _ in scene.recorder.told} == {"start"}
    assert scene.changes == []
    began, now = 1e-5, scene.optimizer.param_groups[0]["lr"]  # it falls with each step
    assert all(now <= (outcome.movement_rate or 0.0) < began for _, outcome in scene.recorder.told)
    for request, outcome in scene.recorder.told:
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
    scene = make(most=9, planned=replace(PLANNED, update_interval=1), worker=StepLateDesk)

    monkeypatch.setattr(Request, "ends_early", lambda *_: False)
    scene.run(until=lambda: len(scene.recorder.told) == 5)
    windows = [request.setting.update_interval for request, _ in scene.recorder.told]
    assert (1, 4) in itertools.pairwise(windows)
    for request, outcome in scene.recorder.told:
        if outcome.status == "measured":
            assert_whole(scene, request, outcome)


def test_the_first_window_of_what_was_adopted_is_not_measured(make: Make) -> None:
    """It waits for no window before it, so that it is too fast."""
    scene = make(most=1, hold=True)
    scene.run(until=lambda: len(scene.recorder.told) == 1)
    scene.live._carry_out(Answer(Request(PLANNED, "a1", 0, 0, 16), PLANNED))
    scene.run(until=lambda: isinstance(scene.live.state, Block) and scene.live.state.begun)
    assert isinstance(scene.live.state, Block)
    assert scene.live.state.stats[0].step == scene.changes[-1][0] + PLANNED.update_interval + 1


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
    scene = make(most=1, hold=True, worker=RecallingDesk)
    scene.run(until=lambda: isinstance(scene.live.state, Changing) and scene.live.state.stays)
    worker = scene.live._worker
    assert isinstance(worker, RecallingDesk)
    worker.wanted = Withdraw("somebody rolls back", PLANNED, gain=Gain(0.25, 0.01))
    for _ in range(12):  # longer than the window whose end was waited for
        scene.step()
    assert scene.knobs == PLANNED
    assert [setting for _, setting in scene.changes] == [PLANNED]
    assert scene.live.gain == Gain(0.25, 0.01)
