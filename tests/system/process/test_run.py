"""`zftune run -- CMD` is CMD: its exit code, signals, streams and terminal; only DeepSpeed finds something new."""

from __future__ import annotations

import contextlib
import os
import pty
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support import fork_server, upstream_ops
from tests.support.tiers import fast
from zftune.agent.bootstrap import sitecustomize

ZFTUNE = [str(Path(sys.executable).with_name("zftune"))]
PYTHON = sys.executable
BARE = sys.base_prefix + "/bin/python3"
"""A Python without zftune."""
FAKE = "__version__ = '0.19.6'\ndef initialize(model=None, config=None): return 'plain'\n"
WRAPPED = "import deepspeed; print(hasattr(deepspeed.initialize, '__zftune_original__'), deepspeed.initialize())"
STEP = "import torch\ntorch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0).step()\n"
THE_LINE = (
    "optimizer = zenflow.ZenFlowSGD(model.parameters(), lr=1.0, momentum=0, dampening=0, weight_decay=0, "
    "nesterov=False, module=model)"
)
CALL = "import deepspeed\ndeepspeed.initialize()\n"


def begin(*command: str, **more: Any) -> subprocess.Popen[str]:
    return subprocess.Popen([*ZFTUNE, "run", "--", *command], text=True, **more)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "deepspeed.py").write_text(FAKE)
    return tmp_path


def run(folder: Path, *words: str, options: tuple[str, ...] = (), **env: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(folder), "OMP_NUM_THREADS": "1", **env}
    return fork_server.zftune("run", *options, "--", *words, env=environment, cwd=folder, timeout=120)


