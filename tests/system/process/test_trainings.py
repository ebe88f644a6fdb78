"""Real training with torch and the agent, by scripts and interpreters that make it hard."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.process.fixtures import LIB, PYTHON, Profiled, Run
from tests.support.tiers import fast

TRAINED = b"trained 9\n"
OPTIONS = ("--warmup", 2)
IMPORTS = "import os, signal, sys, threading, training\n"


def measured(ended: Profiled, steps: int = 5) -> None:
    assert ended.document is not None, ended.err
    assert ended.document["steps"]["measured"] == steps
    assert ended.document["workload"]["parameters"] == 72


HARD = {
    "plain": ("training.train()", 0, 5),
    "raise": ("training.train(at={5: lambda: 1 / 0})", 1, 4),
    "_exit": ("training.train(at={8: lambda: os._exit(3)})", 3, 5),
    "kill": ("training.train(at={6: lambda: training.kill(9)})", 137, 3),
    "chdir": ("training.train(at={1: lambda: os.chdir('/')})", 0, 5),
    "environ": ("training.train(at={1: lambda: (os.environ.clear(), sys.modules.pop('zftune', None))})", 0, 5),
    "meta-path": (
        "sys.meta_path[:] = [f for f in sys.meta_path if not hasattr(f, 'when_imported')]\ntraining.train()",
        0,
        0,
    ),
    "builtins": (
        "import builtins; training.train(at={1: lambda: builtins.__dict__.update(open=None, print=None)})",
        0,
        5,
    ),
    "fork": ("training.train(at={4: lambda: os.fork() or os._exit(0)})", 0, 5),
    "thread": ("worker = threading.Thread(target=training.train); worker.start(); worker.join()", 0, 5),
    "exec": ("os.environ['PYTHONPATH'] = ''; os.execv(sys.executable, [sys.executable, '-c', 'print(1)'])", 0, 0),
}


@pytest.mark.parametrize("name", fast(["fork"], all_of=list(HARD)))
def test_a_script_that_makes_it_hard(python: Run, name: str) -> None:
    code, exit_code, steps = HARD[name]
    ended = python(IMPORTS + code, options=OPTIONS).is_clean()
    assert ended.code == exit_code, ended.err
    if steps:
        measured(ended, steps)
    else:
        assert ended.document is None


FEW = [(1, 0, "ended after its first step"), (3, 5, "ended after 3 steps")]


@pytest.mark.parametrize(("steps", "warmup", "said"), fast(FEW[:1], all_of=FEW))
def test_too_few_steps(python: Run, steps: int, warmup: int, said: str) -> None:
    ended = python(f"{IMPORTS}training.train({steps})", options=("--warmup", warmup)).is_clean()
    assert (ended.code, ended.document) == (0, None)
    ended.says(said)


def test_a_training_that_never_steps(python: Run) -> None:
    code = "import torch; layer = torch.nn.Linear(2, 2); layer(torch.ones(1, 2)).sum().backward()"
    ended = python(code).is_clean()
    assert (ended.code, ended.document) == (0, None)
    ended.says("no optimizer stepped")


@pytest.mark.parametrize("flag", fast(["-I"], all_of=["-I", "-E", "-S", "-Es", "-sI"]))
def test_an_interpreter_that_keeps_the_agent_out(profile: Run, flag: str) -> None:
    ended = profile(PYTHON, flag, "-c", "print('ran')").is_clean()
    assert (ended.code, ended.out, ended.document) == (0, b"ran\n", None)
    ended.says("so zftune's agent cannot start")


SITECUSTOMIZE: dict[str, tuple[str, bytes | None]] = {
    "good": ("import builtins; builtins.theirs = 7", b"7\n"),
    "prints": ("print('from theirs')", b"from theirs\nnone\n"),
    "raises": ("raise RuntimeError('theirs is broken')", b"none\n"),
    "import": ("import nonesuch_module", b"none\n"),
    "exits": ("import sys; sys.exit(0)", None),
    "syntax": ("this is no python", b"none\n"),
}
"""Of a user, and what the training then prints; None: it does not begin."""


@pytest.mark.parametrize("kind", fast(["good", "raises"], all_of=list(SITECUSTOMIZE)))
def test_a_sitecustomize_of_the_users(profile: Run, tmp_path: Path, kind: str) -> None:
    text, seen = SITECUSTOMIZE[kind]
    folder = tmp_path / "site"
    folder.mkdir()
    # zftune is Python too, and has one of the user's as well: only the command's own start counts here.
    (folder / "sitecustomize.py").write_text(f"import os\nif 'ZFTUNE_AGENT_DIR' in os.environ:\n    {text}\n")
    env = {"PYTHONPATH": f"{folder}:{LIB}"}
    code = "import builtins, steps; steps.train(); print(getattr(builtins, 'theirs', 'none'))"
    alone = subprocess.run([PYTHON, "-c", code], env={**env, "ZFTUNE_AGENT_DIR": str(tmp_path)}, capture_output=True)
    ended = profile(PYTHON, "-c", code, env=env)
    assert (ended.code, ended.out) == (alone.returncode, alone.stdout)
    if seen is None:
        assert ended.document is None
    else:
        assert ended.out == seen
        assert ended.document is not None
    # What Python itself says of theirs is the same, and nothing of ours is in it.
    assert [line for line in ended.err.splitlines() if "theirs is broken" in line] == [
        line for line in alone.stderr.decode().splitlines() if "theirs is broken" in line
    ]


@pytest.fixture(scope="module")
def other_python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An interpreter without packages, but for what passes for torch."""
    folder = tmp_path_factory.mktemp("other")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
    return folder / "bin" / "python"


