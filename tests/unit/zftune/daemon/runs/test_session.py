"""A run and its brain: the search over the wire, commands, and whatever may get lost on the way."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from tests.support.zftune.daemon.runs.agents import RUN, Agent, facts, faster, same
from tests.support.zftune.daemon.runs.loops import Direct
from tests.support.zftune.daemon.runs.worlds import START, World
from zftune.daemon.protocol.codec import WireError
from zftune.daemon.protocol.messages import Change, Done, Reattach, StepFigures
from zftune.daemon.runs.registry import Registry, UnknownRunError
from zftune.daemon.runs.states import NotAllowedError
from zftune.daemon.runs.views import RunDetails, run_details
from zftune.errors import StoreError
from zftune.explain.screen import render
from zftune.explain.summary import RunSummary
from zftune.store import open_store
from zftune.store.types import PresetState, RunState, TrialState
from zftune.tuner.record import Recording
from zftune.tuner.states import OF_INCUMBENT, BarredSetting, Outcome, Remark


def test_a_search_goes_through_its_states_and_its_knobs_are_kept(world: World) -> None:
    agent = world.agent()
    agent.run_until("frozen")
    assert agent.states[0] in ("warming", "baseline")
    assert list(dict.fromkeys(agent.states))[-4:] == ["baseline", "searching", "confirming", "frozen"]
    assert {"start", "explore", "a1", "b", "a2"} <= {request.role for request in agent.requests}
    assert agent.last.incumbent is not None
    assert agent.last.incumbent != START
    assert agent.last.start == START
    (preset,) = world.store.presets()  # before any goodbye
    assert preset.knobs == agent.last.incumbent.knobs()
    assert agent.asked().role == "hold"  # it goes on looking
    farewell = agent.goodbye(remarks=(Remark("The probe saw nothing.", 0.5, time.time()),))
    assert "zftune keeps" in farewell["sentence"]
    assert "of the step time" in farewell["sentence"]
    assert not farewell["warning"]
    (run,) = world.store.runs()
    assert run.state is RunState.FINISHED
    assert not RunSummary.read(world.store, run).document()["run"]["trained_on"]  # it ended with the training
    assert run.run_id == agent.last.record
    assert world.kinds(run.run_id)[-1] == "remark"
    assert agent.forgotten()
    assert agent.goodbye()["sentence"] == farewell["sentence"]  # said twice


def test_a_report_whose_answer_was_lost_is_heard_once(world: World) -> None:
    agent = world.agent(same)
    brain = world.registry.brain(RUN)
    steps = (StepFigures(1, 100.0), StepFigures(2, 100.0))
    changes = (Change(1, START),)
    agent.report(steps=steps, losses=((1, 0.5),), changes=changes)
    sequence = agent._sequence
    agent.report(sequence=sequence, steps=steps, losses=((1, 0.5),), changes=changes)
    assert ([one.step for one in brain.steps], list(brain.losses), brain.knobs) == ([1, 2], [(1, 0.5)], START)
    assert [one.step for one in brain.curve.curve().changes] == [1]
    late = (Change(3, replace(START, topk_ratio=0.5)),)
    agent.report(sequence=sequence - 1, steps=(StepFigures(3, 100.0),), changes=late)
    assert ([one.step for one in brain.steps], brain.knobs) == ([1, 2], START)  # that one came too late


def shown(world: World) -> RunDetails:
    return run_details(world.registry.brain(RUN), 0.0)


def test_a_pause_puts_the_incumbent_back_and_holds_until_resume(world: World) -> None:
    agent = world.agent()
    agent.measure()
    request = agent.asked()
    assert request.role == "explore"
    record = agent.last.record
    assert TrialState.IN_FLIGHT in world.trial_states(record)
    world.registry.command(RUN, "pause")
    assert agent.report().kind == "pause"
    assert agent.last.incumbent == START
    agent.done = Done(agent.last.decision, Outcome("void", reason="paused"))
    agent.until(lambda: agent.done is None)
    assert agent.last.kind == "pause"
    assert agent.last.state == "paused"
    assert TrialState.IN_FLIGHT not in world.trial_states(record)  # a kill now is no crash
    world.registry.command(RUN, "pause")  # twice is once
    assert world.kinds(record).count("pause") == 1
    world.registry.command(RUN, "resume")
    again = agent.asked()
    assert again.role == "a1"  # the incumbent's block of before is too old
    agent.measure()
    again = agent.asked()
    assert (again.role, again.trial) == (request.role, request.trial)
    assert world.kinds(record)[-1] == "unpause"
    with pytest.raises(NotAllowedError, match="cannot resume: the run is searching, not paused"):
        world.registry.command(RUN, "resume")


def test_a_rollback_pins_what_was_before_and_bars_what_was_adopted(world: World) -> None:
    agent = world.agent()
    with pytest.raises(NotAllowedError, match="cannot roll back: "):
        world.registry.command(RUN, "rollback")
    agent.run_until("frozen")
    adopted, gain = agent.last.incumbent, agent.last.gain
    assert adopted is not None
    assert gain is not None
    assert gain.holds
    agent.asked()
    asked_for = agent.last.decision
    world.registry.command(RUN, "rollback")
    directive = agent.report()
    assert directive.decision > asked_for  # the agent lets go of what it was asked for
    assert (directive.kind, directive.state) == ("hold", "frozen")
    assert directive.incumbent != adopted
    assert directive.gain is None
    assert agent.report().kind == "hold"  # for good
    thought = world.registry.brain(RUN).thought
    assert thought is not None
    assert thought.search.judge(adopted)[1] == "somebody has rolled it back"
    record = directive.record
    (decision,) = [one for one in world.store.decisions(record or "") if one.kind == "rollback"]
    assert decision.details["by"] == "by hand"
    assert decision.details["barred"] == str(adopted)
    kept = [preset for preset in world.store.presets() if preset.knobs == adopted.knobs()]
    assert {preset.state for preset in kept} == {PresetState.WITHDRAWN}
    assert {preset.withdrawn_because for preset in kept} == {"it was rolled back by hand"}
    assert {preset.lost_comparisons for preset in kept} == {0}
    found = facts()
    assert found.key is not None
    assert found.trained is not None
    assert found.here is not None
    barred = Recording(world.store, found.key, found.trained, found.here).barred()
    assert BarredSetting(adopted, "rollback") in barred  # nor by later runs
    agent.goodbye()
    later = world.agent(run="2" * 32)
    later.run_until("frozen")
    assert adopted not in {request.setting for request in later.requests}


@pytest.mark.parametrize("fails", ["record", "withdraw_preset"])
def test_a_rollback_that_could_not_be_written_down_is_asked_for_again(
    world: World, monkeypatch: pytest.MonkeyPatch, fails: str
) -> None:
    agent = world.agent()
    agent.run_until("frozen")
    with monkeypatch.context() as full:
        full.setattr(world.store, fails, _full)
        with pytest.raises(StoreError, match="disk full"):
            world.registry.command(RUN, "rollback")
    assert agent.report().incumbent == START  # it holds all the same
    assert [preset.state for preset in world.store.presets()] == [PresetState.ACTIVE]
    world.registry.command(RUN, "rollback")
    assert world.kinds(agent.last.record).count("rollback") == 1
    assert [preset.state for preset in world.store.presets()] == [PresetState.WITHDRAWN]
    with pytest.raises(NotAllowedError, match="cannot roll back: it was rolled back already, and nothing"):
        world.registry.command(RUN, "rollback")


def _full(*_: object, **__: object) -> None:
    raise StoreError("disk full")


def test_a_stop_ends_the_tuning_with_the_incumbent(world: World) -> None:
    agent = world.agent()
    agent.measure()
    agent.asked()
    world.registry.command(RUN, "stop")
    assert agent.report().kind == "stop"
    assert agent.last.incumbent == START
    assert "Stopped by hand." in agent.goodbye(over=True)["sentence"]
    (run,) = world.store.runs()
    found = RunSummary.read(world.store, run).document()
    assert (found["run"]["state"], found["run"]["trained_on"]) == ("finished", True)
    screen = Console(width=200)
    with screen.capture() as shown_then:
        screen.print(render(found))
    assert ", no longer tuned, the training went on\n" in shown_then.get()
    assert "Tuning ended 100 steps after the training's last start; the training went on" in shown_then.get()
    assert TrialState.CRASHED not in world.trial_states(agent.last.record)
    with pytest.raises(
        NotAllowedError, match="cannot stop: tuning was stopped 100 steps after the training's last start;"
    ):
        world.registry.command(RUN, "stop")
    with pytest.raises(UnknownRunError, match="this daemon follows no run 'x'"):
        world.registry.command("x", "stop")


def test_a_measurement_that_was_disturbed_is_void(world: World) -> None:
    agent = world.agent()
    agent.measure()
    hot = "the GPU was slowed down because it was hot"
    world.disturbed = lambda: hot
    assert agent.asked().role == "start"
    trial = world.store.trials(agent.last.record or "")[0]
    assert world.store.measurements(trial.trial_id)[0].void_reason == hot


def test_a_run_that_is_silent_is_lost_and_its_trial_crashed(world: World) -> None:
    agent = world.agent()
    agent.measure()
    request = agent.asked()
    record = agent.last.record
    world.now_s = 29.0
    assert world.registry.look_after_leases() == []
    agent.report()
    world.now_s = 58.0
    assert world.registry.look_after_leases() == []
    world.now_s = 60.0
    assert world.registry.look_after_leases() == [RUN]
    assert world.state == "ended"
    assert world.store.runs()[0].state is RunState.LOST
    assert world.trial_states(record)[request.trial] is TrialState.CRASHED
    assert agent.forgotten()
    later = world.agent(run="2" * 32)
    later.run_until("frozen")
    assert later.last.record == record
    assert [one.hello.run for one in world.registry.shown()] == ["2" * 32]  # one row for one run
    assert request.setting not in {one.setting for one in later.requests}


@pytest.mark.parametrize("reaped", [False, True])
def test_a_daemon_that_was_killed_loses_nothing(world: World, *, reaped: bool) -> None:
    agent = world.agent()
    agent.run_until("confirming")
    request = agent.asked()
    while request.role in OF_INCUMBENT:
        agent.measure()
        request = agent.asked()
    record = agent.last.record
    assert record is not None
    before = world.kinds(record), [one.knobs for one in world.store.trials(record)]
    world.kill()
    world.begin()
    if reaped:
        assert world.store.reap() == [record]
        assert world.kinds(record) == [*before[0], "remark"]  # of one death of a setting that was measured before
    agent.transport = world.transport
    assert agent.forgotten()
    agent.say_hello(Reattach(record, request.trial))
    agent.run_until("frozen")
    assert agent.last.record == record
    kinds = world.kinds(record)
    assert kinds[: len(before[0])] == before[0]
    assert "resume" in kinds
    assert "crash" not in kinds
    assert [one.knobs for one in world.store.trials(record)][: len(before[1])] == before[1]
    assert agent.last.incumbent != START


def test_a_daemon_that_ends_in_order_leaves_the_run_to_the_next(world: World) -> None:
    agent = world.agent()
    agent.measure()
    request = agent.asked()
    record = agent.last.record or ""
    world.registry.close()
    assert world.store.runs()[0].state is RunState.LOST
    assert TrialState.CRASHED not in world.trial_states(record)
    world.store.close()
    world.begin()
    agent.transport = world.transport
    agent.say_hello(Reattach(record, request.trial))
    agent.run_until("frozen")
    assert agent.last.record == record


def test_each_run_is_written_into_the_store_that_it_names(tmp_path: Path) -> None:
    registry = Registry(open_store, lease_s=30.0)
    agents = []
    for number, name in ((1, "a.db"), (2, "b.db")):
        agent = Agent(Direct(registry), faster, run=str(number) * 32, database=str(tmp_path / name))
        agent.until(lambda agent=agent: agent.last.record is not None)  # type: ignore[misc]
        agents.append(agent)
    for agent, name in zip(agents, ("a.db", "b.db"), strict=True):
        assert agent.last.database == str(tmp_path / name)
        with open_store(str(tmp_path / name)) as store:
            assert [one.run_id for one in store.runs()] == [agent.last.record]
        assert run_details(registry.brain(agent.last.record or ""), 0.0).run.record == agent.last.record
    assert {str(store.path) for store in registry.stores} == {str(tmp_path / "a.db"), str(tmp_path / "b.db")}
    registry.close()


@pytest.mark.parametrize("trial", [None, 0])
def test_a_record_of_another_training_is_left_alone(world: World, trial: int | None) -> None:
    agent = world.agent()
    agent.until(lambda: agent.last.record is not None)
    other = world.agent(run="2" * 32, again=Reattach(agent.last.record or "", trial))
    other.until(lambda: other.last.record is not None)
    assert other.last.record != agent.last.record
    with open_store(str(world.path)) as another:
        assert another.reap() == []  # both are still held
    agent.run_until("frozen")


def test_what_no_training_can_have_sent_is_refused(world: World) -> None:
    agent = world.agent()
    agent.measure()
    assert agent.done is not None
    outcome = agent.done.outcome
    wrong: list[tuple[str, Any, str]] = [
        ("steps_ms", (), "measured with"),
        ("tokens", 0, "tokens is 0; it must be"),
        ("status", "fine", "status is 'fine'; it must be 'measured', 'void' or 'crashed'"),
        ("steps_ms", (-1.0,) * len(outcome.steps_ms), "a step time that is not from 0 to"),
    ]
    for name, value, sentence in wrong:
        with pytest.raises(WireError, match=sentence):
            agent.report(done=Done(agent.done.decision, replace(outcome, **{name: value})))
    assert agent.asked().role == "explore"


def test_where_the_store_takes_nothing_the_baseline_stays(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    agent = world.agent()
    agent.measure()
    agent.asked()

    def full(*_: Any, **__: Any) -> Any:
        from zftune.errors import StoreError

        raise StoreError("the disk is full")

    monkeypatch.setattr(type(world.store), "record", full)
    agent.run_until("frozen")
    assert agent.last.incumbent == START
    assert "the disk is full." in agent.last.notices
    with pytest.raises(Exception, match="the disk is full"):
        world.registry.command(RUN, "pause")
    assert agent.report().state == "frozen"  # not acknowledged, not done
