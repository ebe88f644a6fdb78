"""A saved state is loaded into a training that is tuned: at its beginning, or back to where it was before."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

import zftune
from tests.zftune.tuner.scene import Make, SyncWorker, assert_whole
from tests.zftune.tuner.test_attach import BEGIN, Loop
from zftune.tuner.executor import UnmeasuredCounter
from zftune.tuner.guard import LossGuard
from zftune.tuner.states import UnmeasuredSteps
from zftune.tuner.tuner import warm_up_steps

Saved = tuple[dict[str, Any], dict[str, Any]]


@pytest.fixture
def loops() -> Iterator[list[Loop]]:
    made = [Loop(), Loop()]
    yield made
    for loop in made:
        loop.optimizer.close()


def saved(training: Any) -> Saved:
    return copy.deepcopy((training.module.state_dict(), training.optimizer.state_dict()))


def load(training: Any, state: Saved) -> None:
    training.module.load_state_dict(state[0])
    training.optimizer.load_state_dict(state[1])


@pytest.mark.parametrize("taken", [0, 7])
def test_a_training_that_is_gone_on_with_is_warmed_up_and_counted_like_any(loops: list[Loop], taken: int) -> None:
    before, loop = loops
    for _ in range(100):
        before.step()
    tuner = zftune.attach(loop.optimizer, store=False)
    for _ in range(taken):
        loop.step()
    load(loop, saved(before))
    loop.run(tuner, until=lambda: tuner.live is not None)
    assert loop.optimizer.steps - 100 > warm_up_steps(loop.optimizer.config)
    tuner.close()
    (said,) = (notice for notice in tuner.notices if "tuned nothing" in notice)
    assert f"the training took {loop.optimizer.steps - 100 + taken} steps" in said


def test_warm_up_rounds_that_a_loaded_state_has_behind_it_are_not_waited_for(loops: list[Loop]) -> None:
    before, loop = (Loop(replace(BEGIN, full_warm_up_rounds=60)) for _ in range(2))
    loops += [before, loop]
    for _ in range(100):
        before.step()
    tuner = zftune.attach(loop.optimizer, store=False)
    load(loop, saved(before))
    most = warm_up_steps(loop.optimizer.config) + 5
    loop.run(tuner, until=lambda: tuner.live is not None or loop.optimizer.steps > 100 + most)
    began = tuner.live is not None or tuner._driver.begun
    tuner.close()
    assert began


def test_what_was_measured_is_given_up_and_the_search_goes_on(make: Make) -> None:
    scene = make(most=7)
    for _ in range(9):
        scene.train()
    state = saved(scene)
    # The search began before these steps: they are its own to see.
    scene.run(until=lambda: scene.live.request is not None and scene.live.request.role == "explore")
    scene.run(until=lambda: scene.live.steady_steps > 3 and scene.knobs != scene.search.book.incumbent.setting)
    count, request = len(scene.recorder.told), scene.live.request
    load(scene, state)
    scene.train()
    scene.live.go_on_from_saved()
    assert scene.optimizer.steps == 10
    assert scene.recorder.told[count][0] is request
    outcome = scene.recorder.told[count][1]
    assert (outcome.status, outcome.called_off, outcome.reason) == ("void", True, "a saved state was loaded")
    begun = len(scene.changes)
    scene.history.clear()
    scene.run()
    assert scene.changes[begun][0] < 40  # it sees steps again, long before there are as many as there were
    later = scene.recorder.told[count + 1 :]
    assert any(outcome.status == "measured" for _, outcome in later)
    for request, outcome in later:
        if outcome.status == "measured":
            assert_whole(scene, request, outcome)
    scene.train()
    assert scene.knobs == scene.search.book.incumbent.setting
    assert all(balance.balanced for balance in scene.optimizer.ledger().values())


@pytest.mark.parametrize(
    "knobs", [{"topk_ratio": 0.3, "update_interval": 3, "apply_lag": 1}, {"update_interval": "auto"}]
)
@pytest.mark.parametrize("thinks", [False, True])
def test_knobs_that_a_loaded_state_has_give_way_to_the_incumbents(
    make: Make, monkeypatch: pytest.MonkeyPatch, knobs: dict[str, Any], thinks: bool
) -> None:
    scene = make(most=1, watch=True)
    scene.run(until=lambda: scene.live.request is not None and scene.live.request.role == "hold")
    if thinks:
        monkeypatch.setattr(SyncWorker, "poll", lambda _: None)
        scene.run(until=lambda: scene.live.request is None)
    own = scene.knobs
    scene.optimizer.set_knobs(**knobs)
    scene.train()
    state = saved(scene)
    scene.optimizer.set_knobs(**own.knobs())
    scene.train()
    load(scene, state)
    scene.train()
    assert {name: getattr(scene.optimizer.config, name) for name in knobs} == knobs
    scene.live.go_on_from_saved()
    scene.train()
    assert scene.knobs == own


@pytest.mark.parametrize("loads", [True, False])
def test_higher_losses_of_an_older_state_are_no_spike(loops: list[Loop], loads: bool) -> None:
    loop = loops[0]
    tuner = zftune.attach(loop.optimizer, store=False)
    loop.run(tuner, until=lambda: tuner.live is not None)
    state = saved(loop)
    for _ in range(40):
        loop.step(scale=0.01)
    if loads:
        load(loop, state)
    for _ in range(8):
        loop.step(scale=10.0)
    tuner.close()
    assert tuner.search is not None
    assert any(note.kind == "guard" for note in tuner.search.notes) is not loads


def test_a_guard_forgets_what_it_saw() -> None:
    guard = LossGuard()
    for _ in range(40):
        assert guard.add(1.0) is None
    guard.forget()
    assert [guard.add(10.0) for _ in range(8)] == [None] * 8
    for _ in range(40):
        guard.add(1.0)
    assert any(guard.add(10.0) for _ in range(8))


def test_steps_of_a_loaded_state_are_the_incumbents_until_knobs_change() -> None:
    outside = UnmeasuredCounter()
    outside.change(50, challenges=True)
    outside.add(51, 1000.0)
    assert outside.taken() == UnmeasuredSteps(0.0, 1.0, 1)
    outside.forget_changes()
    outside.add(101, 1000.0)
    assert outside.taken() == UnmeasuredSteps(1.0, 0.0, 0)
