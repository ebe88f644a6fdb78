"""`zftune.attach` in trainings that are processes of their own: their signals, forks, and the example."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

from tests.support import fork_server
from tests.support.tiers import fast
from zftune.store import open_store
from zftune.store.types import RunState, TrialState

EXAMPLE = Path(__file__).parents[4] / "examples" / "tune_plain_loop.py"


FORKS = """
import os, sys, torch, zenflow, zftune, zftune.tuner.tuner

optimizer = zenflow.ZenFlowAdamW([torch.nn.Parameter(torch.ones(8, 8))], lr=1e-5)
tuner = zftune.attach(optimizer, store=False)
child = os.fork()
if child == 0:
    tuner.log_loss(1.0)
    tuner.close()
    assert not tuner.searching and tuner in zftune.tuner.tuner.open_tuners()  # it was not closed
    sys.exit(0)  # by way of atexit, as a forked worker may
_, status = os.waitpid(child, 0)
print(os.waitstatus_to_exitcode(status), tuner.searching)
"""


TRIES = """
import signal, sys, time, torch, zftune
from multiprocessing import get_context
from tests.support.zftune.tuner.loop import Loop

before = signal.getsignal(signal.SIGHUP) if sys.argv[1:] else signal.signal(signal.SIGHUP, signal.SIG_IGN)
loop = Loop()
tuner = zftune.attach(loop.optimizer)
loop.run(tuner, until=lambda: tuner.live is not None and tuner.live.request is not None and tuner.live.request.trial)
worker = get_context("fork").Process(target=time.sleep, args=(60,))
worker.start()
worker.terminate()
worker.join()
print("tries", worker.exitcode, signal.getsignal(signal.SIGHUP) is signal.SIG_IGN, flush=True)
while True:  # the setting stays in flight: no step ends its measurement
    time.sleep(0.01)
"""


@pytest.mark.smoke
def test_a_forks_child_that_ends_leaves_the_tuning_to_its_parent() -> None:
    done = fork_server.run(["-c", FORKS], check=True)
    assert done.stdout == "0 True\n", done.stderr


def example(folder: Path, *arguments: str) -> fork_server.Forked:
    return fork_server.Forked(
        [EXAMPLE, *arguments], env={**os.environ, "ZFTUNE_DB": str(folder / "zftune.db")}, cwd=folder
    )


def test_the_example_as_it_is(tmp_path: Path) -> None:
    with example(tmp_path, "--steps", "200") as child:
        out, err = child.communicate(timeout=240)
    assert child.returncode == 0, err
    assert " with quality published: " in err
    assert "step 190: loss" in out
    with open_store(str(tmp_path / "zftune.db")) as store:
        (run,) = store.runs()
        assert run.state is not RunState.RUNNING  # it has said goodbye, its search over or not
        assert store.trials(run.run_id)[0].source == "start"


def test_ctrl_c_in_the_example_ends_it_soon(tmp_path: Path) -> None:
    with example(tmp_path, "--steps", "100000") as child:
        while "step 40:" not in child.stdout:
            assert child.poll() is None
            time.sleep(0.01)
        child.send_signal(signal.SIGINT)
        _, err = child.communicate(timeout=60)
    assert child.returncode == -signal.SIGINT
    assert err.count("Traceback") == 1  # its own
    with open_store(str(tmp_path / "zftune.db")) as store:
        assert all(run.state is not RunState.RUNNING for run in store.runs())


@pytest.mark.parametrize(("number", "given"), fast([(15, False)], all_of=[(15, False), (1, True)]))
def test_a_signal_that_ends_the_training_while_a_setting_is_tried_blames_none(
    tmp_path: Path, number: int, *, given: bool
) -> None:
    path = tmp_path / "zftune.db"
    words = ["-c", TRIES, *(["hears"] if given else [])]
    with fork_server.Forked(words, env={**os.environ, "ZFTUNE_DB": str(path), "ZFTUNE_ONLINE": ""}) as child:
        # A worker of the program's own ends as it did, and what it ignores it ignores.
        assert child.line() == f"tries {-signal.SIGTERM} {not given}"
        child.send_signal(number)
        assert child.wait(60) == -number, child.stderr
    with open_store(str(path)) as store:
        assert store.reap() == []
        (run,) = store.runs()
        assert TrialState.VOID in {trial.state for trial in store.trials(run.run_id)}
        assert store.barred(run.key) == []
