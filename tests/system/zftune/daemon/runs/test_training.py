"""A search in a daemon that is killed, slow, or speaks nonsense: no weight changes, and no step waits."""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import zftune
from tests.support.zftune.daemon.in_process import Client, following
from tests.support.zftune.daemon.runs.agents import facts
from tests.support.zftune.daemon.runs.loops import ENDS_S, Direct, Loop, registry_of
from zftune.daemon import PROTOCOL
from zftune.daemon.client import session
from zftune.daemon.runs.registry import Registry
from zftune.errors import BadInputError, DaemonError
from zftune.store import open_store
from zftune.store.store import Store
from zftune.store.types import RunState
from zftune.tuner.drivers import LocalDriver
from zftune.tuner.messages import sentence
from zftune.tuner.space import Setting


@pytest.fixture
def transport(store: Store) -> Iterator[Direct]:
    registry = Registry(lambda _: store)
    registry.start()
    yield Direct(registry)
    registry.close()


@pytest.fixture
def loop(request: pytest.FixtureRequest) -> Callable[..., Loop]:
    def make(*arguments: Any, **more: Any) -> Loop:
        made = Loop(*arguments, **more)
        request.addfinalizer(made.close)
        return made

    return make


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session, "_LONGEST_BACKOFF_S", 0.2)
    monkeypatch.setattr(session, "QUICK_S", 0.01)
    monkeypatch.setattr(session, "_SILENCE_S", 0.2)  # so that goodbye is given up soon


def replayed(loop: Loop) -> Loop:
    """The same training with the same knobs at the same steps, and no daemon."""
    other = Loop(None)
    steps, changes = loop.optimizer.steps, dict(loop.changes)
    while other.optimizer.steps < steps:
        if other.optimizer.steps in changes_before(changes):
            other.optimizer.set_knobs(**changes_before(changes)[other.optimizer.steps])
        other.step()
    return other


def changes_before(changes: dict[int, Any]) -> dict[int, Any]:
    """Knobs by the step before the one that closes the window for them: `set_knobs` returns the next step."""
    return {step - 1: knobs for step, knobs in changes.items()}


def assert_same_weights(loop: Loop) -> None:
    other = replayed(loop)
    try:
        for training in (loop, other):
            training.optimizer.flush()  # until the next forward pass some updates may still be on their way
        for one, two in zip(loop.module.parameters(), other.module.parameters(), strict=True):
            assert torch.equal(one, two)
        assert len({json.dumps(dict(knobs), sort_keys=True) for _, knobs in loop.changes}) > 1  # it says something
    finally:
        other.close()


@pytest.mark.smoke
def test_commands_reach_a_training(
    tmp_path: Path, loop: Callable[..., Loop], quick: None, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "zftune")
    with following(tmp_path) as application, Client(application) as client:
        training = loop(Client(application))
        tuner = training.tuner
        assert tuner is not None
        training.run(lambda: training.requested and training.live_role == "explore")
        (listed,) = client.get("/v1/runs")
        run = listed["run"]
        assert client.post(f"/v1/runs/{run}/pause")["state"] == "paused"
        training.run(lambda: not training.requested)
        training.run(lambda: training.knobs == tuner.incumbent)
        steps = training.optimizer.steps
        training.run(lambda: training.optimizer.steps > steps + 50)
        assert not training.requested
        client.post(f"/v1/runs/{run}/resume")
        training.run(lambda: training.requested)
        client.post(f"/v1/runs/{run}/stop")
        training.run(lambda: not tuner.searching)
        tuner.close()
        training.step()  # the last change holds
        assert training.knobs == tuner.incumbent
        details = client.get(f"/v1/runs/{run}")
    assert_same_weights(training)
    assert details["run"]["state"] == "ended"
    assert [one["kind"] for one in details["decisions"]][-1] in ("stop", "remark")
    assert details["trials"][0]["source"] == "start"
    assert details["steps"]
    assert details["run"]["knobs"] == training.knobs.knobs()
    assert details["run"]["losses"]["sentence"]
    assert details["curve"][0]["loss"] is not None
    # the newest losses come before their steps' times
    assert [one for one in details["curve"] if one["step_ms"] is not None and one["loss"] is not None]
    named = [one for one in caplog.messages if one.startswith("zftune tunes this training as run ")]
    called = str(details["run"]["record"])[:8]
    assert named == [f"zftune tunes this training as run {called}, watch it with: zftune top {called}"]


