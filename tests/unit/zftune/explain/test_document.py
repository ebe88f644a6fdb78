"""What is told of a run, against the search that made it and against rows that were written by hand."""

from __future__ import annotations

import io
from dataclasses import replace

import pytest
from rich.console import Console

from tests.support.zftune.explain.runs import (
    HARDWARE,
    KEY,
    MODEL,
    ByHand,
    begin,
    by_hand,
    explained,
    finished,
    go_on,
    live_document,
    same,
    searched,
)
from tests.support.zftune.fixtures import Clock
from tests.support.zftune.store import rows as store_rows
from tests.support.zftune.tuner.surfaces import START
from zftune.cli import top
from zftune.explain.screen import render
from zftune.store.account import Count
from zftune.store.store import Store
from zftune.store.types import Curve, CurvePoint, Decision, KnobChange, TrialState
from zftune.tuner.evidence import Gain


@pytest.mark.parametrize("seed", [1, 4, 6])
def test_the_rows_say_what_the_search_knew(store: Store, seed: int) -> None:
    run, search = finished(store, seed)
    found, live = explained(store, run), live_document(search)
    same(found, live)
    assert live["gain"] is not None
    assert found["run"]["state"] == "finished"
    assert sum(one["count"] for one in found["rejected"]) == sum(one["state"] == "rejected" for one in found["trials"])
    assert [one["number"] for one in found["history"]] == list(range(1, len(found["history"]) + 1))


def test_rows_by_hand(timed: Store, clock: Clock) -> None:
    found = explained(timed, by_hand(timed, clock), clock)
    cost = found["cost"]
    assert cost["spent_s"] == pytest.approx(2)
    assert cost["elapsed_s"] == pytest.approx(52, abs=0.05)
    assert cost["saved_s"] == pytest.approx(10, abs=0.05)
    assert cost["break_even_s"] == pytest.approx(44, abs=0.05)  # two seconds after it was adopted
    assert found["gain"] == {"share": pytest.approx(0.5), "error": pytest.approx(0.02), "reference": None}
    assert found["best"]["step_ms"] == pytest.approx(200)
    assert found["verdict"][:2] == [
        "Spent 3.8% of the run (2 s of 52 s), gained 50 +/- 2%, saved 10.00 +/- 0.80 s, broke even after 44 s.",
        "Keep topk_ratio 0.2; all else as it was at the start.",
    ]
    assert found["run"]["state"] == "running"
    assert [round(note["at_s"]) for note in found["decisions"]] == [8, 18, 42, 52]
    assert [one["role"] for one in found["history"]] == ["start", "explore", "explore", "a1", "b", "a2", "hold"]


def test_a_remark_that_was_written_down_at_the_end_stands_where_it_was_made(timed: Store, clock: Clock) -> None:
    run = by_hand(timed, clock)
    before = explained(timed, run, clock)["decisions"]
    between = (before[0]["at_unix_s"] + before[1]["at_unix_s"]) / 2
    store_rows.add_decision(
        timed, run, Decision("remark", None, {"text": "Nothing is predicted here."}, at_unix_s=between)
    )
    after = explained(timed, run, clock)["decisions"]
    assert [note["kind"] for note in after] == ["start", "remark", *(note["kind"] for note in before[1:])]
    assert after[1]["reason"] == "Nothing is predicted here."


def test_what_was_saved_before_a_rollback_stays_saved_on_every_screen(timed: Store, clock: Clock) -> None:
    run = by_hand(timed, clock)
    clock.now += 20
    pinned = Decision("rollback", timed.trials(run.run_id)[-1].number, {"pinned": 0, "elapsed_s": 72.0})
    store_rows.add_decision(timed, run, pinned)
    rows = ByHand(timed, clock, run)
    rows.knows(step_ms=(400.0, 500.0, 200.0))
    before = timed.account(run.run_id)
    assert before is not None
    timed.finish_run(run, before.taken("first", Count(seconds=72.0, spent_s=2.0, saved_s=30.0)))
    found = explained(timed, run, clock)
    account = {**found["cost"], "steps": 720}
    assert found["gain"] is None
    assert found["verdict"][0] == "Spent 2.8% of the run (2 s of 72 s), saved about 30 s, broke even after 44 s."
    assert top.account({"account": account}, found["gain"]) == (
        "tuned for 720 steps in 72 s, exploring cost 2 s (2.8%), saved about 30 s, broke even after 44 s"
    )


