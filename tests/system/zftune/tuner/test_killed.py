"""`zftune tune`, or a training that searches in its own process, is killed. `ZFTUNE_KILLS=200` kills more often."""

from __future__ import annotations

import json
import os
import random
import signal
import time
from collections import Counter
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any

import pytest

from tests.support import fork_server
from tests.support.tiers import fast
from tests.support.zftune.fixtures import rig_text
from tests.support.zftune.tuner import killable
from zftune.explain.summary import RunSummary
from zftune.store import open_store
from zftune.store.store import Store
from zftune.store.types import RunState, TrialState

KILLS = int(os.environ.get("ZFTUNE_KILLS", fast("2", all_of="6")))
_LONGEST_S = 4.0  # a search is killed at any moment until then


@pytest.fixture
def given(tmp_path: Path, mini_model: Path) -> dict[str, Any]:
    """A training of short steps, and a short warm-up."""
    rig, config, text = tmp_path / "rig.toml", tmp_path / "config.json", tmp_path / "text.txt"
    rig.write_text(rig_text("quick", forward_ms=3, backward_ms=3, d2h_ms=1, host_ms=4, h2d_ms=1, scale=1))
    section = {"topk_ratio": 0.05, "update_interval": 4, "select_interval": 4, "overlap_step": True}
    offload = {"offload_optimizer": {"device": "cpu"}, "zenflow": section}
    config.write_text(json.dumps({"zero_optimization": offload}))
    text.write_text("to be, or not to be, that is the question: " * 200)
    return {
        "model": str(mini_model),
        "rig": str(rig),
        "config": str(config),
        "text": str(text),
        "sequence": 8,
        "quality": "loose",
    }


class Lives:
    """One database, and what was acknowledged to the searches that wrote to it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.measured: set[tuple[int, int]] = set()
        self.crashed: list[dict[str, Any]] = []
        self.run: str | None = None
        """That the next one has to go on with."""
        self.seen: Counter[str] = Counter()

    def look(self, told: list[tuple[str, Any]]) -> None:
        with open_store(str(self.path)) as store:
            assert store.notices == []
            assert [value for what, value in told if what == "notice"] == []
            flying = self._trials(store, TrialState.IN_FLIGHT)
            self._look_back(store, told)
            reaped = store.reap()
            crashed = flying & self._crashed(store)
            run_of = {trial.trial_id: run.run_id for run in store.runs() for trial in store.trials(run.run_id)}
            assert {run_of[trial] for trial in crashed} <= set(reaped)
            assert {run.state for run in store.runs()} <= {RunState.LOST, RunState.FINISHED}
            assert self._trials(store, TrialState.IN_FLIGHT) | self._trials(store, TrialState.PLANNED) == set()
            self._look_at_measurements(store, told)
            knobs = {trial.trial_id: dict(trial.knobs) for run in store.runs() for trial in store.trials(run.run_id)}
            for trial in flying - crashed:  # its setting was measured to its end before
                assert [one for one in self._whole(store) if knobs[one] == knobs[trial]]
            self.crashed += [knobs[trial] for trial in crashed]
            assert {str(one) for one in self.crashed} == {str(knobs[one]) for one in self._crashed(store)}
            newest = next((run for run in store.runs() if self._was_measured(store, run.run_id)), None)
            self.run = newest.run_id if newest is not None and newest.state is RunState.LOST else None
            self.seen["in flight"] += len(flying)

    def _look_back(self, store: Store, told: list[tuple[str, Any]]) -> None:
        """What it went on with, and that it kept away from what had crashed before."""
        begun = [(what, value) for what, value in told if what in ("began", "resumed")]
        if begun:
            self.seen[begun[0][0]] += 1
            assert len(begun) == 1
            assert begun[0] == ("began", begun[0][1]) if self.run is None else ("resumed", self.run)
        knobs = {trial.trial_id: dict(trial.knobs) for run in store.runs() for trial in store.trials(run.run_id)}
        applied = [knobs[trial] for what, trial in told if what == "in_flight"]
        assert [one for one in applied if one in self.crashed] == []

    def _look_at_measurements(self, store: Store, told: list[tuple[str, Any]]) -> None:
        self.measured |= {(trial, sequence) for what, (trial, sequence) in _of(told, "measured")}
        kept = {
            (trial.trial_id, one.began_unix_s)
            for run in store.runs()
            for trial in store.trials(run.run_id)
            for one in store.measurements(trial.trial_id)
        }
        assert self.measured <= kept
        assert len(kept - self.measured) <= 1 + len(self.crashed)  # written, and killed before it was told
        self.seen["measured"] = len(kept)

    def _trials(self, store: Store, state: TrialState) -> set[int]:
        return {one.trial_id for run in store.runs() for one in store.trials(run.run_id) if one.state is state}

    def _crashed(self, store: Store) -> set[int]:
        return self._trials(store, TrialState.CRASHED)

    def _whole(self, store: Store) -> set[int]:
        """Trials that were measured to their end."""
        trials = (trial.trial_id for run in store.runs() for trial in store.trials(run.run_id))
        return {one for one in trials if any(row.void_reason is None for row in store.measurements(one))}

    def _was_measured(self, store: Store, run_id: str) -> bool:
        return any(
            one.void_reason is None for trial in store.trials(run_id) for one in store.measurements(trial.trial_id)
        )


def _of(told: list[tuple[str, Any]], name: str) -> list[tuple[str, Any]]:
    return [(what, value) for what, value in told if what == name]


def kill(
    context: ForkServerContext, lives: Lives, log: Path, given: dict[str, Any], attempt: int, moment: random.Random
) -> None:
    """After a measurement, then while a setting is tried, at any speed of the machine; the third at any moment."""
    last = (("measured", moment.randint(1, 3)), ("in_flight", moment.randint(1, 2)), None)[attempt % 3]
    process = context.Process(target=killable.search, args=(str(lives.path), str(log), given), kwargs={"last": last})
    process.start()
    if last is None:
        time.sleep(moment.uniform(0.0, _LONGEST_S))
        process.kill()
    process.join()
    assert process.exitcode == -signal.SIGKILL


@pytest.mark.smoke
@pytest.mark.timeout(300 + 30 * KILLS)  # as long as a busy machine takes
def test_a_search_that_is_killed_at_any_moment_goes_on(
    context: ForkServerContext, tmp_path: Path, given: dict[str, Any]
) -> None:
    moment, lives = random.Random(11), Lives(tmp_path / "zftune.db")
    for attempt in range(KILLS):
        log = tmp_path / f"log-{attempt}"
        kill(context, lives, log, given, attempt, moment)
        lives.look(killable.read(log))
    assert lives.seen["resumed"] > 0
    assert lives.seen["in flight"] > 0
    assert lives.seen["measured"] > KILLS / 4
    if KILLS >= 12:
        assert lives.seen["resumed"] > lives.seen["began"]

    log = tmp_path / "log-last"
    document = killable.search(str(lives.path), str(log), given, steps=80)
    if lives.run is not None:
        assert document["run"]["run_id"] == lives.run
        assert "resume" in {note["kind"] for note in document["decisions"]}
    lives.look(killable.read(log))
    crashed = [trial["knobs"] for trial in document["trials"] if trial["state"] == "crashed"]
    assert document["best"]["knobs"] not in crashed


_TRAINS = """
import sys, time, zftune
from tests.support.zftune.tuner import killable
from tests.support.zftune.tuner.loop import Loop

