"""A search in a real training loop: real knobs, real step times, and no gradient lost."""

from __future__ import annotations

import itertools
import logging
import time
from dataclasses import replace
from typing import Any

import pytest

from tests.support.zftune.tuner.scene import Make, Scene, SyncWorker, assert_whole
from tests.unit.zenflow.test_pinned import PinningDevice
from zenflow import HostMemoryError
from zenflow.errors import HostThreadsError
from zftune.quality import LossGuard
from zftune.store.types import TrialState
from zftune.tuner.evidence import Gain
from zftune.tuner.executor import Block
from zftune.tuner.messages import sentence
from zftune.tuner.space import Setting
from zftune.tuner.states import OF_INCUMBENT, Request
from zftune.tuner.worker import Answer, DeskMaker, ThreadWorker


@pytest.mark.parametrize(
    "how",
    [{"worker": SyncWorker}, {"worker": ThreadWorker}, {"worker": ThreadWorker, "sampler": "tpe", "micro_batches": 2}],
    ids=["inline", "thread", "optuna"],
)
def test_knobs_follow_the_search_windows_are_whole_and_no_gradient_is_lost(make: Make, how: dict[str, Any]) -> None:
    scene = make(**how)
    ends = time.monotonic() + 240
    while True:
        request = scene.live.request
        going = scene.step()
        assert time.monotonic() < ends
        if request is not None and scene.live.request is request and isinstance(scene.live.state, Block):
            assert scene.knobs == request.setting
        if request is None and scene.live.request is None and scene.live.steady_steps > 0:
            assert scene.knobs == scene.live.incumbent  # nothing slow runs on while somebody thinks
        if not going:
            break
    assert scene.search.next() is None
    scene.step()  # the last change holds
    assert scene.knobs == scene.search.book.incumbent.setting == scene.live.incumbent
    for _ in range(3):
        scene.step()
    assert {request.role for request, _ in scene.recorder.told} >= {"start", "explore"}
    assert not [sentence(note) for note in scene.search.notes if note.kind == "remark"]
    for request, outcome in scene.recorder.told:
        if outcome.status == "measured":
            assert_whole(scene, request, outcome)
    assert_cost(scene)
    scene.optimizer.flush()
    balances = scene.optimizer.ledger()
    assert balances
    for balance in balances.values():
        assert balance.balanced
        assert balance.produced


def assert_cost(scene: Scene) -> None:
    """Every step's time has passed, those that nobody measured too, and what a challenger ran on for is its cost."""
    told = scene.recorder.told
    in_measurements = sum(outcome.step_count for _, outcome in told)
    assert in_measurements < scene.live._seen
    passed_ms = sum(scene.history[step].step_ms or 0.0 for step in range(1, scene.live._seen + 1))
    since = scene.live.unmeasured
    counted_s = scene.search.cost.elapsed_s + since.seconds + since.late_s
    assert counted_s == pytest.approx(passed_ms / 1e3, rel=1e-6)
    for (request, _), (_, after) in itertools.pairwise(told):
        if request.role not in OF_INCUMBENT:
            assert after.between.late_steps >= 2  # step times come two steps late


def test_a_store_that_hangs_delays_no_step_and_the_incumbent_runs_meanwhile(make: Make) -> None:
    scene = make(worker=ThreadWorker)
    scene.run(until=lambda: len(scene.recorder.told) == 1)
    scene.recorder.open.clear()
    scene.run(until=lambda: scene.live.request is not None)
    scene.run(until=lambda: scene.live.request is None)  # a challenger was measured, and is being written down
    for _ in range(50):
        assert scene.step()
        assert scene.live.request is None
    assert scene.knobs == scene.live.incumbent
    assert len(scene.recorder.told) == 1
    scene.recorder.open.set()
    scene.run(until=lambda: len(scene.recorder.told) == 3)
    assert scene.recorder.told[2][1].between.seconds > 0


def test_a_failure_beside_the_training_ends_the_search_and_nothing_else(
    make: Make, caplog: pytest.LogCaptureFixture
) -> None:
    scene = make(worker=ThreadWorker)
    scene.recorder.fails_at = 1
    scene.run()
    assert scene.search.notes[-1].kind == "stop"
    assert scene.search.notes[-1].details["text"] == "The search failed: ArithmeticError: a bug."
    assert "ArithmeticError: a bug" in caplog.text
    scene.step()
    assert scene.knobs == scene.search.book.incumbent.setting


