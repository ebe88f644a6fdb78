"""`zftune run` on what never calls `deepspeed.initialize`: one sentence at the end, whatever processes there were."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests import zygote
from zftune import agent

SENTENCE = "zftune: no call of deepspeed.initialize came, so nothing was changed: "
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
CALL = "import deepspeed; deepspeed.initialize()"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """With a package `deepspeed`, its launcher, and a script that calls it."""
    launcher = tmp_path / "deepspeed" / "launcher"
    launcher.mkdir(parents=True)
    (launcher / "__init__.py").touch()
    (launcher / "runner.py").write_text("EXPORT_ENVS = []")
    (tmp_path / "deepspeed" / "__init__.py").write_text(
        "__version__ = '0.19.6'\ndef initialize(model=None, config=None):\n    return 'plain'\n"
    )
    (tmp_path / "calls.py").write_text(CALL)
    (tmp_path / "plain.py").write_text("print('trained')")
    return tmp_path


def run(folder: Path, *words: str, **env: str) -> subprocess.CompletedProcess[str]:
    """`zftune run` with Python and these words, or with a program; `test_run.py` has what no fork shows."""
    command = words if words[0] in ("bash", "env") else (sys.executable, *words)
    return zygote.zftune("run", "--", *command, env={**os.environ, "PYTHONPATH": str(folder), **env}, cwd=folder)


def starts(script: str, rank: str = "0", end: str = "") -> str:
    """Code of a launcher."""
    environment = f"{{**os.environ, 'RANK': {rank!r}}}"
    return f"import os, subprocess, sys; subprocess.run([sys.executable, {script!r}], env={environment}); {end}"


PARALLEL = """
import multiprocessing, sys
def work(number): return number
if __name__ == "__main__":
    for way in ("fork", "spawn"):
        with multiprocessing.get_context(way).Pool(2) as pool:
            print(pool.map(work, range(3)))
    sys.exit(3)
"""
FORK = "import os, sys\nif os.fork():\n    os.wait()\nsys.exit(4)"
TOLD = {
    "plain": (("plain.py",), 0),
    "imported only": (("-c", "import deepspeed, sys; sys.exit(7)"), 7),
    "a launcher": (("-c", starts("plain.py", end="sys.exit(5)")), 5),
    "DeepSpeed's launcher": (("-c", "import deepspeed.launcher.runner; " + starts("plain.py", end="sys.exit(5)")), 5),
    "workers": (("parallel.py",), 3),
    "a fork": (("-c", FORK), 4),
    "a shell that ends with it": (("bash", "-c", f"exec {sys.executable} plain.py"), 0),
    "another program's word": (("env", "A=b", sys.executable, "plain.py"), 0),
}
SILENT = {
    "called": (("calls.py",), 0),
    "called by a rank": (("-c", starts("calls.py", "3")), 0),
    "called by a fork": (("-c", f"import os\nif os.fork():\n    os.wait()\nelse:\n    {CALL}"), 0),
    "its own error": (("-c", "import json; json.loads('{')"), 1),
    "interrupted": (("-c", "raise KeyboardInterrupt"), -2),
    "ranks on other machines": (("-c", "import deepspeed.launcher.runner, sys; sys.exit(6)"), 6),
    "not known": (("bash", "-c", f"{sys.executable} plain.py; exit 8"), 8),
    "closed files": (("-c", "import os; os.closerange(3, 256)"), 0),
    "closed stderr": (("-c", "import sys; sys.stderr.close(); sys.exit(9)"), 9),
}


@pytest.mark.parametrize("name", TOLD)
def test_it_is_said_once(folder: Path, name: str) -> None:
    words, code = TOLD[name]
    (folder / "parallel.py").write_text(PARALLEL)
    done = run(folder, *words)
    assert done.returncode == code, done.stderr
    assert done.stderr.count(SENTENCE) == 1
    assert done.stderr.startswith(SENTENCE)
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize("name", SILENT)
def test_it_is_not_said(folder: Path, name: str) -> None:
    words, code = SILENT[name]
    done = run(folder, *words)
    assert done.returncode == code, done.stderr
    assert SENTENCE not in done.stderr


def test_nor_by_a_rank_that_somebody_else_began(folder: Path) -> None:
    assert run(folder, "plain.py", RANK="1").stderr == ""
    assert SENTENCE in run(folder, "plain.py", RANK="0").stderr


def test_switched_off(folder: Path) -> None:
    assert run(folder, "plain.py", ZFTUNE_DISABLE="1").stderr == ""


@pytest.mark.parametrize(("script", "times"), [("plain.py", 1), ("calls.py", 0)])
def test_torchrun_says_it_for_its_ranks(folder: Path, script: str, times: int) -> None:
    done = run(folder, *TORCHRUN, script, OMP_NUM_THREADS="1")
    assert done.returncode == 0, done.stderr
    assert done.stderr.count(SENTENCE) == times


def test_the_line_that_it_names_works() -> None:
    source = (agent.BOOTSTRAP / "sitecustomize.py").read_text()
    line = source.partition("use one line: ")[2].partition("\\n")[0]
    scope: dict[str, object] = {}
    exec("import torch, zenflow; model = torch.nn.Linear(2, 2)", scope)
    exec(line, scope)
    assert "optimizer" in scope
    scope["optimizer"].close()  # type: ignore[attr-defined]
