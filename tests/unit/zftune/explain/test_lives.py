"""What is told of a run that was killed, interrupted, or gone on with."""

from __future__ import annotations

import io
from functools import partial

from rich.console import Console

from tests.support.zftune.explain.runs import ByHand, begin, explained, follow, go_on, live_document, same, searched
from tests.support.zftune.fixtures import Clock
from tests.support.zftune.tuner.surfaces import TOKENS, make
from zftune.explain.screen import render
from zftune.store.account import Account, Count
from zftune.store.store import Store
from zftune.tuner.recorder import StoreRecorder
from zftune.tuner.states import Outcome, Request


def test_crashed_void_and_resumed(store: Store) -> None:
    fates = iter(["", "crashed", "void", "void", "void"])

    def fault(request: Request) -> Outcome | None:
        status = next(fates, "")
        steps = (100.0,) * 20 if status == "void" else ()
        return Outcome(status, steps, tokens=TOKENS, reason=f"{status} on purpose") if status else None  # type: ignore[arg-type]

    run, search, driver, recorder = searched(store, 4, fault=fault, most=6)
    same(explained(store, run), live_document(search))
    recorder.finish(search)
    run = store.resume_run(run.run_id)
    again, _ = make(4, 0.05)
    recorder = StoreRecorder(store, run)
    recorder.resume(again)
    follow(recorder, again, "second")
    go_on(again, driver, recorder)
    recorder.finish(again)
    found = explained(store, run)
    same(found, live_document(again))
    assert found["run"]["resumed"] == 1
    assert "resume" in {note["kind"] for note in found["decisions"]}
    reasons = {one["status"]: one["reason"] for one in found["history"] if one["status"] != "measured"}
    assert reasons["void"] == "void on purpose"
    assert {one["reason"] for one in found["trials"] if one["state"] == "crashed"} == {"crashed on purpose"}


def test_a_daemon_that_is_started_again_is_no_resumption_of_the_training(store: Store) -> None:
    run, search, driver, recorder = searched(store, 4, most=0)
    for process, seconds, resumed in (("first", 60.0, 0), ("first", 90.0, 0), ("second", 20.0, 1)):
        recorder.follow(partial(Count, seconds=seconds), process)
        go_on(search, driver, recorder, 2)
        recorder.finish(search, unfinished=True)
        assert explained(store, run)["run"]["resumed"] == resumed
        run, (search, _) = store.resume_run(run.run_id), make(4, 0.05)
        recorder = StoreRecorder(store, run)
        recorder.resume(search)


def test_a_setting_that_an_interruption_came_before_is_told_of_once(timed: Store, clock: Clock) -> None:
    """The run goes on, and so nothing says that it ended; what was planned then is planned again."""
    rows = ByHand(timed, clock, begin(timed))
    rows.measure(rows.trial("start"), "start", 400)
    rows.trial(topk_ratio=0.2)
    rows.trial(topk_ratio=0.3)
    timed.interrupt_run(rows.run)
    rows.run = timed.resume_run(rows.run.run_id)
    rows.trial(topk_ratio=0.2)
    found = explained(timed, rows.run)
    assert [one["reason"] for one in found["trials"][1:3]] == [
        "the search was interrupted before this setting was measured"
    ] * 2
    shown = io.StringIO()
    Console(width=200, file=shown).print(render(found))
    not_counted = [one for one in shown.getvalue().splitlines() if one.startswith("Not counted")]
    assert len(not_counted) == 1
    assert "topk_ratio 0.3" in not_counted[0]


def test_what_a_killed_training_has_measured_stands_before_it_is_started_again(timed: Store, clock: Clock) -> None:
    """Its crash is told where and when it was killed, and what was measured before it stands there."""
    run = begin(timed)
    rows = ByHand(timed, clock, run)
    start = rows.trial("start")
    rows.measure(start, "start", 400, at_s=8.0)
    rows.decide("start", start, "The search begins.", elapsed_s=8.0)
    other = rows.trial(topk_ratio=0.2)
    rows.measure(other, "explore", 200, at_s=12.0)
    third = rows.trial(topk_ratio=0.3)
    timed.mark_in_flight(run, third)
    timed.lose_run(run, Account().taken("first", Count(steps=70, seconds=20.0)))
    clock.now += 5.0
    rows.run = timed.resume_run(run.run_id)
    rows.decide("resume", None, "Goes on after 2 measurements.", elapsed_s=20.0)
    rows.measure(start, "start", 400, at_s=28.0)
    rows.measure(other, "explore", 200, at_s=32.0)
    timed.interrupt_run(rows.run)
    rows.run = timed.resume_run(run.run_id)
    rows.decide("resume", None, "Goes on after 3 measurements.", elapsed_s=40.0)
    found = explained(timed, run)
    told = [(one["kind"], one["at_s"], one["measured"]) for one in found["decisions"]]
    assert told == [
        ("start", 8.0, [1]),
        ("crash", 20.0, [2]),
        ("resume", 20.0, []),
        ("resume", 40.0, [3, 4]),
    ]