killable.undisturbed()
loop = Loop()
tuner = zftune.attach(loop.optimizer)
wanted = {
    "measured": lambda: tuner.search is not None and tuner.search.measurements,
    "begun": lambda: tuner.run_id,
    "tries": lambda: tuner.live is not None and tuner.live.request is not None and tuner.live.request.trial,
}
loop.run(tuner, until=wanted[sys.argv[1]])
print(tuner.run_id, loop.optimizer.steps, flush=True)
time.sleep(600)
"""


def steps_of(store: Store, run_id: str) -> int:
    account = store.account(run_id)
    return 0 if account is None else account.total.steps


def train_and_kill(path: Path, until: str, before: int = 0) -> tuple[str, int]:
    """Train until the search has come so far, and kill it once a beat has said so: the run, and all of its steps."""
    environment = {**os.environ, "ZFTUNE_DB": str(path), "ZFTUNE_ONLINE": ""}
    with fork_server.Forked(["-c", _TRAINS, until], env=environment) as child:
        run_id, steps = child.line().split()
        ends = time.monotonic() + 30
        with open_store(str(path)) as store:
            while steps_of(store, run_id) != before + int(steps):
                assert time.monotonic() < ends, f"{steps_of(store, run_id)} steps are known of {before} + {steps}"
                time.sleep(0.02)
        child.kill()
        child.wait()
    return run_id, before + int(steps)


def test_a_training_that_is_killed_leaves_its_steps_in_the_account(tmp_path: Path) -> None:
    path, taken = tmp_path / "zftune.db", 0
    for until in ("measured", "begun", "begun"):  # the later ones are killed before they measure anything
        run_id, taken = train_and_kill(path, until, taken)
    with open_store(str(path)) as store:
        (run,) = store.runs()
        store.reap()
        assert list(path.with_name("zftune.db.runs").iterdir()) == []
        assert (run.run_id, steps_of(store, run_id)) == (run_id, taken)
        found = RunSummary.read(store, run).document()
    assert found["run"]["resumed"] == 2
    resumed = [one["at_s"] for one in found["decisions"] if one["kind"] == "resume"]
    assert len(set(resumed)) == len(resumed) == 2  # each when it happened


@pytest.mark.smoke
def test_a_setting_that_a_killed_training_was_trying_has_crashed(tmp_path: Path) -> None:
    path = tmp_path / "zftune.db"
    run_id, _ = train_and_kill(path, "tries")
    with open_store(str(path)) as store:
        store.reap()
        (run,) = store.runs()
        assert run.run_id == run_id
        assert [one.kind for one in store.barred(run.key)] == ["crash"]


def test_a_training_that_ends_leaves_no_file_of_itself(tmp_path: Path) -> None:
    code = _TRAINS.replace("time.sleep(600)", "tuner.close()")
    environment = {**os.environ, "ZFTUNE_DB": str(tmp_path / "zftune.db"), "ZFTUNE_ONLINE": ""}
    run_id, steps = fork_server.run(["-c", code, "measured"], env=environment, check=True).stdout.split()
    assert list((tmp_path / "zftune.db.runs").iterdir()) == []
    with open_store(str(tmp_path / "zftune.db")) as store:
        assert steps_of(store, run_id) == int(steps)