class Quick(Direct):
    """A daemon that thinks faster than it answers."""

    def post(self, route: str, document: Any = None, *, timeout_s: float | None = None) -> Any:
        answer = super().post(route, document)
        while answer.get("thinks"):
            time.sleep(0.002)
            answer = super().post(route, json.dumps({**json.loads(document), "steps": [], "losses": [], "done": None}))
        return answer


@pytest.mark.smoke
def test_in_simulated_time_a_run_with_a_daemon_repeats_to_the_last_digit(loop: Callable[..., Loop]) -> None:
    """With the second daemon every thought is over before the answer is written."""
    seen = []
    for transport in (Direct, Quick):
        with open_store("sqlite://", environment={"HOME": "/nowhere"}) as store, registry_of(store) as registry:
            training = loop(transport(registry), emulated=True, thinking_s=0.05)
            for _ in range(260):
                training.step()
            training.close()
            times = [stats.step_ms for stats in training.optimizer.history(wait=True)]
            seen.append((training.changes, times, [sentence(one) for one in store.decisions(store.runs()[0].run_id)]))
    first, second = seen
    assert len(first[0]) >= 2  # something was tried
    assert first[0] == second[0]
    assert first[2] == second[2]
    differing = [(step, *ms) for step, ms in enumerate(zip(first[1], second[1], strict=True)) if ms[0] != ms[1]]
    assert differing == []


class Odd:
    """A daemon that answers as it likes."""

    def __init__(self, answer: Callable[[str], Any]) -> None:
        self._answer = answer
        self.asked = 0

    def post(self, route: str, document: Any = None, *, timeout_s: float | None = None) -> Any:
        self.asked += 1
        return self._answer(route)

    def close(self) -> None:
        return


WELCOME = {"protocol": PROTOCOL, "session": "a" * 32, "lease_s": 1.0}
HOLD = {"protocol": PROTOCOL, "session": "a" * 32, "decision": 0, "kind": "hold", "state": "warming"}
GARBAGE: list[Any] = [
    None, [], "no", 7, {}, {"protocol": 99}, {**HOLD, "protocol": 99}, {**HOLD, "kind": "burn"},
    {**HOLD, "decision": -1},
    {**HOLD, "session": "b" * 32}, {**HOLD, "kind": "apply"}, {**HOLD, "kind": "apply", "request": {}},
    {**HOLD, "incumbent": {"topk_ratio": "x"}}, {**HOLD, "notices": [1]},
    {**HOLD, "kind": "apply", "incumbent": Setting.of(facts().config).knobs(),
     "request": {"setting": Setting.of(facts().config).knobs(), "role": "explore", "trial": 1, "discard": 4,
                 "steps": 10**12}},
]  # fmt: skip


@pytest.mark.smoke
def test_garbage_changes_nothing(loop: Callable[..., Loop], quick: None) -> None:
    answers = iter(GARBAGE)
    over = threading.Event()

    def answer(route: str) -> Any:
        if route == "/v1/runs":
            return WELCOME
        found = next(answers, over)
        if found is over:
            over.set()
            raise DaemonError("enough")
        return found

    training = loop(Odd(answer))
    training.run(over.is_set)
    assert training.changes == []
    assert training.tuner is not None
    assert training.tuner.searching
    assert training.knobs == Setting.of(facts().config)


