"""`zftune tune` is killed at random moments, again and again. `ZFTUNE_KILLS=200` kills more often."""

from __future__ import annotations

import json
import os
import random
import time
from collections import Counter
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any

import pytest

from tests import zygote
from tests.tiers import by_day
from tests.zftune.conftest import rig_text
from tests.zftune.tuner import killable
from zftune.store import open_store
from zftune.store.store import Store
from zftune.store.types import RunState, TrialState

KILLS = int(os.environ.get("ZFTUNE_KILLS", by_day("3", all_of="20")))
_LONGEST_S = 1.2  # from the moment on at which it searches until it is killed


@pytest.fixture(scope="module")
def context() -> ForkServerContext:
    """Processes that begin with everything imported."""
    return zygote.context()


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
        """Hold the database to what the one that was just killed was told."""
        with open_store(str(self.path)) as store:
            assert store.notices == []
            assert [value for what, value in told if what == "notice"] == []
            flying = self._trials(store, TrialState.IN_FLIGHT)
            self._look_back(store, told)
            reaped = store.reap()
            assert sorted(flying) == sorted(trial for one in reaped for trial in one.crashed)
            assert {run.state for run in store.runs()} <= {RunState.LOST, RunState.FINISHED}
            assert self._trials(store, TrialState.IN_FLIGHT) | self._trials(store, TrialState.PLANNED) == set()
            assert flying <= self._trials(store, TrialState.CRASHED)
            self._look_at_measurements(store, told)
            knobs = {trial.trial_id: dict(trial.knobs) for run in store.runs() for trial in store.trials(run.run_id)}
            self.crashed += [knobs[trial] for trial in flying]
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
            (trial.trial_id, one.aggregates["sequence"])
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

    def _was_measured(self, store: Store, run_id: str) -> bool:
        return any(
            one.void_reason is None for trial in store.trials(run_id) for one in store.measurements(trial.trial_id)
        )


def _of(told: list[tuple[str, Any]], name: str) -> list[tuple[str, Any]]:
    return [(what, value) for what, value in told if what == name]


def kill(context: ForkServerContext, lives: Lives, log: Path, given: dict[str, Any], moment: random.Random) -> None:
    """Let it search for a while, and kill it; now and then before it searches."""
    process = context.Process(target=killable.search, args=(str(lives.path), str(log), given))
    process.start()
    early = moment.random() < 0.2
    wanted = {"trains"} if early else {"began", "resumed", "ended"}
    until = time.monotonic() + 60
    while not {what for what, _ in killable.read(log)} & wanted and time.monotonic() < until and process.is_alive():
        time.sleep(0.005)
    time.sleep(moment.uniform(0.0, 0.2 if early else _LONGEST_S))
    process.kill()
    process.join()


@pytest.mark.timeout(120 + 15 * KILLS)
def test_a_search_that_is_killed_at_any_moment_goes_on(
    context: ForkServerContext, tmp_path: Path, given: dict[str, Any]
) -> None:
    moment, lives = random.Random(11), Lives(tmp_path / "zftune.db")
    for attempt in range(5 * KILLS):
        if attempt >= KILLS and lives.seen["in flight"] and lives.seen["resumed"]:
            break
        log = tmp_path / f"log-{attempt}"
        kill(context, lives, log, given, moment)
        lives.look(killable.read(log))
    assert lives.seen["resumed"] > 0
    assert lives.seen["in flight"] > 0  # or it was never killed where it matters
    assert lives.seen["measured"] > KILLS / 4
    if KILLS >= 20:
        assert lives.seen["resumed"] > lives.seen["began"]

    log = tmp_path / "log-last"
    document = killable.search(str(lives.path), str(log), given, steps=80)
    if lives.run is not None:
        assert any(one.startswith(f"Goes on with run {lives.run[:8]}: ") for one in document["notices"])
        assert "resume" in {note["kind"] for note in document["decisions"]}
    lives.look(killable.read(log))
    crashed = [trial["knobs"] for trial in document["trials"] if trial["state"] == "crashed"]
    assert document["best"]["knobs"] not in crashed