@pytest.mark.parametrize(
    ("worker", "refusal"),
    [(SyncWorker, HostMemoryError), (ThreadWorker, HostMemoryError), (SyncWorker, HostThreadsError)],
)
def test_a_setting_that_the_runtime_refuses_is_never_tried_again(
    make: Make, worker: DeskMaker, refusal: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    scene = make(most=5, worker=worker)
    real = scene.optimizer.set_knobs

    def set_knobs(**knobs: Any) -> int:
        if knobs["topk_ratio"] == 0.2:
            raise refusal("the host has too little memory")
        return real(**knobs)

    monkeypatch.setattr(scene.optimizer, "set_knobs", set_knobs)
    scene.run()
    trial = scene.search.book.trials[1]
    assert trial.state is TrialState.CRASHED
    assert trial.reason == "the host has too little memory"
    assert all(setting.topk_ratio != 0.2 for _, setting in scene.changes)


def test_where_nothing_can_be_written_down_nothing_is_tried(make: Make) -> None:
    scene = make(worker=ThreadWorker)
    scene.recorder.refuse = True
    scene.run()
    assert scene.search.notes[-1].details["text"] == "The disk is full."
    assert {request.role for request, _ in scene.recorder.told} == {"start"}


@pytest.mark.parametrize("worker", [SyncWorker, ThreadWorker])
def test_the_guard_ends_it_where_the_loss_is_not_finite(make: Make, worker: DeskMaker) -> None:
    scene = make(guard=LossGuard(), worker=worker)
    scene.run(until=lambda: scene.live.request is not None and scene.live.request.role == "explore")
    assert not scene.step(scale=float("inf"))
    wrong = scene.optimizer.steps
    scene.step()
    assert scene.knobs == scene.search.book.trials[0].setting
    scene.live.close()
    assert scene.search.notes[-1].kind == "guard"
    text = scene.search.notes[-1].details["text"]
    assert text.startswith("Training goes on with the settings at the start")
    assert f"at step {wrong} the loss is inf." in text
    assert text.endswith(f"the newest from before step {wrong - 3}.")


def test_the_guard_interrupts_a_thought(make: Make) -> None:
    scene = make(guard=LossGuard(), worker=ThreadWorker)
    scene.recorder.open.clear()
    scene.run(until=lambda: scene.search.measurements == 1)  # and now it is written down
    assert scene.live.request is None
    assert not scene.step(scale=float("nan"))
    assert scene.live.over
    scene.recorder.open.set()
    scene.live.close()
    assert scene.search.notes[-1].kind == "guard"
    assert scene.search.next() is None


def test_stopping_while_somebody_thinks(make: Make) -> None:
    scene = make(worker=ThreadWorker)
    scene.step()
    scene.live.stop("Enough.")
    assert scene.search.notes[-1].details["text"] == "Enough."
    assert not scene.step()
    assert scene.search.next() is None


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


@pytest.mark.parametrize(("scale", "is_wrong"), [(1e-3, False), (1.0, True)])
def test_a_loss_that_has_converged_to_nearly_nothing_may_double(scale: float, is_wrong: bool) -> None:
    guard = LossGuard()
    losses = [scale * (1 + 0.01 * (step % 3)) for step in range(40)] + [2.5 * scale] * 6
    assert (any(guard.add(loss) is not None for loss in losses)) is is_wrong


def test_longer_steps_void_what_is_measured_and_begin_the_search_again(make: Make) -> None:
    scene = make(most=20)
    scene.run(lambda: scene.search.measurements >= 2 and scene.live.request is not None)
    scene.live.log_tokens(32)
    scene.run(lambda: any(note.kind == "reopen" for note in scene.search.notes))
    void = next(outcome for _, outcome in scene.recorder.told if outcome.status == "void")
    assert (void.reason, void.tokens) == ("the tokens of a step have changed", 32)
    assert scene.search.book.tokens == 32
    counts = [len(outcome.steps_ms) for _, outcome in scene.recorder.told]
    assert max(counts) <= 64  # of one measurement, not of all
    before = len(scene.search.notes)
    scene.live.log_tokens(32)  # the same: nothing happens
    scene.step()
    assert not any(note.kind == "reopen" for note in scene.search.notes[before:])


class Late:
    """A disturbance that is said once."""

    def __init__(self) -> None:
        self.happened: str | None = None

    def __call__(self) -> str | None:
        said, self.happened = self.happened, None
        return said


def test_a_change_of_knobs_does_not_disturb_what_is_measured_after_it(make: Make) -> None:
    late = Late()
    scene = make(disturbance=late)
    changed = 0
    while scene.step():
        if len(scene.changes) > changed:
            changed, late.happened = len(scene.changes), "this machine was late"  # moving the state takes its time
    assert changed > 2
    assert {outcome.status for _, outcome in scene.recorder.told} == {"measured"}


def test_what_disturbs_the_steps_that_count_does(make: Make) -> None:
    late = Late()
    scene = make(disturbance=late)
    scene.run(lambda: isinstance(scene.live.state, Block) and len(scene.live.state.steps) > 2)
    late.happened = "this machine was late"
    scene.run(lambda: bool(scene.recorder.told))
    (_, outcome) = scene.recorder.told[0]
    assert (outcome.status, outcome.reason) == ("void", "this machine was late")


def test_a_trial_is_measured_once_its_memory_is_pinned_and_pays_for_that(make: Make) -> None:
    device, longer = PinningDevice(), Setting(topk_ratio=0.1, update_interval=6, apply_lag=1, host_threads=1)
    scene = make(planned=longer, device=device)
    scene.run(until=lambda: isinstance(scene.live.state, Block) and len(scene.live.state.steps) > 2)
    device.gate.clear()
    scene.run(until=lambda: scene.knobs == longer)
    asked = scene.optimizer.steps
    for _ in range(3):  # the memory of shorter windows has room for these
        scene.step()
    assert isinstance(scene.live.state, Block)
    assert not scene.live.state.begun
    device.gate.set()
    scene.run(until=lambda: any(request.setting == longer for request, _ in scene.recorder.told))
    (outcome,) = [outcome for request, outcome in scene.recorder.told if request.setting == longer]
    first = next(step for step, stats in scene.history.items() if stats.step_ms == outcome.discarded_ms[0])
    assert scene.history[first - 1].closed
    pinning = [step for step, stats in scene.history.items() if stats.pin_ms and step >= asked]
    assert len(pinning) >= 3
    assert max(pinning) < first
    assert outcome.between.late_steps == first - asked


@pytest.mark.parametrize(
    ("interval", "recent", "expected_ms"),
    [
        (4, [], 50.0),
        (4, [70.0] * 4, 50.0),
        (4, [90.0, 110.0] * 4, 100.0),
        (4, [100.0] * 31 + [60_100.0], 104.6875),  # an evaluation lies between two steps: it counts for 2.5 of them
        (64, [100.0] * 32, 50.0),  # no window is whole, and none of these closes one
    ],
)
def test_what_a_try_costs_is_beside_the_newest_steps_of_the_best(
    make: Make, interval: int, recent: list[float], expected_ms: float
) -> None:
    """Beside other work these are others than when it was measured."""
    live = make(worker=SyncWorker).live
    live.incumbent = replace(live.incumbent, update_interval=interval)
    live._of_incumbent_ms.clear()
    live._of_incumbent_ms.extend(recent)
    request = Request(replace(live.incumbent, topk_ratio=0.3), "explore", 1, 4, 20, incumbent_step_ms=50.0)
    live._carry_out(Answer(request, live.incumbent))
    assert live._incumbent_step_s == pytest.approx(expected_ms / 1e3)


def test_other_best_settings_are_logged_with_what_they_save(make: Make, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="zftune")
    live = make(worker=SyncWorker).live
    start = live.incumbent
    first = replace(start, topk_ratio=0.3)
    for setting, gain in ((first, Gain(0.1, 0.004)), (first, Gain(0.11, 0.004)), (start, None)):
        live._adopt(setting, gain)
    assert [one for one in caplog.messages if one.startswith("zftune sets")] == [
        "zftune sets the best settings so far: topk_ratio 0.3, which saves 10.0 +/- 0.8% of the step time.",
        f"zftune sets the best settings so far: topk_ratio {start.topk_ratio:g}.",
    ]