@pytest.mark.smoke
def test_another_python_without_torch(profile: Run, other_python: Path) -> None:
    ended = profile(other_python, "-c", "print('ran')").is_clean()
    assert (ended.code, ended.out, ended.document) == (0, b"ran\n", None)
    ended.says("no optimizer of torch took a step")


@pytest.mark.parametrize("version", [None, "0.0.1"])
def test_another_python_without_this_zftune(
    profile: Run, other_python: Path, tmp_path: Path, version: str | None
) -> None:
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib" / "torch.py").write_text("")
    if version is not None:
        (tmp_path / "lib" / "zftune.py").write_text(f"__version__ = '{version}'")
    ended = profile(other_python, "-c", "import torch; print('ran')", env={"PYTHONPATH": str(tmp_path / "lib")})
    ended.is_clean()
    assert (ended.code, ended.out, ended.document) == (0, b"ran\n", None)
    ended.says("this Python has zftune 0.0.1" if version else "has no zftune")


def test_ranks_under_torchrun(profile: Run, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(f"{IMPORTS}training.train()")
    torchrun = Path(sys.executable).with_name("torchrun")
    ended = profile(torchrun, "--nproc-per-node", 2, "--standalone", "train.py", options=OPTIONS).is_clean()
    assert ended.code == 0, ended.err
    measured(ended)
    assert ended.document is not None
    assert [rank["rank"] for rank in ended.document["ranks"]] == [0, 1]
    assert ended.document["command"]["script"] == "train.py"
    assert ended.document["command"]["ranks"] == 2


def test_stop_under_torchrun(profile: Run, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(f"{IMPORTS}import time\ntraining.train(at={{8: lambda: time.sleep(100)}})")
    torchrun = Path(sys.executable).with_name("torchrun")
    command = (torchrun, "--nproc-per-node", 2, "--standalone", "train.py")
    ended = profile(*command, options=(*OPTIONS, "--stop"))
    assert ended.code == 0, ended.err
    measured(ended)
    assert ended.document is not None
    assert ended.document["command"]["stopped"]
    assert len(ended.document["ranks"]) == 2
    told = (
        "zftune: all steps are measured, ending the command; what torchrun prints of a signal from here on is its own"
    )
    said = ended.err.index(told)
    assert said < ended.err.index("SignalException")  # torchrun's own view of that
