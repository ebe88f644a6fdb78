"""What a tuner holds where the search is in the daemon: the guard's sentence, and who says goodbye."""

from __future__ import annotations

import gc
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.support import fork_server
from tests.support.zftune.daemon.runs.agents import facts
from tests.support.zftune.daemon.runs.loops import Loop
from tests.unit.zftune.daemon.client.test_session import HOLD, WELCOME, Scripted
from zftune.errors import NoDaemonError
from zftune.tuner.space import Setting
from zftune.tuner.tuner import Tuner

pytestmark = pytest.mark.smoke

OWN = Setting.of(facts().config).knobs()
OTHER = {**OWN, "topk_ratio": 0.2}
GUARD = "Training goes on with the settings at the start"
ROOT = Path(__file__).parents[5]


@pytest.fixture
def daemon() -> Scripted:
    return Scripted()


@pytest.fixture
def training(daemon: Scripted) -> Iterator[Loop]:
    loop = Loop(daemon)
    yield loop
    loop.close()


def tuner_of(training: Loop) -> Tuner:
    assert training.tuner is not None
    return training.tuner


def go_wrong(training: Loop) -> None:
    """Train until the search is being made, and then so that the loss is no number."""
    tuner = tuner_of(training)
    training.run(lambda: tuner.live is not None)
    training.step(scale=float("nan"))
    training.run(lambda: not tuner.searching)
    training.close()


def guarded(training: Loop) -> list[str]:
    return [one for one in tuner_of(training).notices if one.startswith(GUARD)]


def test_without_a_daemon_the_guard_tells_what_it_did(training: Loop, daemon: Scripted) -> None:
    daemon.answers["runs"] = [NoDaemonError("no daemon serves 'x'")]
    go_wrong(training)
    (sentence,) = guarded(training)
    assert "the loss is nan." in sentence
    assert tuner_of(training).notices[-1] == sentence  # nothing is said of best knobs
    assert training.knobs == Setting.of(facts().config)


def test_a_state_that_is_saved_while_a_setting_is_tried_names_the_best(training: Loop, daemon: Scripted) -> None:
    """Without a search what was tried stays, as every knob that a state has."""
    tried = {**OWN, "topk_ratio": 0.4}
    request = {"setting": tried, "role": "explore", "trial": 1, "discard": 4, "steps": 10_000}
    daemon.answers["report"] = [{**HOLD, "kind": "apply", "decision": 1, "incumbent": OTHER, "request": request}]
    training.run(lambda: training.knobs.knobs() == tried)
    state = training.optimizer.state_dict()
    tuner_of(training).close()
    assert training.optimizer.kept_knobs is None
    other = Loop(None)
    other.optimizer.load_state_dict(state)
    other.step()
    assert other.knobs.knobs() == tried
    assert other.optimizer.kept_knobs == OTHER
    other.close()


def test_zen_auto_stays_until_a_daemon_answers(daemon: Scripted) -> None:
    daemon.answers["runs"] = [NoDaemonError("no daemon serves 'x'")]
    training = Loop(daemon, config=replace(facts().config, update_interval="auto"))
    tuner, begun = tuner_of(training), training.optimizer.config
    training.run(lambda: bool(tuner.notices))
    assert tuner.notices[-1].startswith("The daemon cannot be reached (no daemon serves 'x')")
    unknown = tuner.driver.registered
    daemon.answers["runs"], daemon.answers["report"] = [WELCOME], [{**HOLD, "state": "warming", "record": None}]
    training.run(daemon.heard.is_set)
    assert (unknown, tuner.driver.registered) == (False, True)
    for answer in ({**HOLD, "kind": "pause", "state": "paused", "incumbent": OWN}, {**HOLD, "incumbent": OWN}):
        for _ in range(20):
            training.step()
        assert tuner.live is None
        assert training.optimizer.config == begun
        before = daemon.asked.count("report")
        daemon.answers["report"] = [answer]
        training.run(lambda before=before: daemon.asked.count("report") > before + 1)  # type: ignore[misc]
    training.run(lambda: tuner.live is not None)
    assert [knobs["update_interval"] for _, knobs in training.changes] == [4]
    training.close()


