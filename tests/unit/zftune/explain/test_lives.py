"""What is told of a run that was killed, interrupted, or gone on with."""

from __future__ import annotations

from functools import partial

from tests.support.zftune.explain.runs import explained, follow, go_on, live_document, same, searched
from tests.support.zftune.tuner.surfaces import TOKENS, make
from zftune.store.account import Count
from zftune.store.store import Store
from zftune.tuner.record import StoreRecorder
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
    assert reasons["void"] in ("void on purpose", "crashed on purpose")
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
