"""Several processes at once, and processes that are killed. `ZFTUNE_KILLS=200` kills more often."""

from __future__ import annotations

import json
import os
import random
import textwrap
import time
from collections import Counter
from multiprocessing.context import ForkServerContext
from pathlib import Path

import pytest

from tests.support import fork_server
from tests.support.tiers import fast
from tests.support.zftune.store import writers
from zftune.store import open_store
from zftune.store.types import RunState, TrialState

PROCESSES = fast(3, all_of=8)
KILLS = int(os.environ.get("ZFTUNE_KILLS", fast("2", all_of="10")))


@pytest.fixture(scope="module")
def context() -> ForkServerContext:
    """Processes that begin with everything imported."""
    return fork_server.context()


@pytest.mark.timeout(120)
def test_many_processes_write_different_models(context: ForkServerContext, path: Path, tmp_path: Path) -> None:
    begin = tmp_path / "begin"
    processes = [
        context.Process(target=writers.tune, args=(str(path), number, str(begin))) for number in range(PROCESSES)
    ]
    for process in processes:
        process.start()
    begin.touch()  # the database is not there yet: they make it, too
    for process in processes:
        process.join(90)
    assert [process.exitcode for process in processes] == [0] * PROCESSES
    with open_store(str(path)) as store:
        assert store.notices == []
        runs = store.runs()
        assert {run.key.model_id for run in runs} == {f"{number:016x}" for number in range(PROCESSES)}
        assert {run.state for run in runs} == {RunState.FINISHED}
        for run in runs:
            trials = store.trials(run.run_id)
            assert [trial.knobs["update_interval"] for trial in trials] == list(range(1, writers.TRIALS + 1))
            assert {trial.state for trial in trials} == {TrialState.MEASURED}
            found = [[one.step_ms for one in store.measurements(trial.trial_id)] for trial in trials]
            assert found == [[700.0 + value] for value in range(writers.TRIALS)]
            assert len(store.decisions(run.run_id)) == writers.TRIALS
        models = Counter(preset.key.model_id for preset in store.presets())
        assert models == {f"{number:016x}": 2 for number in range(PROCESSES)}
        assert len({preset.name for preset in store.presets()}) == 2 * PROCESSES


def killed(context: ForkServerContext, path: Path, log: Path, moment: random.Random, *, early: bool) -> dict[str, list]:  # type: ignore[type-arg]
    """Let a search run for a while, kill it, and return what was acknowledged to it."""
    process = context.Process(target=writers.search, args=(str(path), str(log)))
    process.start()
    told, until = 0 if early else moment.randrange(1, 60), time.monotonic() + 30
    while (log.read_bytes().count(b"\n") if log.exists() else 0) < told:
        assert time.monotonic() < until
        time.sleep(0.002)
    process.kill()
    process.join()
    lines = log.read_text().splitlines() if log.exists() else []
    found: dict[str, list] = {}  # type: ignore[type-arg]
    for line in lines:
        what, value = json.loads(line)
        found.setdefault(what, []).append(value)
    return found


@pytest.mark.timeout(60 + 10 * KILLS)
def test_a_process_that_is_killed_at_any_moment_loses_nothing(context: ForkServerContext, tmp_path: Path) -> None:
    moment, flying = random.Random(6), 0
    for attempt in range(max(40, 2 * KILLS)):
        if attempt >= KILLS and flying:
            break
        fresh = attempt % 4 == 0  # killed while the tables are made, perhaps; else in the same database
        path = tmp_path / (f"fresh-{attempt}.db" if fresh else "zftune.db")
        told = killed(context, path, tmp_path / f"log-{attempt}", moment, early=fresh)
        with open_store(str(path), clock=lambda: time.time() + 60) as store:
            assert store.notices == told.get("notice", []) == []
            before = {trial.trial_id: trial for run in store.runs() for trial in store.trials(run.run_id)}
            in_flight = [one.trial_id for one in before.values() if one.state is TrialState.IN_FLIGHT]
            store.reap()
            after = {trial.trial_id: trial for run in store.runs() for trial in store.trials(run.run_id)}
            assert {run.state for run in store.runs()} <= {RunState.LOST}
            assert set(told.get("run", [])) <= {run.run_id for run in store.runs()}
            assert set(told.get("trial", [])) <= set(after)
            for trial_id in told.get("measured", []):
                assert after[trial_id].state is TrialState.MEASURED
                assert len(store.measurements(trial_id)) == 1
            ids = {(trial.run_id, trial.number): trial.trial_id for trial in after.values()}
            decisions = [(run.run_id, one) for run in store.runs() for one in store.decisions(run.run_id)]
            kept = {ids[run_id, one.trial] for run_id, one in decisions if one.kind == "keep" and one.trial is not None}
            assert set(told.get("decision", [])) <= kept
            for trial_id in set(told.get("in_flight", [])) - set(told.get("measured", [])):
                # The measurement may be on the disk although nobody was told any more.
                assert after[trial_id].state in (TrialState.CRASHED, TrialState.MEASURED)
            assert {after[trial_id].state for trial_id in in_flight} <= {TrialState.CRASHED}
            assert not {trial.state for trial in after.values()} & {TrialState.IN_FLIGHT, TrialState.PLANNED}
            flying += len(in_flight)
    assert flying > 0  # or it was never killed where it matters


FORKED = """
    import os
    from tests.support.zftune.store.examples import HARDWARE, KEY, KNOBS, MODEL
    from zftune.store import open_store
    store = open_store(PATH)
    store.begin_run(KEY, MODEL, HARDWARE, knobs=KNOBS)
    child = os.fork()
    for _ in range(5):
        store.begin_run(KEY, MODEL, HARDWARE, knobs=KNOBS)
    if child == 0:
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert len(store.runs()) == 11, len(store.runs())
"""


def test_a_forked_child_has_connections_of_its_own(path: Path) -> None:
    code = textwrap.dedent(FORKED).replace("PATH", repr(str(path)))
    root = Path(__file__).parents[4]
    done = fork_server.run(["-c", code], cwd=root)
    assert done.returncode == 0, done.stderr
    with open_store(str(path)) as store:
        assert (store.notices, len(store.runs())) == ([], 11)