def agents() -> list[threading.Thread]:
    return [one for one in threading.enumerate() if one.name == "zftune-agent"]


def thrown_away(daemon: Scripted, until: Callable[[Tuner], bool]) -> Callable[[], Any]:
    """Train for a while and let go of everything; the model, if it is still there."""

    def train() -> Callable[[], Any]:
        training = Loop(daemon)
        tuner = tuner_of(training)
        training.run(lambda: until(tuner))
        return weakref.ref(training.module)

    module = train()
    gc.collect()
    ends = time.monotonic() + 30
    while agents() and time.monotonic() < ends:
        time.sleep(0.01)
    assert agents() == []
    gc.collect()
    return module


def test_a_training_that_is_thrown_away_says_goodbye(daemon: Scripted) -> None:
    module = thrown_away(daemon, lambda tuner: tuner.live is not None and tuner.live.steady_steps > 9)
    assert module() is None
    assert daemon.asked[-2:] == ["report", "goodbye"]
    assert daemon.documents[-1]["reason"] == "The training was thrown away before the search was over."
    assert daemon.documents[-1]["steps"] > 0


def asking(steps: int) -> dict[str, Any]:
    request = {"setting": OTHER, "role": "explore", "trial": 1, "discard": 4, "steps": steps}
    return {**HOLD, "kind": "apply", "decision": 1, "request": request, "incumbent": OWN}


def reports_with(daemon: Scripted, what: str) -> list[Any]:
    return [one for one in daemon.documents if one.get(what) is not None]


def test_the_daemon_hears_that_a_setting_is_applied_before_it_hears_what_came_of_it(
    training: Loop, daemon: Scripted
) -> None:
    daemon.answers["report"] = [asking(steps=20)]
    training.run(lambda: bool(reports_with(daemon, "done")))
    first = reports_with(daemon, "applied")[0]
    assert first["applied"]["decision"] == 1
    assert first["done"] is None
    assert [one["knobs"] for one in first["changes"]][-1:] == [OTHER]
    done = reports_with(daemon, "done")[0]["done"]
    assert (done["outcome"]["status"], done["outcome"]["called_off"]) == ("measured", False)


def test_what_a_pause_ends_is_called_off(training: Loop, daemon: Scripted) -> None:
    daemon.answers["report"] = [asking(steps=100_000)]
    training.run(lambda: training.requested)
    daemon.answers["report"] = [{**HOLD, "decision": 1, "kind": "pause", "state": "paused", "incumbent": OWN}]
    training.run(lambda: bool(reports_with(daemon, "done")))
    outcome = reports_with(daemon, "done")[0]["done"]["outcome"]
    assert (outcome["status"], outcome["called_off"]) == ("void", True)
    training.step()
    assert training.knobs.knobs() == OWN


FORKS = """
import os, sys
from tests.support.zftune.daemon.runs.loops import Loop
from tests.unit.zftune.daemon.client.test_session import Scripted

parent = os.getpid()

class Telling(Scripted):
    def post(self, route, document=None, **more):
        if route.endswith("goodbye"):
            print("parent" if os.getpid() == parent else "child", flush=True)
        return super().post(route, document, **more)

daemon = Telling()
training = Loop(daemon)
training.run(daemon.heard.is_set)
child = os.fork()
if child == 0:
    training.tuner.driver._daemon_session.goodbye(lambda session: None)
    sys.exit(0)  # by way of atexit, as a forked worker may
_, status = os.waitpid(child, 0)
print(os.waitstatus_to_exitcode(status), flush=True)
"""


def test_a_forks_child_says_no_goodbye_for_its_parent() -> None:
    done = fork_server.run(["-c", FORKS], cwd=ROOT, check=True)
    assert done.stdout == "0\nparent\n", done.stderr