def test_the_advice_on_a_low_coverage_looks_at_what_was_adopted(timed: Store, clock: Clock) -> None:
    run = by_hand(timed, clock)
    adopted = {**START.knobs(), "topk_ratio": 0.2}
    curve = Curve((CurvePoint(100, 100, coverage=0.13),), (KnobChange(0, adopted),))
    timed.save_curve(run, curve)
    (notice,) = explained(timed, run, clock)["notices"]
    assert "The search adopted topk_ratio 0.2, which its quality allows" in notice
    timed.save_curve(run, replace(curve, changes=(KnobChange(0, START.knobs()),)))  # as while another is on trial
    (notice,) = explained(timed, run, clock)["notices"]
    assert "Raise topk_ratio, lower update_interval" in notice


def test_what_is_not_paid_for_yet(timed: Store, clock: Clock) -> None:
    rows = ByHand(timed, clock, begin(timed))
    start, slow, fast = rows.trial("start"), rows.trial(topk_ratio=0.05), rows.trial(topk_ratio=0.2)
    rows.measure(start, "start", 100)
    rows.decide("start", start)
    rows.measure(slow, "explore", 400, reason="far too slow")
    rows.decide("void", slow)
    for trial, role, ms in ((fast, "explore", 75), (start, "a1", 100), (fast, "b", 75), (start, "a2", 100)):
        rows.measure(trial, role, ms)
    rows.decide("adopt", fast, gain=0.25, error=0.004)
    rows.knows(incumbent=2, gain=Gain(0.25, 0.004), step_ms=(100.0, None, 75.0))
    rows.counted(Count(seconds=17.0, spent_s=6.0))
    timed.finish_run(rows.run)
    found = explained(timed, rows.run, clock)
    assert found["cost"]["break_even_s"] is None
    assert found["cost"]["remaining_s"] == pytest.approx(18, abs=0.05)  # 6 s were spent, a second saves a third
    assert found["verdict"][0] == (
        "Spent 35% of the run (6 s of 17 s), gained 25.0 +/- 0.8%, not yet broken even: 18 s more under these settings "
        "pay for it."
    )


def test_a_run_without_a_gain(store: Store) -> None:
    run, search = finished(store, 1, sampler="none")
    found = explained(store, run)
    same(found, live_document(search))
    if found["gain"] is None:
        assert "gained nothing." in found["verdict"][0]
    worse = ByHand(store, Clock(), begin(store))
    start = worse.trial("start")
    worse.measure(start, "start", 100)
    worse.knows(step_ms=(100.0,))
    worse.counted(Count(seconds=2.0))
    found = explained(store, worse.run)
    assert found["verdict"][0] == "Spent nothing in 2 s, gained nothing."
    assert found["verdict"][1] == (f"No other setting was measured. It began with: {START}.")
    assert not any("Keep" in one for one in found["verdict"])


def test_a_run_that_measured_nothing(store: Store) -> None:
    rows = ByHand(store, Clock(), begin(store))
    rows.trial("start")
    found = explained(store, rows.run)
    assert found["verdict"][0] == (f"Nothing was measured. It began with: {START}.")
    assert not any("Spent" in one for one in found["verdict"])


def test_an_interrupted_run(store: Store) -> None:
    run, search, _, recorder = searched(store, 6, most=5)
    search.stop("Interrupted.")
    recorder.finish(search, unfinished=True)
    found = explained(store, run)
    assert found["interrupted"]
    assert found["verdict"][-1] == "It ended before its search did: this was found until then."
    same(found, live_document(search))


