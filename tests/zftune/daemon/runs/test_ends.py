"""How a run ends: training goes wrong, goodbye is said, or nobody is heard of any more."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any, Literal

import pytest

from tests.zftune.daemon.runs.agents import RUN, SOON_S
from tests.zftune.daemon.runs.worlds import START, World
from zftune.daemon.protocol.messages import Reattach
from zftune.daemon.runs import registry, session
from zftune.daemon.runs.states import NotAllowedError
from zftune.daemon.runs.views import run_view
from zftune.errors import DaemonError
from zftune.store import open_store
from zftune.store.account import Count, Pulse
from zftune.store.locks import RunLocks
from zftune.store.types import PresetState, RunState, TrialState
from zftune.tuner import setup, worker
from zftune.tuner.search import Search
from zftune.tuner.worker import Background

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


# --- training goes wrong ----------------------------------------------------------------------------------------------


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


def test_what_went_wrong_after_a_rollback_is_written_down(world: World) -> None:
    agent = world.agent()
    agent.run_until("frozen")
    world.registry.command(RUN, "rollback")
    assert agent.report().kind == "hold"
    directive = agent.report(guard=WRONG)
    assert (directive.kind, directive.incumbent) == ("stop", START)
    agent.goodbye(over=True)
    assert [kind for kind in world.kinds(directive.record) if kind in ("rollback", "guard")] == ["rollback", "guard"]
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


def test_training_that_went_wrong_is_not_tuned_by_the_next_daemon_either(world: World) -> None:
    agent = world.agent()
    agent.run_until("frozen")
    agent.report(guard=WRONG)
    record = agent.last.record or ""
    until(lambda: "guard" in world.kinds(record))
    world.kill()
    world.begin()
    agent.transport = world.transport
    agent.say_hello(Reattach(record))
    agent.until(lambda: agent.last.kind == "stop")
    assert agent.last.incumbent == START
    agent.report(guard=WRONG)
    agent.goodbye(over=True)
    assert world.kinds(record).count("guard") == 1


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


def held_at_a_measurement(world: World, monkeypatch: pytest.MonkeyPatch) -> tuple[threading.Event, threading.Event]:
    """From now on a measurement is written down once the second is set; the first tells that one waits."""
    add, reached, go_on = world.store.add_measurement, threading.Event(), threading.Event()

    def slow(*given: Any, **more: Any) -> None:
        reached.set()
        go_on.wait(SOON_S)
        add(*given, **more)

    monkeypatch.setattr(world.store, "add_measurement", slow)
    monkeypatch.setattr(worker, "_JOIN_S", 0.05)
    return reached, go_on


# --- goodbye ----------------------------------------------------------------------------------------------------------


def test_goodbye_does_not_wait_for_the_planner(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    asked, gave_up = threading.Event(), threading.Event()

    def plan(facts: Any, store: Any, sampler_process: Any, *_: Any) -> None:
        asked.set()
        until(lambda: sampler_process._closed)
        gave_up.set()

    held_up(monkeypatch, plan)
    agent = world.agent()
    assert asked.wait(SOON_S)
    monkeypatch.setattr(session, "_JOIN_S", 2 * SOON_S)  # longer than the planner goes on by itself
    assert "tuned nothing" in agent.goodbye()["sentence"]
    assert gave_up.is_set()
    assert world.store.runs()[0].state is RunState.LOST


def test_nothing_is_tried_any_more_once_goodbye_was_said(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    agent = world.agent()
    agent.measure()
    reached, go_on = held_at_a_measurement(world, monkeypatch)
    monkeypatch.setattr(session, "_ANSWER_S", 0.05)
    agent.report()
    assert reached.wait(SOON_S)
    with pytest.raises(DaemonError, match="still being written down; try again") as refused:
        agent.goodbye()
    assert refused.value.status == 409
    marked = world.stop_at("mark_in_flight")
    go_on.set()
    monkeypatch.setattr(session, "_ANSWER_S", SOON_S)
    agent.goodbye()
    assert not marked.is_set()
    assert world.store.runs()[0].state is RunState.LOST
    assert not {TrialState.IN_FLIGHT, TrialState.CRASHED} & set(world.trial_states(agent.last.record))


def test_a_run_that_said_goodbye_is_shown_as_ended_at_once_and_written_down_whoever_waits(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    agent = world.agent()
    agent.run_until("frozen")
    finish, go_on, went_on = world.store.finish_run, threading.Event(), []

    def slow(*given: Any) -> None:
        went_on.append(go_on.wait(SOON_S))
        finish(*given)

    monkeypatch.setattr(world.store, "finish_run", slow)
    monkeypatch.setattr(session, "_ANSWER_S", 0.05)
    with pytest.raises(DaemonError, match="still being written down"):
        agent.goodbye()
    brain = world.registry.brain(RUN)
    view = run_view(brain, 0.0)
    assert (view.state, view.title) == ("ended", "ended")
    assert view.reason == "the training has ended; what was found is being written down"
    assert world.registry.live_runs == 1  # a private daemon stays for it
    world.now_s = 60.0
    assert world.registry.look_after_leases() == []  # it is no crash, though its agent is silent
    go_on.set()
    until(lambda: brain.over)
    assert brain.reason == "the training has ended"
    assert world.store.runs()[0].state is RunState.FINISHED
    assert went_on == [True]  # nobody who looks after leases has waited for it
    assert "zftune keeps" in agent.goodbye()["sentence"]  # said again, it is heard all the same


def test_a_run_that_a_training_without_a_daemon_has_gone_on_with_has_not_ended(world: World) -> None:
    agent = world.agent()
    agent.run_until("searching")
    agent.goodbye()
    brain = world.registry.brain(RUN)
    until(lambda: brain.over)
    assert brain.record is not None

    taken: list[float] = []

    def shown() -> tuple[str, str]:
        view = run_view(brain, 0.0, store=world.store)
        taken.append(view.account.elapsed_s)
        return view.title, view.reason

    ended = ("ended", "the training has ended")
    assert shown() == ended
    goes_on = ("still running", "another training has gone on with it; zftune explain tells of it")
    with open_store(str(world.path)) as store:
        run = store.resume_run(brain.record)
        for process, expected in ((RUN, ended), (run.token, goes_on)):  # its own process has yet to end, or another
            pulse = Pulse(RunLocks(world.path), brain.record, process)
            assert pulse.beat(Count(steps=7, seconds=70.0), None)
            assert shown() == expected
            pulse.close(remove=True)
        store.interrupt_run(run)
    assert shown() == ended
    assert taken[2] == pytest.approx(taken[0] + 70.0)  # the other one's time is in it while it goes on


@pytest.mark.parametrize("command", ["stop", "rollback"])
def test_a_command_that_finds_the_search_at_work_is_carried_out_once_it_rests(
    world: World, monkeypatch: pytest.MonkeyPatch, command: Literal["stop", "rollback"]
) -> None:
    agent = world.agent()
    agent.run_until("frozen")
    agent.asked()
    adopted = agent.last.incumbent
    agent.measure()
    reached, go_on = held_at_a_measurement(world, monkeypatch)
    agent.report()
    assert reached.wait(SOON_S)
    done = "it is stopped" if command == "stop" else "it is rolled back"
    for _ in range(2):  # asked for again, it is still one command
        with pytest.raises(NotAllowedError, match=f"still being written down; {done} as soon as that is over"):
            world.registry.command(RUN, command)
    go_on.set()
    once = {"stop": 2, "rollback": 1}[command]  # one stop was the search's own
    agent.until(lambda: world.kinds(agent.last.record).count(command) >= once)
    agent.until(lambda: not agent.last.thinks)
    assert world.kinds(agent.last.record).count(command) == once
    assert agent.last.kind == ("stop" if command == "stop" else "hold")
    assert (agent.last.incumbent == adopted) == (command == "stop")


def test_who_is_told_goodbye_after_it_was_taken_for_dead_says_so(world: World) -> None:
    agent = world.agent()
    agent.run_until("frozen")
    world.now_s = 60.0
    assert world.registry.look_after_leases() == [RUN]
    with pytest.raises(DaemonError, match="say Hello again") as refused:
        agent.goodbye()
    assert refused.value.status == 404


def test_a_search_that_nobody_waits_for_any_more_is_not_begun(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    go_on = threading.Event()
    monkeypatch.setattr(world.registry, "_outwait", lambda _: go_on.wait(SOON_S))
    monkeypatch.setattr(session, "_JOIN_S", 0.05)
    agent = world.agent(again=Reattach("f" * 32))  # its daemon ended, and its training does
    assert "tuned nothing" in agent.goodbye()["sentence"]
    go_on.set()
    preparing = world.registry.brain(RUN)._preparing
    preparing.join(SOON_S)
    assert preparing.done
    assert world.store.runs() == []


# --- nobody is heard of -----------------------------------------------------------------------------------------------


def test_a_run_is_shown_as_ended_once_the_store_can_give_it_to_others(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    agent = world.agent()
    agent.measure()
    request, record = agent.asked(), agent.last.record or ""
    lose, reached, go_on = world.store.lose_run, threading.Event(), threading.Event()

    def slow(*given: Any) -> None:
        reached.set()
        go_on.wait(SOON_S)
        lose(*given)

    monkeypatch.setattr(world.store, "lose_run", slow)
    world.now_s = 60.0
    leases = Background(world.registry.look_after_leases, "zftune-leases")
    assert reached.wait(SOON_S)
    assert not agent.forgotten()  # it was only slow: not told to come back before it can
    assert agent.last.kind == "hold"
    go_on.set()
    leases.join(SOON_S)
    assert leases.result == [RUN]
    assert agent.forgotten()
    agent.say_hello(Reattach(record, request.trial))
    agent.until(lambda: agent.last.record is not None)
    assert agent.last.record == record
    agent.run_until("frozen")
    assert TrialState.CRASHED not in world.trial_states(record)


def test_a_run_that_is_heard_of_at_the_last_moment_goes_on(world: World) -> None:
    agent = world.agent()
    agent.measure()
    world.now_s = 60.0
    agent.report()
    assert not world.registry.brain(RUN).lose(30.0)
    agent.run_until("frozen")


def test_who_makes_a_search_neither_ends_its_own_run_nor_fails_by_that_of_another(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any, **__: Any) -> bool:
        raise ArithmeticError("a bug")

    other = world.agent(run="2" * 32)
    other.run_until("baseline")
    monkeypatch.setattr(world.registry.brain("2" * 32), "lose", fail)
    monkeypatch.setattr(world.registry, "_outwait", lambda _: setattr(world, "now_s", 60.0))  # longer than a lease
    agent = world.agent(again=Reattach("f" * 32))
    agent.until(lambda: agent.last.incumbent is not None)
    assert not world.registry.brain(RUN).failed


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
    assert world.kinds(run.run_id) == ["pause"]
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


def test_another_session_has_to_say_hello(world: World) -> None:
    agent = world.agent()
    agent.session = "f" * 32
    with pytest.raises(DaemonError, match="say Hello again"):
        agent.report()
