"""`zftune run --online`, `--schedule` and `--export-schedule` on scripts that nobody changed: their real processes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support import fork_server
from tests.support.tiers import everything, fast
from tests.support.zftune.daemon.daemons import end_private, short_folder
from zftune.daemon.client.http import DaemonClient

SCRIPT = """
import hashlib, sys, time
import torch, zenflow
from torch import nn

steps, changes = int(sys.argv[1]), int(sys.argv[2])
torch.manual_seed(0)
module = nn.Sequential(nn.Linear(32, 64, bias=False), nn.Tanh(), nn.Linear(64, 8, bias=False))
config = zenflow.ZenFlowConfig(topk_ratio=0.1, update_interval=4, host_threads=1)
optimizer = zenflow.ZenFlowAdamW(module.parameters(), lr=1e-5, config=config, module=module)
batches = torch.Generator().manual_seed(1)
ends = time.monotonic() + 90

def seen():
    return open("schedule.json").read().count("after_step")

while optimizer.steps < steps or (changes and (optimizer.steps % 20 or seen() < changes)):
    assert time.monotonic() < ends
    module(torch.randn(16, 32, generator=batches)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    if changes:
        time.sleep(0.002)
digest = hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in module.parameters())).hexdigest()
print(optimizer.steps, digest)
"""


@pytest.fixture
def folder() -> Iterator[Path]:
    """With the script, a store and a socket of its own; a daemon there is ended."""
    with short_folder() as made:
        (made / "train.py").write_text(SCRIPT)
        yield made
        end_private(made)


def run(folder: Path, *words: str, **more: str) -> subprocess.CompletedProcess[str]:
    """`zftune run` with options and Python, in one process that is forked; `test_run.py` has real ones."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("ZFTUNE_", "XDG_"))}
    own = {"ZFTUNE_SOCKET": str(folder / "z.sock"), "ZFTUNE_DB": str(folder / "z.db"), "OMP_NUM_THREADS": "1"}
    options, _, command = " ".join(words).partition(" -- ")
    words = ("run", *options.split(), "--", sys.executable, *command.split())
    return fork_server.zftune(*words, env={**kept, **own, **more}, cwd=folder, timeout=150)


@pytest.mark.smoke
def test_a_run_tuned_by_a_daemon_is_replayed_bit_for_bit(folder: Path) -> None:
    with_auto = SCRIPT.replace("update_interval=4", 'update_interval="auto"')  # left once there is a search
    assert with_auto != SCRIPT
    (folder / "train.py").write_text(with_auto)
    tuned = run(folder, "--online", "--export-schedule", "schedule.json", "--", "train.py", "40", "2")
    assert tuned.returncode == 0, tuned.stderr
    assert " with quality published: " in tuned.stderr
    assert "\nzftune keeps topk_ratio" in tuned.stderr or "zftune tuned nothing" in tuned.stderr
    with DaemonClient(folder / "z.sock") as client:
        assert client.get("/v1/health")["private"] is True
    steps, digest = tuned.stdout.split()
    entries = json.loads((folder / "schedule.json").read_text())["steps"]
    assert len(entries) >= 2
    assert entries[0]["after_step"] == 0
    assert [entry["knobs"]["update_interval"] for entry in entries[:2]] == ["auto", 4]

    replayed = run(folder, "--schedule", "schedule.json", "--", "train.py", steps, "0")
    assert replayed.returncode == 0, replayed.stderr
    assert replayed.stdout.split() == [steps, digest]
    assert replayed.stderr.startswith("zftune replays the settings of ")
    assert "tunes" not in replayed.stderr


ENDS = """
import os, time
from zftune.daemon.client.http import DaemonClient
from zftune.errors import DaemonError
from zftune.daemon.client.location import locate

def end():
    DaemonClient().post("/v1/stop")
    while locate(os.environ).socket.exists():
        time.sleep(0.02)

def answers():
    try:
        return len(DaemonClient().get("/v1/health"))
    except DaemonError:
        return 0
"""
"""What a daemon that ends by itself does while a slow script loads, or warms up."""
ATTACHED = "import zftune\nzftune.attach(optimizer)\n"
IN_WARMUP = "if optimizer.steps == 1:\n        time.sleep(2)  # a daemon is looked for, and found\n        end()"


@pytest.mark.skipif(not everything(), reason="before a release: three more trainings behind a slow start")
@pytest.mark.parametrize(
    ("loading", "more", "warming"),
    [("end()", "", ""), ("end()", ATTACHED, ""), ("", "", f"    {IN_WARMUP}\n")],
    ids=["while it loads", "while it loads, attached by the script", "while it warms up"],
)
def test_a_daemon_that_ended_before_the_training_was_registered_is_started_again_without_an_alarm(
    folder: Path, loading: str, more: str, warming: str
) -> None:
    script = SCRIPT
    for place, becomes in (
        ("module=module)\n", f"module=module)\n{more}"),
        ('open("schedule.json").read().count("after_step")', "answers()"),
        ("    optimizer.zero_grad()\n", f"    optimizer.zero_grad()\n{warming}"),
    ):
        assert script.count(place) == 1
        script = script.replace(place, becomes)
    (folder / "slow.py").write_text(f"{ENDS}\n{loading}\n{script}")
    tuned = run(folder, "--online", "--", "slow.py", "40", "1")
    assert tuned.returncode == 0, tuned.stderr
    assert "cannot be reached" not in tuned.stderr
    assert "until there is a daemon" not in tuned.stderr
    with DaemonClient(folder / "z.sock") as client:
        assert client.get("/v1/health")["private"] is True