def test_a_run_that_goes_on(store: Store) -> None:
    run, search, _, recorder = searched(store, 6, most=5)
    request = search.next()
    assert request is not None
    recorder.before(search, request)
    found = explained(store, run)
    assert found["run"]["state"] == "running"
    assert found["verdict"][-1] == "It is still running: this is known so far."
    assert len(found["history"]) == 5


def test_a_lost_run(timed: Store, clock: Clock) -> None:
    rows = ByHand(timed, clock, begin(timed))
    start, tried = rows.trial("start"), rows.trial(topk_ratio=0.2)
    rows.measure(start, "start", 100)
    rows.decide("start", start)
    store_rows.mark_in_flight(timed, rows.run, tried)
    clock.now += 1000
    for _ in range(2):  # before somebody closes it, and after
        found = explained(timed, rows.run, clock)
        assert found["run"]["state"] == "ended"
        assert found["verdict"][-1].startswith("It ended before its search did")
        timed.reap()
    assert found["trials"][1]["state"] == TrialState.CRASHED.value
    assert found["decisions"][-1]["kind"] == "crash"
    assert found["decisions"][-1]["trial"] == 1


def test_a_run_that_the_guard_ended(store: Store) -> None:
    run, search, _, recorder = searched(store, 6)
    assert search.book.gain is not None
    search.guard("Training goes on with the settings at the start.")
    recorder.finish(search)
    found = explained(store, run)
    same(found, live_document(search))
    assert found["best"]["number"] == 0
    assert ("gained nothing" in found["verdict"][0]) == (found["cost"]["saved_s"] == 0)
    assert found["stopped"] == "Training goes on with the settings at the start."


def test_a_run_in_which_updates_had_to_come_earlier(store: Store) -> None:
    """Nobody has compared what it goes on with: it gains nothing, and what was saved before stays saved."""
    run, search, driver, recorder = searched(store, 6, hold=True, most_measurements=None, most=40)
    assert explained(store, run)["gain"] is not None
    driver.fault = lambda request: replace(driver.measure(request), movement_percent=5.0)
    while search.book.chain:
        go_on(search, driver, recorder, 1)
    driver.fault = lambda request: None
    go_on(search, driver, recorder, 1)
    found = explained(store, run)
    assert (search.book.gain, found["best"]["number"]) == (None, search.book.incumbent.number)
    assert found["decisions"][-1]["kind"] == "movement"
    assert (found["gain"], found["cost"]["remaining_s"]) == (None, None)
    assert "gained" not in found["verdict"][0]


def test_a_run_that_has_no_rows(store: Store) -> None:
    found = explained(store, begin(store))
    assert found["verdict"] == ["The search had not begun."]
    assert found["best"] is None


def test_the_ranks_are_told(timed: Store, clock: Clock) -> None:
    key = replace(KEY, world_size=4, nodes=2, shards=4)
    rows = ByHand(timed, clock, timed.begin_run(key, MODEL, HARDWARE, knobs=START.knobs(), settings={}))
    start = rows.trial("start")
    rows.measure(start, "start", 70)
    rows.knows(step_ms=(70.0,), ranks_ms=(40.0, 40.5, 60.0, 41.0))
    document = explained(timed, rows.run)
    assert document["ranks_ms"] == [40.0, 40.5, 60.0, 41.0]
    assert document["workload"]["ranks"] == "4 ranks on 2 nodes, state sharded"
    shown = io.StringIO()
    Console(width=120, file=shown).print(render(document))
    assert "4 ranks on 2 nodes, state sharded; measured on rank 0" in shown.getvalue()
    assert "Rank 2 is the slowest: its step takes 60 ms without collectives, that of the fastest rank 40 ms;" in (
        shown.getvalue()
    )