@pytest.mark.smoke
def test_a_setting_that_cannot_be_applied_is_a_crash_of_that_setting(loop: Callable[..., Loop], quick: None) -> None:
    absurd = {**Setting.of(facts().config).knobs(), "topk_ratio": 7.0}
    request = {"setting": absurd, "role": "explore", "trial": 1, "discard": 4, "steps": 20}
    reports: list[Any] = []

    class Absurd(Odd):
        def post(self, route: str, document: Any = None, *, timeout_s: float | None = None) -> Any:
            reports.append(json.loads(document))
            return super().post(route, document)

    own = Setting.of(facts().config).knobs()
    apply = {**HOLD, "kind": "apply", "decision": 1, "request": request, "incumbent": own}
    training = loop(Absurd(lambda route: WELCOME if route == "/v1/runs" else apply))
    training.run(lambda: bool(reports) and bool(reports[-1].get("done")))
    assert reports[-1]["done"]["outcome"]["status"] == "crashed"
    assert "topk_ratio" in reports[-1]["done"]["outcome"]["reason"]
    assert training.knobs.knobs() == own


@pytest.mark.smoke
def test_a_slow_daemon_delays_no_step(transport: Direct, loop: Callable[..., Loop]) -> None:
    release, answered = threading.Event(), threading.Event()

    class Slow(Direct):
        def post(self, route: str, document: Any = None, *, timeout_s: float | None = None) -> Any:
            release.wait(ENDS_S)
            answered.set()
            return super().post(route, document)

    training = loop(Slow(transport.registry))
    try:
        training.run(lambda: training.tuner is not None and training.tuner.live is not None)
        assert training.tuner is not None
        for _ in range(300):
            training.step()
        assert not answered.is_set()
        assert training.changes == []
    finally:
        release.set()


def test_a_loss_that_is_not_finite_ends_it(transport: Direct, store: Store, loop: Callable[..., Loop]) -> None:
    training = loop(transport)
    training.run(lambda: training.requested and training.live_role == "explore")
    training.step(scale=float("nan"))
    training.step()
    assert training.tuner is not None
    assert not training.tuner.searching
    training.step()
    training.close()
    assert training.knobs == Setting.of(facts().config)
    (run,) = store.runs()
    assert "guard" in [one.kind for one in store.decisions(run.run_id)]
    assert run.state is RunState.FINISHED


def test_what_the_daemon_hears_while_nobody_answers_is_bounded(
    transport: Direct, loop: Callable[..., Loop], quick: None
) -> None:
    training = loop(transport)
    training.run(lambda: training.requested)
    transport.away.set()
    worker = training.tuner.driver._worker  # type: ignore[union-attr]
    figures = worker.report(PROTOCOL, "a" * 32).steps
    worker.heard()
    assert len(figures) <= 1024
    (stats,) = training.optimizer.history()[-1:]
    for _ in range(3000):
        worker.observe(stats)
        worker.hear_loss(1, 1.0)
    report = worker.report(PROTOCOL, "a" * 32)
    assert len(report.steps) == len(report.losses) == 1024
    assert report.dropped >= 2 * (3000 - 1024)


@pytest.mark.smoke
def test_which_searches_is_said_by_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("ZFTUNE_SOCKET", str(tmp_path / "none.sock"))
    training = Loop(None)
    try:
        monkeypatch.setenv("ZFTUNE_ONLINE", "somewhere")
        with pytest.raises(BadInputError, match="ZFTUNE_ONLINE is 'somewhere'; it must be daemon or process"):
            zftune.attach(training.optimizer)
        monkeypatch.setenv("ZFTUNE_ONLINE", "daemon")
        with pytest.raises(BadInputError, match="store must be None where the daemon searches"):
            zftune.attach(training.optimizer, store=False, daemon=True)
        with zftune.attach(training.optimizer, store=False) as tuner:  # it has no daemon in mind
            assert isinstance(tuner.driver, LocalDriver)
        with zftune.attach(training.optimizer) as tuner:
            training.run(lambda: any("no daemon serves" in notice for notice in tuner.notices))
            assert tuner.live is not None
            assert tuner.search is None
    finally:
        training.close()
