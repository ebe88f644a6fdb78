"""The account of a run, and the process that counts it."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from tests.support.zftune.store import rows
from tests.support.zftune.store.examples import HARDWARE, KEY, KNOBS, MODEL
from zftune.store import open_store
from zftune.store.account import Account, Count, Counter, saved_in_words, saved_with_error
from zftune.store.store import Store, goes_on
from zftune.store.types import Run, RunState, TrialState

pytestmark = pytest.mark.smoke


def more(found: Account, *parts: tuple[float, float, float]) -> Account:
    """With (seconds, the incumbent's seconds, its gain)."""
    for seconds, incumbent_s, gain in parts:
        count = found.total.tried(seconds, incumbent_s, gain)
        found = found.taken("", replace(count, seconds=count.seconds + seconds))
    return found


def test_it_breaks_even_where_the_savings_reach_the_cost() -> None:
    found = more(Account(), (8, 8, 0), (10, 8, 0), (4, 4, 0.2))
    assert found.total.saved_s == pytest.approx(1)  # a quarter of the 4 s
    assert found.break_even_s is None
    assert found.remaining_s(0.2) == pytest.approx(4)  # a second is missing, each saves a quarter
    found = more(found, (8, 8, 0.2))
    assert found.break_even_s == pytest.approx(22 + 4)
    assert found.remaining_s(0.2) is None


def test_what_was_saved_is_as_sure_as_the_comparison_behind_it() -> None:
    def saved_s(share: float) -> float:
        return Count().trained(281, share).saved_s

    gain, account = {"share": 0.102, "error": 0.002}, {"spent_s": 10.0, "saved_s": saved_s(0.102), "break_even_s": 90.0}
    assert saved_with_error(saved_s(0.102), gain) == "31.92 +/- 0.70 s"
    assert (saved_s(0.104) - saved_s(0.100)) / 2 == pytest.approx(0.70, abs=0.005)
    assert saved_in_words(account, gain) == ["saved 31.92 +/- 0.70 s", "broke even after 90 s"]
    gain["error"], account["spent_s"] = 0.066, 11.0
    assert saved_in_words(account, gain) == ["saved 32 +/- 23 s", "probably broke even after 90 s"]
    assert saved_with_error(1e5, gain) == "100,000 +/- 72,447 s"
    far = {"share": 0.54, "error": 0.3}  # a gain that is clear saves time at its lower end, too
    assert saved_with_error(156.0, far) == "156 s (42 to 698)"
    assert saved_with_error(156.0, {"share": 0.54, "error": 0.9}) == "156 s (-35 to 13,156)"
    assert saved_with_error(saved_s(0.102), {"share": 0.102, "error": 0.0}) == "31.9 s"  # time is simulated
    late = {**account, "saved_s": saved_s(-0.05), "break_even_s": None}
    (lost,) = saved_in_words(late, {"share": -0.05, "error": 0.01})
    assert lost == "gave up 13.4 +/- 2.5 s for earlier updates or less memory"
    assert saved_in_words(
        {**account, "saved_s": saved_s(-0.01), "break_even_s": None}, {"share": -0.01, "error": 0.02}
    ) == ["saved nothing beyond noise"]
    noisy = {"spent_s": 7.7, "saved_s": 11.0, "break_even_s": 176.0}
    assert saved_in_words(noisy, {"share": 0.03, "error": 0.41}) == ["saved nothing beyond noise"]
    assert saved_with_error(saved_s(0.102), {"share": -0.01, "error": 0.01}) == "about 31.9 s"  # of another gain
    assert saved_with_error(saved_s(0.102), None) == "about 31.9 s"


def test_the_later_count_of_a_process_holds_and_processes_add_up() -> None:
    early, late = Count(steps=10, seconds=5.0), Count(steps=30, seconds=12.0, spent_s=1.0)
    found = Account().taken("one", late)
    assert found.taken("one", early) == found  # it came late
    assert found.taken("one", late) == found  # it came twice
    found = found.taken("two", early)
    assert (found.total.steps, found.total.seconds, found.total.spent_s) == (40, 17.0, 1.0)
    assert found.taken("one", Count(seconds=99.0)) == found  # a file that was left
    assert Account.of(json.loads(json.dumps(asdict(found)))) == found


def test_a_counter_spends_what_a_try_took_beyond_the_incumbent_once_it_is_over() -> None:
    counter = Counter(100.0)
    for step in range(1, 4):
        counter.step(100.0 + step, 1, 16)
        counter.trained(1.0, 0.0)
    for step_s in (3.0, 0.5):  # a change of knobs that costs, in a try that is faster
        counter.tried("change" if step_s > 1 else "measurement", step_s, 1.0, 0.5)
    assert counter.count.spent_s == 2.0
    counter.trained(1.0, 0.5)
    assert counter.count == Count(steps=3, seconds=3.0, tokens=48, spent_s=2.0, saved_s=1.0 + 0.5 + 1.0)
    counter.step(99.0, 0, 16)  # a clock that went back, and a step that a gradient scaler left out
    assert (counter.count.steps, counter.count.seconds) == (3, 3.0)


_DIES = """
import os, signal, sys
from pathlib import Path
from zftune.store.account import Count, Pulse
from zftune.store.locks import RunLocks
pulse = Pulse(RunLocks(Path(sys.argv[1])), sys.argv[2], "p" * 32)
pulse.beat(Count(steps=7, seconds=70.0, tokens=7), eval(sys.argv[3]))
print("beats", flush=True)
sys.stdin.read() if sys.argv[4:] else os.kill(os.getpid(), signal.SIGKILL)
"""


@contextmanager
def training(path: Path, run: Run, trial: int | None, *waits: str) -> Iterator[subprocess.Popen[str]]:
    """A process that trains, and is killed at once unless it waits."""
    command = [sys.executable, "-c", _DIES, str(path), run.run_id, repr(trial), *waits]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "beats\n"
        if not waits:
            process.wait()
        yield process
        process.kill()


def a_run(path: Path) -> tuple[Run, int]:
    """Of a daemon that was killed with a setting in flight."""
    with open_store(str(path)) as store:
        run = store.begin_run(KEY, MODEL, HARDWARE, knobs=KNOBS)
        rows.add_trial(store, run, KNOBS, source="start")
        trial = rows.add_trial(store, run, {**KNOBS, "update_interval": 2}, source="search")
        rows.mark_in_flight(store, run, trial.trial_id)
    return run, trial.trial_id


def state_of(store: Store, run: Run) -> tuple[RunState, TrialState]:
    record = next(one for one in store.runs() if one.run_id == run.run_id)
    return record.state, store.trials(run.run_id)[1].state


def test_a_training_whose_daemon_was_killed_goes_on_and_its_count_is_known(tmp_path: Path) -> None:
    path = tmp_path / "zftune.db"
    run, _ = a_run(path)
    with training(path, run, None, "waits") as process, open_store(str(path)) as store:
        assert store.reap() == []
        record = store.runs()[0]
        assert goes_on(store, record, time.time())
        assert store.is_trained(run.run_id)
        account = store.account(run.run_id)
        assert account is not None
        assert account.total == Count(steps=7, seconds=70.0, tokens=7)
        process.kill()
        process.wait()
        assert not store.is_trained(run.run_id)
        store.reap()
        assert state_of(store, run) == (RunState.LOST, TrialState.VOID)  # the incumbent ran when it ended
        assert store.barred(record.key) == []
        assert store.account(run.run_id) == account  # now in the row
        assert list((tmp_path / "zftune.db.runs").iterdir()) == []


@pytest.mark.parametrize("trial", [1, None])
def test_a_setting_crashed_where_it_ran_when_the_training_ended(tmp_path: Path, trial: int | None) -> None:
    path = tmp_path / "zftune.db"
    run, _ = a_run(path)
    with training(path, run, trial), open_store(str(path)) as store:
        store.reap()
        assert state_of(store, run)[1] is (TrialState.VOID if trial is None else TrialState.CRASHED)


def test_a_file_that_is_no_count_is_none(tmp_path: Path) -> None:
    path = tmp_path / "zftune.db"
    run, _ = a_run(path)
    for text in ("", "{", "[]", '{"process": "p"}', '{"process": 1, "count": {"steps": -1}}'):
        (tmp_path / "zftune.db.runs" / f"{run.run_id}.training").write_text(text)
        with open_store(str(path)) as store:
            assert store.account(run.run_id) is None
