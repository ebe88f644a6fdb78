"""`zftune run` on what never calls `deepspeed.initialize`: one sentence at the end, whatever processes there were."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests import zygote
from tests.tiers import by_day
from zftune.agent.bootstrap import sitecustomize

SENTENCE = "zftune: no call of deepspeed.initialize came, so nothing was changed: "
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
BARE = sys.base_prefix + "/bin/python3"
"""A Python without zftune."""
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
    command = words if words[0] in ("bash", "env", BARE) else (sys.executable, *words)
    return zygote.zftune(
        "run", "--", *command, timeout=60, env={**os.environ, "PYTHONPATH": str(folder), **env}, cwd=folder
    )


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
    "torchrun's own usage error": (("-m", "torch.distributed.run", "--nosuch", "plain.py"), 2),
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


LOOP = "for a plain loop use one line: "
PLAIN = f"{sys.executable} plain.py"
# Not by the finder of an editable install, which comes before the folder.
BY_PATH = 'import sys; sys.meta_path[:] = [one for one in sys.meta_path if not hasattr(one, "known_source_files")]'
BEHIND = {
    "no Python": ("echo trained", sitecustomize.NO_PYTHON),
    "a PYTHONPATH that is cleared": (f"env -u PYTHONPATH {PLAIN}; true", sitecustomize.NO_PYTHON),
    "no torch": (f"{PLAIN}; true", sitecustomize.NO_TORCH),
    "torch": (f"{sys.executable} -c 'import torch'; {PLAIN}", LOOP),
    "the Trainer": (f"{sys.executable} -c 'import torch, transformers.trainer'; true", sitecustomize.OF_TRAINER),
    "a loop of zenflow's": (f"{sys.executable} -c '{BY_PATH}; import torch, zenflow'; true", "--online tunes them"),
    "no zftune": (f"{BARE} -c 'import torch'; true", sitecustomize.NO_ZFTUNE),
}


@pytest.mark.parametrize("name", by_day(["no torch", "torch", "the Trainer", "no zftune"], all_of=list(BEHIND)))
def test_behind_a_wrapper_it_is_said_why(folder: Path, name: str) -> None:
    """What is trained with is looked for by its name alone."""
    code, why = BEHIND[name]
    (folder / "transformers").mkdir()
    for module in ("torch", "zenflow", "transformers/__init__", "transformers/trainer"):
        (folder / f"{module}.py").touch()
    done = run(folder, "bash", "-c", code)
    assert (done.returncode, done.stderr.count("\n")) == (0, 1), done.stderr
    assert done.stderr.startswith(SENTENCE)
    assert why in done.stderr
    assert (LOOP in done.stderr) == (why == LOOP)  # who has an optimizer of zenflow is not told to make one


def test_what_goes_on_in_the_background_is_not_judged(folder: Path) -> None:
    done = run(folder, "bash", "-c", "sleep 60 > /dev/null 2>&1 &")
    assert (done.returncode, done.stderr) == (0, sitecustomize.GOES_ON)


def test_a_python_that_takes_up_nothing_is_a_wrapper(folder: Path) -> None:
    done = run(folder, "-I", "plain.py")
    assert (done.returncode, done.stdout) == (0, "trained\n")
    assert sitecustomize.NO_PYTHON in done.stderr


def test_it_ends_as_the_wrapper_does(folder: Path) -> None:
    assert run(folder, "bash", "-c", "kill -TERM $$").returncode == -signal.SIGTERM
    code = "trap 'echo got; exit 5' TERM; touch ready; while :; do sleep 0.05; done"
    env = {**os.environ, "PYTHONPATH": str(folder)}
    with (folder / "log").open("wb") as log:
        begun = zygote.Forked(["-c", zygote.MAIN, "run", "--", "bash", "-c", code], env=env, cwd=folder, log=log)
        try:
            until_s = time.monotonic() + 60
            while not (folder / "ready").exists():
                assert time.monotonic() < until_s
                time.sleep(0.02)
            begun.send_signal(signal.SIGTERM)  # to it alone, as by a scheduler
            assert begun.wait(60) == 5
        finally:
            begun.kill()
            begun.close()
    assert (folder / "log").read_text() == "got\n"


@pytest.mark.parametrize(
    ("notes", "asked", "said"),
    [
        ("pt", {"online": True}, "nothing was tuned: no zenflow optimizer took a step; in a plain loop make one: "),
        ("pth", {"online": True}, f"nothing was tuned: .* took a step; {re.escape(sitecustomize.OF_TRAINER)}"),
        ("pth", {}, f"{SENTENCE}.*, without DeepSpeed {re.escape(sitecustomize.OF_TRAINER)}"),
        ("ptz", {"online": True}, "nothing was tuned: no zenflow optimizer took a step; zenflow was imported"),
        ("", {"schedule": "x"}, f"nothing was replayed: .* took a step; {re.escape(sitecustomize.NO_PYTHON)}"),
        ("p", {"export_schedule": "x"}, f"no schedule was written: .* took a step; {sitecustomize.NO_TORCH}"),
        ("pts", {"online": True}, ""),
        ("ptc", {"preset": "best"}, ""),
        ("pl", {}, ""),
        ("plrt", {}, SENTENCE),
    ],
)
def test_the_words(notes: str, asked: dict[str, object], said: str) -> None:
    found = sitecustomize.missed(notes.encode(), asked)
    assert found.count("\n") == (said != "")
    assert re.match(said and f"(zftune: )?{said}", found)
    assert (found == "") == (said == "")


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


@pytest.mark.parametrize(("script", "times"), by_day([("plain.py", 1)], all_of=[("plain.py", 1), ("calls.py", 0)]))
def test_torchrun_says_it_for_its_ranks(folder: Path, script: str, times: int) -> None:
    done = run(folder, *TORCHRUN, script, OMP_NUM_THREADS="1")
    assert done.returncode == 0, done.stderr
    assert done.stderr.count(SENTENCE) == times


def test_the_line_that_it_names_works() -> None:
    line = sitecustomize.missed(b"pt", {}).partition("use one line: ")[2]
    scope: dict[str, object] = {}
    exec("import torch, zenflow; model = torch.nn.Linear(2, 2)", scope)
    exec(line, scope)
    assert "optimizer" in scope
    scope["optimizer"].close()  # type: ignore[attr-defined]