def test_a_script_that_tunes_itself_is_replayed_all_the_same(folder: Path) -> None:
    attaches = SCRIPT.replace(
        "import torch, zenflow\n", "import zftune\nattach = zftune.attach\nimport torch, zenflow\n"
    )
    attaches = attaches.replace(
        "module=module)\n", "module=module)\ntuner = attach(optimizer)\nassert not tuner.searching\n"
    )
    assert attaches.count("attach") == 3
    (folder / "tuned.py").write_text(attaches)
    changes = {"zftune_schedule": 1, "steps": [{"after_step": 5, "knobs": {"update_interval": 2, "apply_lag": 1}}]}
    (folder / "schedule.json").write_text(json.dumps(changes))
    plain, tuned = (
        run(folder, "--schedule", "schedule.json", "--", one, "60", "0") for one in ("train.py", "tuned.py")
    )
    assert (tuned.returncode, tuned.stdout) == (0, plain.stdout), tuned.stderr
    assert "zftune.attach does nothing: the settings come from a schedule" in tuned.stderr


@pytest.mark.smoke
def test_a_schedule_changes_the_weights(folder: Path) -> None:
    changes = {"zftune_schedule": 1, "steps": [{"after_step": 5, "knobs": {"update_interval": 2, "apply_lag": 1}}]}
    (folder / "schedule.json").write_text(json.dumps(changes))
    with_it = run(folder, "--schedule", "schedule.json", "--", "train.py", "12", "0")
    without = run(folder, "--export-schedule", "own.json", "--", "train.py", "12", "0")
    assert (with_it.returncode, without.returncode, without.stderr) == (0, 0, "")
    assert with_it.stdout != without.stdout
    (only,) = json.loads((folder / "own.json").read_text())["steps"]
    assert (only["after_step"], only["knobs"]["topk_ratio"]) == (0, 0.1)


def test_it_begins_where_deepspeed_is_imported_first(folder: Path) -> None:
    """Our part for DeepSpeed imports zenflow, which is watched: one begins within the other."""
    (folder / "deepspeed.py").write_text("__version__ = '0.19.6'\ndef initialize(model=None, config=None): pass\n")
    (folder / "both.py").write_text("import deepspeed\n" + SCRIPT)
    done = run(folder, "--export-schedule", "own.json", "--", "both.py", "3", "0", PYTHONPATH=str(folder))
    assert (done.returncode, done.stderr) == (0, "")
    assert (folder / "own.json").exists()


TRAINER = """
import sys
from pathlib import Path
from tests.support.zftune.integrations.trainers import trainer
from zftune.integrations.huggingface import ZFTuneCallback, zenflow_optimizer

given = [ZFTuneCallback()] if sys.argv[1] == "given" else []
made = trainer(Path(), zenflow_optimizer, callbacks=given)
made.train()
found = [one for one in made.callback_handler.callbacks if isinstance(one, ZFTuneCallback)]
print(len(found), found[0].tuner is not None, "zenflow_topk_ratio" in str(made.state.log_history))
"""


@pytest.mark.parametrize("given", fast(["none"], all_of=["given", "none"]))
def test_a_trainer_gets_the_callback_once(folder: Path, given: str) -> None:
    pytest.importorskip("transformers", reason="transformers is not installed")
    (folder / "trainer.py").write_text(TRAINER)
    done = run(folder, "--online", "--", "trainer.py", given, PYTHONPATH=str(Path(__file__).parents[3]))
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "1 True True"
    assert done.stderr.count(" with quality ") == 1


@pytest.mark.smoke
def test_knobs_that_do_not_fit_end_it_with_a_sentence(folder: Path) -> None:
    changes = {"zftune_schedule": 1, "steps": [{"after_step": 5, "knobs": {"apply_lag": 9}}]}
    (folder / "schedule.json").write_text(json.dumps(changes))
    done = run(folder, "--schedule", "schedule.json", "--", "train.py", "12", "0")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.splitlines()[-1].endswith(
        "schedule.json', after step 5: apply_lag is 9; it must be an integer from 1 to update_interval (4), or none"
    )
    assert "Traceback" not in done.stderr


def test_without_a_daemon_the_training_runs(folder: Path) -> None:
    (folder / "z.sock").mkdir()  # no socket can be there, and nobody may remove it
    done = run(folder, "--online", "--", "train.py", "30", "0")
    (folder / "z.sock").rmdir()
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("30 ")
    assert done.stderr.count("Tuning waits for a daemon: the private daemon ended at once (") == 1


def test_where_no_socket_can_be_the_training_runs(folder: Path) -> None:
    done = run(folder, "--online", "--", "train.py", "30", "0", ZFTUNE_SOCKET=str(folder / (120 * "x")))
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("30 ")
    assert done.stderr.count("Nothing is tuned: ") == 1
    assert "Traceback" not in done.stderr
