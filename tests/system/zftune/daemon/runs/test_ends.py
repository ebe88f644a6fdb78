"""How a run ends: training goes wrong, goodbye is said, or nobody is heard of any more."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from tests.support.zftune.daemon.runs.agents import RUN, SOON_S
from tests.support.zftune.daemon.runs.worlds import START, World
from zftune.daemon.protocol.messages import Reattach
from zftune.daemon.runs import registry, session
from zftune.daemon.runs.states import NotAllowedError
from zftune.errors import DaemonError
from zftune.store.types import PresetState, RunState
from zftune.tuner import setup
from zftune.tuner.search import Search

WRONG = "Stopped at step 9: the loss is nan."


def until(holds: Callable[[], bool]) -> None:
    ends = time.monotonic() + SOON_S
    while not holds():
        assert time.monotonic() < ends
        time.sleep(0.002)


def held_up(monkeypatch: pytest.MonkeyPatch, goes_on: Callable[..., Any]) -> None:
    """Let the making of a search wait for something."""

    def late(*given: Any) -> Any:
        goes_on(*given)
        return setup.prepare(*given)

    monkeypatch.setattr(registry, "prepare", late)


def active(world: World) -> list[Any]:
    return [one for one in world.store.presets() if one.state is PresetState.ACTIVE]


@pytest.mark.smoke
def test_training_that_goes_wrong_ends_the_search(world: World) -> None:
    agent = world.agent()
    agent.run_until("frozen")
    assert len(active(world)) == 1  # kept as soon as it was adopted
    directive = agent.report(guard=WRONG)
    assert (directive.kind, directive.state) == ("stop", "frozen")
    assert directive.incumbent == START
    assert agent.report(guard="Stopped at step 10: once more.").reason == WRONG
    assert "Guard: " + WRONG in agent.goodbye(over=True)["sentence"]
    assert world.kinds(directive.record).count("guard") == 1
    assert world.store.runs()[0].state is RunState.FINISHED
    assert active(world) == []


@pytest.mark.parametrize("heard", ["of a report", "of goodbye", "too late"])
def test_training_that_goes_wrong_before_its_search_begins(
    world: World, monkeypatch: pytest.MonkeyPatch, heard: str
) -> None:
    agent = world.agent()
    agent.run_until("confirming")
    record = agent.last.record
    agent.goodbye()
    assert world.store.runs()[0].state is RunState.LOST  # the next training goes on with it
    go_on = threading.Event()
    held_up(monkeypatch, lambda *_: go_on.wait(SOON_S))
    next_one = world.agent(run="2" * 32)
    assert next_one.report(guard=WRONG).state == "warming"
    if heard == "too late":
        monkeypatch.setattr(session, "_JOIN_S", 0.05)
    else:
        go_on.set()
    if heard == "of a report":
        next_one.until(lambda: next_one.last.kind == "stop")
        assert next_one.last.incumbent == START
        until(lambda: "guard" in world.kinds(record))
    next_one.goodbye(over=True)
    go_on.set()
    until(lambda: "guard" in world.kinds(record) and world.store.runs()[0].state is RunState.FINISHED)
    last = world.agent(run="3" * 32)
    last.until(lambda: last.last.record is not None)
    assert last.last.record != record


def test_a_search_that_fails_is_over(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise ArithmeticError("a bug")

    agent = world.agent()
    agent.measure()
    monkeypatch.setattr(Search, "tell", fail)
    agent.until(lambda: agent.last.kind == "stop")
    assert agent.last.reason == "The search failed: ArithmeticError: a bug."
    agent.report(guard=WRONG)
    agent.goodbye(over=True)
    assert "guard" in world.kinds(agent.last.record)


@pytest.mark.smoke
def test_a_pause_needs_a_search_to_be_written_down_in(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    from zftune.daemon.runs import session

    go_on = threading.Event()
    held_up(monkeypatch, lambda *_: go_on.wait(SOON_S))
    monkeypatch.setattr(session, "_PREPARING_S", 0.05)
    agent = world.agent()
    with pytest.raises(NotAllowedError, match="still being prepared; try again"):
        world.registry.command(RUN, "pause")
    assert agent.report().kind == "hold"
    monkeypatch.setattr(session, "_PREPARING_S", SOON_S)
    go_on.set()
    world.registry.command(RUN, "pause")
    (run,) = world.store.runs()
    assert [kind for kind in world.kinds(run.run_id) if kind != "remark"] == ["pause"]
    world.kill()  # what was acknowledged is on the disk
    world.begin()
    agent.transport = world.transport
    agent.say_hello(Reattach(run.run_id))
    agent.until(lambda: agent.last.incumbent is not None)
    for _ in range(5):
        assert agent.report().kind == "pause"
    world.registry.command(RUN, "resume")
    assert agent.last.incumbent == START
    assert agent.asked().role == "start"


@pytest.mark.smoke
def test_another_session_has_to_say_hello(world: World) -> None:
    agent = world.agent()
    agent.session = "f" * 32
    with pytest.raises(DaemonError, match="say Hello again"):
        agent.report()