@pytest.mark.smoke
@pytest.mark.parametrize("code", fast([77], all_of=[0, 1, 77, 255]))
def test_it_is_the_same_process_with_the_commands_exit_code(code: int) -> None:
    script = f"import os, sys; print(os.getpid()); print('err', file=sys.stderr); sys.exit({code})"
    begun = begin(PYTHON, "-c", script, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    out, err = begun.communicate(timeout=60)
    assert (begun.returncode, int(out), err) == (code, begun.pid, "err\n")


@pytest.mark.smoke
@pytest.mark.parametrize("name", fast(["SIGTERM"], all_of=["SIGKILL", "SIGTERM", "SIGINT", "SIGSEGV", "SIGHUP"]))
def test_a_signal_that_ends_it_is_seen_as_its_own(name: str) -> None:
    """Behind a wrapper, too."""
    begun = begin("bash", "-c", f"kill -{name[3:]} $$")
    assert begun.wait(60) == -signal.Signals[name]


def test_a_pipe_that_is_closed_ends_it_as_in_a_shell() -> None:
    words = " ".join([*ZFTUNE, "run", "--", "yes"])
    done = subprocess.run(
        ["bash", "-c", f"{words} | head -1; exit ${{PIPESTATUS[0]}}"], capture_output=True, check=False
    )
    assert (done.stdout, done.returncode) == (b"y\n", 128 + signal.SIGPIPE)


@pytest.mark.smoke
def test_ctrl_c_goes_to_the_command_alone() -> None:
    wait = (
        "import time\ntry:\n    print('ready', flush=True)\n    time.sleep(60)\nexcept KeyboardInterrupt:\n    exit(5)"
    )
    begun = begin(PYTHON, "-c", wait, stdout=subprocess.PIPE)
    assert begun.stdout is not None
    assert begun.stdout.readline() == "ready\n"
    begun.send_signal(signal.SIGINT)
    assert begun.wait(30) == 5
    begun.stdout.close()


def test_it_has_the_terminal() -> None:
    ours, theirs = pty.openpty()
    script = "import sys; print(sys.stdin.isatty(), sys.stdout.isatty(), input())"
    begun = begin(PYTHON, "-c", script, stdin=theirs, stdout=theirs, stderr=theirs)
    os.close(theirs)
    os.write(ours, b"typed\n")
    assert begun.wait(60) == 0
    said = b""
    with contextlib.suppress(OSError):  # where nobody has the terminal any more, its end is one
        while part := os.read(ours, 4096):
            said += part
    assert b"True True typed" in said
    os.close(ours)


@pytest.mark.smoke
@pytest.mark.parametrize(
    ("command", "out", "err"),
    [
        ((PYTHON, "-c", WRAPPED), "True plain\n", ""),
        (("bash", "-c", f'{PYTHON} -c "{WRAPPED}"'), "True plain\n", ""),
        ((PYTHON, "-I", "-c", "print('untouched')"), "untouched\n", ""),
        ((BARE, "-c", WRAPPED), "False plain\n", "zftune: this Python has no zftune"),
    ],
    ids=["python", "a wrapper", "a Python that ignores it", "a Python without zftune"],
)
def test_who_is_reached(folder: Path, command: tuple[str, ...], out: str, err: str) -> None:
    done = run(folder, *command)
    assert (done.returncode, done.stdout) == (0, out), done.stderr
    assert done.stderr.startswith(err)
    assert done.stderr.count("\n") == (err != "")


@pytest.mark.smoke
def test_zftune_disable_leaves_everything_alone(folder: Path) -> None:
    """The "zftune" section of a ds_config is not read either."""
    (folder / "ds.json").write_text('{"zftune": {"quality": "best"}}')
    words = (PYTHON, "-c", f"{WRAPPED}; import os; print('ZFTUNE_RUN' in os.environ)", "--deepspeed", "ds.json")
    done = run(folder, *words, options=("--online",), ZFTUNE_DISABLE="1", ZFTUNE_SOCKET=str(folder / "z.sock"))
    assert (done.returncode, done.stdout, done.stderr) == (0, "False plain\nFalse\n", "")
    assert run(folder, *words, ZFTUNE_DISABLE="0").returncode == 2
    assert not (folder / "z.sock.log").exists()


@pytest.mark.smoke
def test_every_rank_of_torchrun_is_reached(folder: Path) -> None:
    """One of them speaks for all."""
    reached = "import deepspeed, os\nopen(os.environ['RANK'], 'w').write(deepspeed.initialize.__zftune_original__())\n"
    (folder / "train.py").write_text(reached + STEP)
    launch = (PYTHON, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    done = run(folder, *launch, "train.py")
    assert done.returncode == 0, done.stderr
    assert [(folder / rank).read_text() for rank in "01"] == ["plain", "plain"]
    assert done.stderr.count(sitecustomize.NOTHING + THE_LINE) == 1


IN_A_CHILD = f"""import multiprocessing
child = multiprocessing.get_context('fork').Process(target=exec, args=({STEP!r}, {{}}))
child.start()
child.join()"""
TOLD: dict[str, tuple[str, str, str]] = {
    "a loop of its own": ("", STEP, sitecustomize.NOTHING),
    "what steps first": ("", STEP + CALL, sitecustomize.NOTHING),
    "tuned": ("--online", STEP, "zftune: nothing is tuned: the first step was SGD's"),
    "replayed": ("--schedule s.json", STEP, "zftune: nothing is replayed: the first step was SGD's"),
    "recorded": ("--export-schedule o.json", CALL + STEP, "zftune: no schedule is written: the first step was SGD's"),
    "DeepSpeed": ("", CALL + STEP, ""),
    "nothing trains": ("--online", "import torch", ""),
    "a process of multiprocessing": ("", IN_A_CHILD, ""),
}


@pytest.mark.smoke
@pytest.mark.parametrize("name", fast(["a loop of its own", "tuned", "DeepSpeed"], all_of=list(TOLD)))
def test_why_nothing_comes_of_it_is_told_at_the_first_step(folder: Path, name: str) -> None:
    options, code, told = TOLD[name]
    (folder / "s.json").write_text('{"zftune_schedule": 1, "steps": []}')
    own = {"ZFTUNE_SOCKET": str(folder / (120 * "x")), "ZFTUNE_DB": str(folder / "z.db")}
    done = run(folder, PYTHON, "-c", f"{code}\nprint('trained')", options=tuple(options.split()), **own)
    assert (done.returncode, done.stdout) == (0, "trained\n"), done.stderr
    lines = [line for line in done.stderr.splitlines() if "until there is a daemon" not in line]
    assert len(lines) == (told != "")
    assert all(line.startswith(told) and line.endswith(THE_LINE) for line in lines)
    assert not (folder / "o.json").exists()


@pytest.mark.smoke
def test_ranks_beyond_the_first_are_silent(folder: Path) -> None:
    assert run(folder, PYTHON, "-c", STEP, RANK="1").stderr == ""
    assert run(folder, BARE, "-c", "import deepspeed", RANK="1").stderr == ""


@pytest.mark.smoke
@pytest.mark.parametrize(
    ("code", "told"),
    [
        ("from zftune.errors import BadInputError\nraise BadInputError('stage is 9')", "zftune: stage is 9\n"),
        (
            "deepspeed.initialize(model=object(), config='folder/no.json')",
            "zftune: ds_config 'folder/no.json': there is no such file\n",
        ),
    ],
    ids=["by us", "a file that DeepSpeed would take for base64"],
)
def test_what_is_refused_while_it_runs_is_a_sentence_and_2(folder: Path, code: str, told: str) -> None:
    done = run(folder, PYTHON, "-c", f"import deepspeed\n{code}")
    assert (done.returncode, done.stderr) == (2, told)


ZERO = """
import os, socket, sys
import deepspeed, torch
with socket.socket() as free:
    free.bind(("127.0.0.1", 0))
    port = str(free.getsockname()[1])
os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=port, RANK="0", LOCAL_RANK="0", WORLD_SIZE="1")

def engine(zero):
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "zero_optimization": {"stage": 2, **zero},
    }
    model = torch.nn.Linear(8, 8)
    return deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)[0]

plain = engine({"reduce_bucket_size": 1000, "allgather_bucket_size": 1000})
plain.save_checkpoint("saved")
ours = engine({"offload_optimizer": {"device": "cpu"}})
try:
    ours.load_checkpoint("saved")
finally:
    print("the script's own finally")
"""


@pytest.mark.smoke
def test_a_checkpoint_of_zero_is_refused_in_a_sentence(tmp_path: Path) -> None:
    upstream_ops.need()
    done = run(tmp_path, PYTHON, "-c", ZERO, options=(), **upstream_ops.environment())
    assert done.returncode == 2, done.stderr[-2000:]
    assert "Traceback" not in done.stderr
    assert "the script's own finally" in done.stdout
    (sentence,) = [line for line in done.stderr.splitlines() if line.startswith("zftune: the checkpoint")]
    assert "zftune checkpoint import" in sentence
