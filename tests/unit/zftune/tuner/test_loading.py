"""A saved state is loaded into a training that is tuned: at its beginning, or back to where it was before."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import zftune
from tests.support.zftune.tuner.loop import BEGIN, Loop
from tests.support.zftune.tuner.scene import Make, SyncWorker, assert_whole
from zenflow import HostMemoryError
from zftune.exactness import EXACT
from zftune.tuner.drivers import LocalDriver
from zftune.tuner.setup import WarmupStats
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


@pytest.mark.parametrize("late", [0, 3])  # steps before anybody follows them
@pytest.mark.parametrize("loads", [True, False])
def test_a_training_begins_anew_where_no_state_was_loaded(
    loops: list[Loop], monkeypatch: pytest.MonkeyPatch, loads: bool, late: int
) -> None:
    seen: list[WarmupStats] = []
    monkeypatch.setattr(LocalDriver, "prepare", lambda _, stats, counter: seen.append(stats))
    before, loop = loops
    for _ in range(5):
        before.step()
    for _ in range(late):
        loop.step()
    if loads and late:
        load(loop, saved(before))
    tuner = zftune.attach(loop.optimizer, store=False)
    loop.step()
    if loads and not late:
        load(loop, saved(before))
    loop.run(tuner, until=lambda: bool(seen))
    tuner.close()
    assert seen[0].begins_anew is not loads


def test_warm_up_rounds_that_a_loaded_state_has_behind_it_are_not_waited_for(loops: list[Loop]) -> None:
    before, loop = (Loop(replace(BEGIN, full_warm_up_rounds=60)) for _ in range(2))
    loops += [before, loop]
    for _ in range(100):
        before.step()
    tuner = zftune.attach(loop.optimizer, store=False)
    load(loop, saved(before))
    most = warm_up_steps(loop.optimizer.config) + 5
    loop.run(tuner, until=lambda: tuner.live is not None or loop.optimizer.steps > 100 + most)
    began = tuner.live is not None or tuner.driver.begun
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
    scene.live.resume_from_saved()
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
    scene = make(most=1, hold=True)
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
    scene.live.resume_from_saved()
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


def tried(loop: Loop, setting: dict[str, Any], best: dict[str, Any]) -> Saved:
    """A state that is saved while a search, which has found `best`, tries a setting."""
    loop.optimizer.set_knobs(**best)
    loop.step()
    kept = loop.knobs.knobs()
    loop.optimizer.set_knobs(**setting)
    loop.step()
    loop.optimizer.kept_knobs = kept
    return saved(loop)


@pytest.mark.parametrize("attached", [False, True])
def test_a_setting_that_was_tried_when_the_state_was_saved_gives_way_to_the_best(
    loops: list[Loop], caplog: pytest.LogCaptureFixture, attached: bool
) -> None:
    before, loop = loops
    caplog.set_level("INFO", logger="zftune")
    state = tried(before, {"topk_ratio": 0.4}, {"topk_ratio": 0.2})
    changes: list[tuple[int, Any]] = []
    if not attached:
        load(loop, state)
    tuner = zftune.attach(loop.optimizer, store=False, on_change=lambda *change: changes.append(change))
    if attached:
        load(loop, state)
    assert loop.knobs.topk_ratio == 0.4
    loop.step()  # closes the window
    if attached:
        loop.step()  # the first has shown that a state was loaded
    assert loop.knobs.topk_ratio == 0.2
    assert loop.optimizer.asked_config.topk_ratio == 0.1  # the script asks for that, and has begun its run with it
    said = "Back to the best settings so far (topk_ratio 0.2): the checkpoint was saved while others were tried."
    assert [one for one in caplog.messages if "best settings so far" in one] == [said]
    assert said in tuner.notices
    assert [(step, knobs["topk_ratio"]) for step, knobs in changes] == [(loop.optimizer.steps, 0.2)]
    tuner.close()


@pytest.mark.parametrize("steps", [0, 2])  # before and after it holds
@pytest.mark.parametrize("by_hand", [False, True])
def test_what_a_search_has_left_is_not_what_the_script_asks_for(
    loops: list[Loop], caplog: pytest.LogCaptureFixture, by_hand: bool, steps: int
) -> None:
    caplog.set_level("INFO", logger="zftune")
    loop = loops[0]
    tuner = zftune.attach(loop.optimizer, store=False)
    loop.run(tuner, until=lambda: tuner.live is not None)
    assert tuner.live is not None
    if not by_hand:
        tuner.live.incumbent = replace(tuner.live.incumbent, update_interval=1, apply_lag=1, overlap_step=False)
    tuner.close()
    if by_hand:
        loop.optimizer.set_knobs(**EXACT)
    for _ in range(steps):
        loop.step()
    assert loop.optimizer.asked_config.update_interval == 1
    later = zftune.attach(loop.optimizer, store=False)
    assert f"with quality {'exact' if by_hand else 'published'}" in caplog.messages[-2]
    loop.run(later, until=lambda: later.live is not None)
    assert later.incumbent.update_interval == (1 if by_hand else 4)
    later.close()


def test_it_does_so_without_a_daemon_that_answers(
    loops: list[Loop], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ZFTUNE_SOCKET", str(tmp_path / "none.sock"))

    def refuse(*_: Any) -> None:
        raise ConnectionRefusedError

    monkeypatch.setattr("zftune.daemon.client.http._Socket.connect", refuse)
    before, loop = loops
    load(loop, tried(before, {"topk_ratio": 0.4}, {"topk_ratio": 0.2}))
    tuner = zftune.attach(loop.optimizer, daemon=True)
    loop.run(tuner, until=lambda: tuner.live is not None)
    loop.step()
    assert loop.knobs.topk_ratio == tuner.incumbent.topk_ratio == 0.2
    tuner.close()
    assert tuner.conclusion == "zftune tuned nothing: no daemon has answered."


def test_what_a_script_sets_after_it_has_loaded_a_state_stays(loops: list[Loop]) -> None:
    before, loop = loops
    load(loop, tried(before, {"topk_ratio": 0.4}, {"topk_ratio": 0.2}))
    loop.optimizer.set_knobs(topk_ratio=0.3)
    with zftune.attach(loop.optimizer, store=False):
        loop.step()
        assert loop.knobs.topk_ratio == 0.3


def test_where_a_script_asks_for_something_else_than_then_it_has_that(loops: list[Loop]) -> None:
    state = tried(loops[0], {"topk_ratio": 0.4, "update_interval": 8}, {"topk_ratio": 0.2})
    loop = Loop(replace(BEGIN, topk_ratio=0.3))
    loops.append(loop)
    load(loop, state)
    with zftune.attach(loop.optimizer, store=False):
        loop.step()
        assert (loop.knobs.topk_ratio, loop.knobs.update_interval) == (0.3, 4)


def test_exact_is_exact_whatever_the_best_of_a_saved_search_was(loops: list[Loop]) -> None:
    before, loop = loops
    load(loop, tried(before, {"update_interval": 1, "apply_lag": None, "overlap_step": False}, {"topk_ratio": 0.2}))
    with zftune.attach(loop.optimizer, store=False, quality="exact"):
        loop.step()
        assert loop.knobs.synchronous


def test_a_state_with_the_best_setting_has_nothing_to_go_back_to(loops: list[Loop]) -> None:
    before, loop = loops
    before.step()
    before.optimizer.kept_knobs = before.knobs.knobs()
    load(loop, saved(before))
    assert loop.optimizer.kept_knobs is None


def test_a_best_setting_that_is_refused_is_said_and_the_training_goes_on(
    loops: list[Loop], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    before, loop = loops
    load(loop, tried(before, {"topk_ratio": 0.4}, {"topk_ratio": 0.2}))

    def refuse(*_: Any) -> None:
        raise HostMemoryError("the host has 3 bytes")

    with monkeypatch.context() as patched:
        patched.setattr("zenflow.training.prepare", refuse)
        tuner = zftune.attach(loop.optimizer, store=False)
    loop.step()
    assert loop.knobs.topk_ratio == 0.4
    assert "The settings that the checkpoint was saved with stay: the host has 3 bytes." in caplog.text
    tuner.close()
