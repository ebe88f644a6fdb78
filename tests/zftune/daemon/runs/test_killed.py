"""A daemon that is killed anywhere, two trainings that want one run, and what comes twice or at once."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest

from tests.zftune.daemon.runs.agents import RUN, SOON_S, START_MS, Agent, faster, same
from tests.zftune.daemon.runs.loops import Direct, registry_of
from tests.zftune.daemon.runs.worlds import START, World
from zftune.daemon import PROTOCOL
from zftune.daemon.client.worker import RemoteWorker
from zftune.daemon.protocol.messages import Applied, Change, Done, Reattach, StepFigures
from zftune.daemon.runs.registry import _BETWEEN_S
from zftune.daemon.runs.states import Ended
from zftune.daemon.runs.views import run_details
from zftune.store import open_store
from zftune.store.account import Count, Pulse
from zftune.store.locks import RunLocks
from zftune.store.types import LEASE_S, RunState, TrialState
from zftune.tuner.recording import Recording
from zftune.tuner.search import MOST_VOIDS
from zftune.tuner.states import OF_INCUMBENT, Outcome


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
@pytest.mark.parametrize("write", ["mark_in_flight", "add_measurement", "add_decision", "add_trial"])
def test_a_daemon_that_is_killed_while_it_writes(world: World, write: str, *, after: bool) -> None:
    agent = world.agent()
    agent.measure()  # of the start: the first setting is thought of when it is heard of
    record = agent.last.record or ""
    reached = world.stop_at(write, after=after)
    agent.report()
    assert reached.wait(SOON_S)
    if write == "mark_in_flight" and after:
        assert TrialState.IN_FLIGHT in world.trial_states(record)
    go_on_after_a_kill(world, agent, record, trial=0)
    settings = [one.knobs for one in world.store.trials(record) if one.state is not TrialState.VOID]
    assert settings.count(START.knobs()) == 1  # it is not compared with itself


@pytest.mark.parametrize("knows", [False, True])
def test_a_setting_in_flight_that_was_measured_before(world: World, *, knows: bool) -> None:
    agent = world.agent()
    request = agent.measure()
    while request.role != "a1":
        request = agent.measure()
    record, reached = agent.last.record or "", world.stop_at("mark_in_flight", after=True)
    agent.report()
    assert reached.wait(SOON_S)
    go_on_after_a_kill(world, agent, record, trial=request.trial if knows else None)


def test_a_daemon_that_is_killed_before_the_agent_has_heard_what_its_run_is_called(world: World) -> None:
    agent = world.agent(fresh=True)
    ends = time.monotonic() + SOON_S
    while world.registry.brain(RUN).record is None:
        assert time.monotonic() < ends
        time.sleep(0.002)
    record = world.registry.brain(RUN).record
    world.kill()
    world.begin()
    agent.transport = world.transport
    assert agent.forgotten()
    agent.say_hello()
    agent.run_until("frozen")
    assert agent.last.record == record
    assert [one.run_id for one in world.store.runs()] == [record]
    other = world.agent(run="2" * 32, fresh=True)
    other.asked()
    assert other.last.record != record


def test_a_training_that_died_is_still_a_crash_after_its_run_was_gone_on_with(world: World) -> None:
    agent = world.agent()
    agent.measure()
    deadly, record = agent.asked(), agent.last.record or ""
    world.now_s = 60.0
    world.registry.look_after_leases()  # the training died
    later = world.agent(run="2" * 32)
    later.measure()
    assert later.last.record == record
    later.asked()
    world.kill()
    world.begin()
    later.transport = world.transport
    later.say_hello(Reattach(record, 0))
    later.run_until("frozen")
    assert world.trial_states(record)[deadly.trial] is TrialState.CRASHED
    assert deadly.setting not in {one.setting for one in later.requests}


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


def test_a_training_that_begins_again_the_moment_it_was_killed_goes_on_with_its_run(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    agent = world.agent()
    agent.run_until("frozen")
    world.registry.command(RUN, "rollback")
    record = agent.last.record or ""
    monkeypatch.setattr(world.registry._closing, "wait", lambda for_s: setattr(world, "now_s", world.now_s + for_s))
    world.now_s += 0.5
    pulse = Pulse(RunLocks(world.path), record, RUN)
    pulse.beat(Count(steps=20, seconds=2.0), None)
    pulse.close(remove=False)
    later = world.agent(run="2" * 32)
    later.until(lambda: later.last.incumbent is not None)
    assert (later.last.record, later.last.state) == (record, "frozen")  # it was rolled back for good
    assert [one.run_id for one in world.store.runs()] == [record]
    later.report(count=Count(steps=5, seconds=1.0))
    assert world.registry.brain("2" * 32).account.total.seconds == pytest.approx(3.0)


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


@pytest.fixture
def leased() -> Iterator[Any]:
    with open_store("sqlite://", environment={"HOME": "/nowhere"}) as store:
        yield store


def test_where_only_a_lease_tells_the_next_daemon_waits_for_its_end(leased: Any) -> None:
    with registry_of(leased) as first, registry_of(leased) as second:
        agent = Agent(Direct(first), same)
        agent.measure()
        request, record = agent.asked(), agent.last.record or ""
        first.brain(RUN).renew(0.5)  # killed; its last words
        agent.transport = Direct(second)
        agent.say_hello(Reattach(record, request.trial))
        assert agent.report().state == "warming"
        agent.until(lambda: agent.last.record is not None)
        assert agent.last.record == record
        agent.measure()
        assert agent.asked().setting == request.setting
        assert len(leased.runs()) == 1
        assert leased.runs()[0].state is RunState.RUNNING


def test_leases_are_renewed_one_after_the_other(leased: Any) -> None:
    now_s = 0.0
    with registry_of(leased, clock=lambda: now_s) as registry:
        agents = [Agent(Direct(registry), same, run=one * 32) for one in "123"]
        for one in agents:
            one.until(lambda one=one: one.last.record is not None)  # type: ignore[misc]
        records = [one.last.record or "" for one in agents]
        for brain in registry.brains():
            brain.renew(0.5)
        now_s = LEASE_S / 4 - 0.1
        registry.look_after_leases()
        assert max(map(leased.lease_left_s, records)) <= 0.5  # not yet
        now_s = LEASE_S / 4
        assert registry.look_after_leases() == []
        assert min(leased.lease_left_s(record) for record in records) > LEASE_S - SOON_S
        # Not all at once, which would keep agents waiting.
        until_s = sorted(run.lease_until_unix_s for run in leased.runs())
        assert min(later - earlier for earlier, later in pairwise(until_s)) > 0.9 * _BETWEEN_S


# --- what comes twice, at once, or not at all -------------------------------------------------------------------------


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


def test_an_incumbent_that_cannot_be_measured_is_measured_later(world: World) -> None:
    agent = world.agent(same)
    for _ in range(MOST_VOIDS):
        agent.asked()
        agent.done = Done(agent.last.decision, Outcome("void", reason="knobs were changed by hand"))
        agent.until(lambda: agent.done is None)
    assert agent.asked().role == "hold"
    assert f"{MOST_VOIDS} measurements of" in agent.last.reason
    assert agent.measure().role == "hold"
    assert agent.measure().role == "start"
    assert agent.asked().role != "start"  # it goes on from there


def test_a_measurement_that_is_heard_of_as_a_whole_may_have_been_disturbed(world: World) -> None:
    agent = world.agent(same)
    request = agent.asked()
    heard = iter(["the GPU was slowed down because it was hot"])
    world.disturbed = lambda: next(heard, None)
    steps = tuple([START_MS] * count for count in (request.steps, request.discard))
    outcome = Outcome("measured", tuple(steps[0]), tuple(steps[1]))
    decision = agent.last.decision
    agent.done = Done(decision, outcome)
    agent.report(applied=Applied(decision, 1))
    agent.until(lambda: agent.done is None)
    trial = world.store.trials(agent.last.record or "")[0]
    (measured,) = world.store.measurements(trial.trial_id)
    assert measured.void_reason == "the GPU was slowed down because it was hot"
    assert agent.asked().role == "start"


def test_a_report_that_comes_twice_counts_its_statistics_once(world: World) -> None:
    agent = world.agent(same)
    steps = (StepFigures(1, 100.0), StepFigures(2, 100.0))
    sent = []

    class Twice(Direct):
        def post(self, route: str, document: Any = None, *, timeout_s: float | None = None) -> Any:
            sent.append(route)
            super().post(route, document, timeout_s=timeout_s)  # its answer got lost
            return super().post(route, document, timeout_s=timeout_s)

    agent.transport = Twice(world.registry)
    agent.report(steps=steps, losses=((1, 0.5),))
    brain = world.registry.brain(RUN)
    assert list(brain.steps) == list(steps)
    assert list(brain.losses) == [(1, 0.5)]
    agent.say_hello()  # the same session: it goes on counting
    agent.report(steps=(replace(steps[0], step=3),))
    assert [one.step for one in brain.steps] == [1, 2, 3]
    assert agent.measure().role in OF_INCUMBENT
    assert sent


def test_how_a_training_goes_outlives_the_daemon(world: World) -> None:
    agent = world.agent(same)
    knobs = replace(START, topk_ratio=0.01, update_interval=8)
    steps = [StepFigures(step, 100.0, coverage=0.13) for step in range(1, 33)]
    losses = [(step, 4.0 - step / 16) for step in range(1, 33)]
    agent.report(steps=tuple(steps[:16]), losses=tuple(losses[:16]), changes=(Change(16, knobs),))
    agent.measure()
    agent.asked()
    before = run_details(world.registry.brain(RUN), 0.0, world.store)
    assert [(one.step, one.loss) for one in before.curve] == losses[:16]
    record = agent.last.record or ""
    world.kill()
    world.begin()
    agent.transport = world.transport
    agent.say_hello(Reattach(record, None))
    agent.until(lambda: agent.last.record == record)
    agent.report(step=18, steps=tuple(steps[16:18]), losses=tuple(losses[16:18]), changes=(Change(16, knobs),))
    agent.report(step=32, steps=tuple(steps[18:]), losses=tuple(losses[18:]))
    details = run_details(world.registry.brain(RUN), 0.0, world.store)
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


@pytest.mark.parametrize("lost", [False, True], ids=["heard", "unheard"])
def test_settings_stand_at_the_steps_where_they_changed_though_the_daemon_was_killed(
    world: World, *, lost: bool
) -> None:
    agent, worker = world.agent(same), RemoteWorker(tokens=8)
    knobs = [replace(START, topk_ratio=ratio) for ratio in (0.1, 0.4, 0.1, 0.2)]

    def told() -> tuple[Change, ...]:
        return worker.report(PROTOCOL, agent.session).changes

    worker.applied(10, knobs[0])
    agent.report(changes=told())
    worker.heard()
    agent.measure()
    agent.asked()
    record = agent.last.record or ""
    worker.applied(20, knobs[1])
    if lost:
        told()
    world.kill()  # one change is written down, one is not, two come while there is no daemon
    worker.applied(30, knobs[2])
    worker.applied(40, knobs[3])
    world.begin()
    agent.transport = world.transport
    agent.say_hello(Reattach(record, None))
    worker.begin_session("the daemon was started again")
    agent.report(step=52, steps=(StepFigures(50, 100.0),), changes=told())
    agent.until(lambda: agent.last.record == record)
    found = run_details(world.registry.brain(RUN), 0.0, world.store).changes
    wanted = [(10 * place, one.knobs()) for place, one in enumerate(knobs, 1)]
    assert [(one.step, one.knobs) for one in found] == wanted
    agent.goodbye()
    assert [(one.step, one.knobs) for one in world.store.curve(record).changes] == wanted


def test_how_a_training_goes_that_was_killed_and_went_on_from_its_checkpoint(world: World) -> None:
    agent = world.agent(same)
    agent.report(steps=tuple(StepFigures(step, 100.0) for step in range(1, 17)))
    agent.report(losses=tuple((step, 4.0) for step in range(1, 17)))
    agent.measure()
    agent.asked()
    record = agent.last.record
    world.now_s = 60.0
    assert world.registry.look_after_leases() == [RUN]
    later = world.agent(same, run="2" * 32)
    steps = tuple(StepFigures(step, 50.0) for step in range(11, 17))
    later.report(steps=steps, losses=tuple((step, 1.0) for step in range(11, 17)))
    later.until(lambda: later.last.record is not None)
    assert later.last.record == record
    details = run_details(world.registry.brain("2" * 32), 0.0, world.store)
    assert [(one.step, one.steps, one.step_ms, one.loss) for one in details.curve] == [
        *((step, 1, 100.0, 4.0) for step in range(1, 11)),
        *((step, 1, 50.0, 1.0) for step in range(11, 17)),
    ]


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
