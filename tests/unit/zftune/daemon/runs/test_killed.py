"""A daemon that is killed anywhere, two trainings that want one run, and what comes twice or at once."""

from __future__ import annotations

import threading
from dataclasses import replace
from typing import Any

import pytest

from tests.support.zftune.daemon.runs.agents import RUN, SOON_S, Agent, faster, same
from tests.support.zftune.daemon.runs.loops import Direct, registry_of
from tests.support.zftune.daemon.runs.worlds import START, World
from zftune.daemon.protocol.messages import Change, Done, Reattach, StepFigures
from zftune.daemon.runs.states import Ended
from zftune.daemon.runs.views import run_details
from zftune.store import open_store
from zftune.store.account import Count, Pulse
from zftune.store.locks import RunLocks
from zftune.store.types import TrialState
from zftune.tuner.record import Recording
from zftune.tuner.search import MOST_VOIDS
from zftune.tuner.states import Outcome


def go_on_after_a_kill(world: World, agent: Agent, record: str, *, trial: int | None) -> None:
    """Kill the daemon; the agent says what it really knew."""
    world.kill()
    world.begin()
    agent.transport = world.transport
    assert agent.forgotten()
    agent.say_hello(Reattach(record, trial))
    agent.run_until("frozen")
    assert agent.last.record == record
    assert "crash" not in world.kinds(record)
    assert TrialState.CRASHED not in world.trial_states(record)


@pytest.mark.parametrize("after", [False, True])
def test_a_daemon_that_is_killed_while_it_writes(world: World, *, after: bool) -> None:
    agent = world.agent()
    agent.measure()  # of the start: the first setting is thought of when it is heard of
    record = agent.last.record or ""
    reached = world.stop_at("record", after=after)
    agent.report()
    assert reached.wait(SOON_S)
    go_on_after_a_kill(world, agent, record, trial=0)
    settings = [one.knobs for one in world.store.trials(record) if one.state is not TrialState.VOID]
    assert settings.count(START.knobs()) == 1  # it is not compared with itself


def test_a_training_that_was_killed_and_begins_again_goes_on_with_its_search_at_once(world: World) -> None:
    agent = world.agent()
    agent.measure()
    agent.asked()
    record = agent.last.record or ""
    pulse = Pulse(RunLocks(world.path), record, RUN)
    pulse.beat(Count(steps=20, seconds=2.0), None)
    world.now_s = 4.0  # far less than a lease
    assert world.registry.look_after_leases() == []
    assert world.registry.live_runs == 1
    pulse.close(remove=False)  # as a process does that is killed
    assert world.registry.live_runs == 0  # before anybody has looked after it
    later = world.agent(run="2" * 32)
    later.measure()
    assert world.registry.live_runs == 1
    assert later.last.record == record
    assert world.registry.brains()[0].state == Ended("the training was killed, or has crashed")
    assert world.registry.brain(record).hello.run == later.run


def test_two_trainings_that_find_one_run(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    agent = world.agent()
    agent.run_until("confirming")
    record = agent.last.record
    agent.goodbye()
    found, both = Recording.unfinished, threading.Barrier(2, timeout=SOON_S)

    def together(*given: Any) -> Any:
        run = found(*given)
        both.wait()
        return run

    monkeypatch.setattr(Recording, "unfinished", together)
    with registry_of(world.store) as second:  # in one daemon they take turns
        agents = [world.agent(run="2" * 32), Agent(Direct(second), faster, run="3" * 32)]
        for one in agents:
            one.until(lambda one=one: one.last.record is not None)  # type: ignore[misc]
        records = [one.last.record for one in agents]
        assert record in records
        assert len(set(records)) == 2
        with open_store(str(world.path)) as other:
            assert other.reap() == []  # both are held
        for one in agents:
            one.run_until("frozen")
            refused = [notice for notice in one.last.notices if "is still running" in notice]
            assert len(refused) == (one.last.record != record)
            assert "crash" not in world.kinds(one.last.record)


def test_pauses_do_not_speak_against_what_they_interrupt(world: World) -> None:
    agent = world.agent(same)
    for turn in range(2 * MOST_VOIDS):
        assert agent.asked().role == "start"
        world.registry.command(RUN, "pause")
        assert agent.report().kind == "pause"
        if turn % 2:
            world.registry.command(RUN, "resume")  # before the agent could let go of it
        agent.done = Done(agent.last.decision, Outcome("void", reason="paused"))
        agent.until(lambda: agent.done is None)
        if not turn % 2:
            world.registry.command(RUN, "resume")
    request = agent.measure()
    assert request.role == "start"
    agent.asked()
    record = agent.last.record or ""
    voids = [one for one in world.store.measurements(world.store.trials(record)[0].trial_id) if one.void_reason]
    assert len(voids) == 2 * MOST_VOIDS
    go_on_after_a_kill(world, agent, record, trial=1)  # the rows tell the same


def test_how_a_training_goes_outlives_the_daemon(world: World) -> None:
    agent = world.agent(same)
    knobs = replace(START, topk_ratio=0.01, update_interval=8)
    steps = [StepFigures(step, 100.0, coverage=0.13) for step in range(1, 33)]
    losses = [(step, 4.0 - step / 16) for step in range(1, 33)]
    agent.report(steps=tuple(steps[:16]), losses=tuple(losses[:16]), changes=(Change(16, knobs),))
    agent.measure()
    agent.asked()
    before = run_details(world.registry.brain(RUN), 0.0)
    assert [(one.step, one.loss) for one in before.curve] == losses[:16]
    record = agent.last.record or ""
    world.kill()
    world.begin()
    agent.transport = world.transport
    agent.say_hello(Reattach(record, None))
    agent.until(lambda: agent.last.record == record)
    agent.report(step=18, steps=tuple(steps[16:18]), losses=tuple(losses[16:18]), changes=(Change(16, knobs),))
    agent.report(step=32, steps=tuple(steps[18:]), losses=tuple(losses[18:]))
    details = run_details(world.registry.brain(RUN), 0.0)
    assert [(one.step, one.loss) for one in details.curve] == losses
    assert details.changes[0].step == 16
    assert details.changes[0].knobs == knobs.knobs()
    view = details.run.losses
    assert view is not None
    assert view.trend == "falling"
    assert view.first == pytest.approx(3.72, abs=0.01)
    assert view.last == pytest.approx(2.22, abs=0.01)
    assert details.run.coverage is not None
    assert "13% of the gradient energy, where 89%" in (details.run.coverage.warning or "")
    agent.goodbye()
    kept = world.store.curve(record)
    assert [(one.step, one.loss) for one in kept.points] == losses
    assert kept.points[0].coverage == 0.13


def test_commands_outlive_the_daemon(world: World) -> None:
    agent = world.agent()
    agent.run_until("frozen")
    record = agent.last.record or ""
    world.registry.command(RUN, "pause")
    world.kill()
    world.begin()
    agent.transport = world.transport
    agent.say_hello(Reattach(record))
    agent.until(lambda: agent.last.incumbent is not None)
    assert agent.last.state == "paused"
    world.registry.command(RUN, "rollback")
    pinned = agent.report().incumbent
    world.kill()
    world.begin()
    agent.transport = world.transport
    agent.say_hello(Reattach(record))
    agent.until(lambda: agent.last.incumbent is not None and agent.last.kind != "pause")
    thought = world.registry.brain(RUN).thought
    assert thought is not None
    agent.until(lambda: thought.halted)
    assert (agent.last.kind, agent.last.state, agent.last.incumbent) == ("hold", "frozen", pinned)
    assert world.kinds(record).count("rollback") == 1
