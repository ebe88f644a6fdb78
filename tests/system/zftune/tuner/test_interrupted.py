"""Ctrl-C ends `zftune tune` with what it found, and the next one goes on from there; with a real signal."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import time
from pathlib import Path

import pytest

from tests.support import fork_server, forked
from tests.support.zftune.fixtures import rig_text
from tests.support.zftune.tuner import commanding
from zftune.store import open_store
from zftune.store.types import RunState, TrialState


def measured(path: Path) -> int:
    if not path.exists():
        return 0
    with open_store(str(path)) as store:
        trials = [trial for run in store.runs() for trial in store.trials(run.run_id)]
        return sum(len(store.measurements(trial.trial_id)) for trial in trials)


@pytest.mark.timeout(180)
def test_an_interrupted_search_goes_on(tmp_path: Path, mini_model: Path) -> None:
    context = fork_server.context()
    (tmp_path / "rig.toml").write_text(
        rig_text("quick", forward_ms=6, backward_ms=6, d2h_ms=2, host_ms=8, h2d_ms=2, scale=1)
    )
    (tmp_path / "text.txt").write_text("to be, or not to be, that is the question: " * 400)
    given = {"rig": tmp_path / "rig.toml", "model": mini_model, "text": tmp_path / "text.txt", "sampler": "random"}
    given["json"] = tmp_path / "found.json"
    path, output = tmp_path / "zftune.db", tmp_path / "output"
    environment = {"ZFTUNE_DB": str(path), "COLUMNS": "400"}

    def begin(steps: int) -> multiprocessing.process.BaseProcess:
        arguments = [word for name, value in given.items() for word in (f"--{name}", str(value))]
        arguments += ["--steps", str(steps)]
        process = context.Process(target=commanding.tune, args=(arguments, str(output), environment, {}))
        process.start()
        return process

    process, until = begin(100_000), time.monotonic() + 90
    while measured(path) < 2 and time.monotonic() < until:
        time.sleep(0.05)
    os.kill(process.pid or 0, signal.SIGINT)
    process.join(60)
    lines = output.read_text().splitlines()
    assert lines[-1] == "130"
    assert any("It ended before its search did: this was found until then." in line for line in lines)
    assert json.loads((tmp_path / "found.json").read_text())["interrupted"]
    with open_store(str(path)) as store:
        (run,) = store.runs()
        assert run.state is RunState.LOST
        states = {trial.state for trial in store.trials(run.run_id)}
        assert not states & {TrialState.IN_FLIGHT, TrialState.PLANNED, TrialState.CRASHED}
    before = measured(path)

    process = begin(160)  # on a busy machine many a step is late, and its measurement void
    process.join(150)
    lines = output.read_text().splitlines()
    assert lines[-1] == "0"
    assert "(--fresh begins a new search)" in " ".join(" ".join(lines).split())
    assert measured(path) > before
    with open_store(str(path)) as store:
        assert [one.run_id for one in store.runs()] == [run.run_id]


@pytest.mark.smoke
def test_a_signal_ends_a_process_that_can_start_no_thread_any_more() -> None:
    """As from Python 3.12 on, once the interpreter is ending."""
    done = forked.run(
        """
import os, signal, threading
from zftune.goodbye import Goodbye

def refuses(thread):
    raise RuntimeError("can't create new thread at interpreter shutdown")

Goodbye(lambda: None).hear()
threading.Thread.start = refuses
os.kill(os.getpid(), signal.SIGTERM)
print("it goes on")
"""
    )
    assert (done.returncode, done.stdout) == (-signal.SIGTERM, "")
