"""Several processes at once, and processes that are killed. `ZFTUNE_KILLS=200` kills more often."""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
import sys
import textwrap
import time
from collections import Counter
from multiprocessing.context import ForkServerContext
from pathlib import Path

import pytest

from tests.support import fork_server
from tests.support.tiers import fast
from tests.support.zftune.store import writers
from tests.support.zftune.store.examples import PRESET
from zftune.store import open_store
from zftune.store.types import RunState, TrialState

PROCESSES = fast(3, all_of=8)
SOON_S = 120.0
KILLS = int(os.environ.get("ZFTUNE_KILLS", fast("2", all_of="10")))

ROOT = Path(__file__).parents[4]


@pytest.mark.smoke
def test_many_processes_write_different_models(context: ForkServerContext, path: Path, tmp_path: Path) -> None:
    begin = tmp_path / "begin"
    processes = [
        context.Process(target=writers.tune, args=(str(path), number, str(begin))) for number in range(PROCESSES)
    ]
    for process in processes:
        process.start()
    begin.touch()  # the database is not there yet: they make it, too
    for process in processes:
        process.join(SOON_S)
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
    told, until = 0 if early else moment.randrange(1, 60), time.monotonic() + SOON_S
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


@pytest.mark.smoke
@pytest.mark.timeout(300 + 10 * KILLS)
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


@pytest.mark.smoke
def test_a_forked_child_has_connections_of_its_own(path: Path) -> None:
    code = textwrap.dedent(FORKED).replace("PATH", repr(str(path)))
    done = fork_server.run(["-c", code], cwd=ROOT)
    assert done.returncode == 0, done.stderr
    with open_store(str(path)) as store:
        assert (store.notices, len(store.runs())) == ([], 11)


READ_ONLY = """
    from tests.support.zftune.store.examples import HARDWARE, KEY, KNOBS, MODEL
    from zftune.store import open_store
    with open_store(environment={"HOME": HOME}) as store:
        assert not store.is_kept, store.path
        print(*store.notices, sep="|")
        store.begin_run(KEY, MODEL, HARDWARE, knobs=KNOBS)
"""


@pytest.mark.smoke
@pytest.mark.parametrize("there", fast([True], all_of=[False, True]))
def test_a_home_that_may_not_be_written(tmp_path: Path, there: bool) -> None:
    home = tmp_path / "home"
    home.mkdir()
    if there:
        with open_store(environment={"HOME": str(home)}) as store:
            store.save_preset(PRESET)
    for path in sorted(home.rglob("*"), reverse=True):
        path.chmod(0o555 if path.is_dir() else 0o444)
    home.chmod(0o555)
    bound = ["setpriv", "--bounding-set=-all", "--inh-caps=-all"] if os.getuid() == 0 else []
    if bound and shutil.which("setpriv") is None:
        pytest.skip("the superuser may write anywhere, and there is no setpriv to give that up")
    code = textwrap.dedent(READ_ONLY).replace("HOME})", f"{str(home)!r}}})")
    done = subprocess.run([*bound, sys.executable, "-c", code], capture_output=True, text=True, check=False, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    (notice,) = done.stdout.splitlines()
    assert notice.startswith("~/.local/share/zftune/zftune.db cannot be used (")
    assert "|" not in notice


FULL = """
    import resource, signal
    from tests.support.zftune.store.examples import HARDWARE, KEY, KNOBS, MODEL
    from zftune.errors import StoreError
    from zftune.store import open_store
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (MOST, MOST))
    store = open_store(PATH)
    print(len(store.notices), store.is_kept)
    try:
        for _ in range(300 if store.is_kept else 1):
            store.begin_run(KEY, MODEL, HARDWARE, knobs=KNOBS)
    except StoreError as error:
        print(error)
    print(len(store.runs()))
"""


def limited(path: Path, limit_bytes: int) -> list[str]:
    """The program's lines, where no file may grow beyond a limit: as on a disk that is full."""
    code = textwrap.dedent(FULL).replace("PATH", repr(str(path))).replace("MOST", str(limit_bytes))
    return fork_server.run(["-c", code], check=True, cwd=ROOT).stdout.splitlines()


@pytest.mark.smoke
def test_a_disk_that_fills_up(path: Path) -> None:
    opened, fault, count = limited(path, 200_000)
    assert opened == "0 True"
    assert fault.startswith("$ZFTUNE_DB could not be written (")
    with open_store(str(path)) as store:
        assert store.notices == []
        assert len(store.runs()) == int(count) > 0
