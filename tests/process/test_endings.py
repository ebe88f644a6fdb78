"""However the command ends: its exit code is kept, and what was measured is reported."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from tests.process.conftest import PYTHON, Run
from tests.tiers import by_day

SIGNALS = ["SIGKILL", "SIGTERM", "SIGINT", "SIGSEGV", "SIGABRT", "SIGHUP", "SIGPIPE", "SIGUSR1"]
STEPS = "import steps; steps.train(); "
CUT = "import steps; steps.train(4, end=None); "
NOTHING = "pass; "


@pytest.mark.parametrize("code", by_day([0, 3, 255], all_of=[0, 1, 2, 3, 77, 126, 127, 130, 255]))
@pytest.mark.parametrize("before", [STEPS, NOTHING], ids=["measured", "nothing"])
def test_the_exit_code_is_the_commands(python: Run, before: str, code: int) -> None:
    ended = python(f"{before}import sys; sys.exit({code})").is_clean()
    assert ended.code == code
    assert (ended.document is not None) == (before is STEPS)
    if ended.document is not None:
        assert ended.document["command"]["exit_code"] == code
        assert ended.document["steps"] == {"measured": 5, "discarded": 1}
    elif code:
        ended.says(f"the command ended with exit code {code} before a training step ended")


@pytest.mark.parametrize("name", by_day(["SIGKILL", "SIGTERM", "SIGSEGV"], all_of=SIGNALS))
@pytest.mark.parametrize("before", [CUT, NOTHING], ids=["measured", "nothing"])
def test_a_killed_command(python: Run, before: str, name: str) -> None:
    number = signal.Signals[name]
    die = f"import os, signal; signal.signal({number}, signal.SIG_DFL); " if name != "SIGKILL" else "import os; "
    ended = python(f"{before}{die}os.kill(os.getpid(), {number})").is_clean()
    assert ended.code == 128 + number
    if before is CUT:
        assert ended.document is not None
        assert ended.document["steps"]["measured"] == 3
        assert ended.document["command"]["exit_code"] == 128 + number
        ended.says("3 of 5 steps were measured")
    else:
        ended.says(f"killed by signal {int(number)}")


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ("import os; os._exit(9)", 9),
        ("raise RuntimeError('in the middle')", 1),
        ("raise KeyboardInterrupt", 130),
        ("import sys; sys.exit('a text')", 1),
        ("import os; os.abort()", 134),
        ("def f(): return f()\nf()", 1),
        ("import threading, os; threading.Timer(0.1, os._exit, (5,)).start(); import time; time.sleep(60)", 5),
        ("import os; os.execvp('sh', ['sh', '-c', 'exit 6'])", 6),
        ("import sys; sys.settrace(lambda *a: 1/0)\ndef g(): pass\ng()", 1),
    ],
    ids=["_exit", "raise", "interrupt", "text", "abort", "recursion", "thread", "exec", "trace"],
)
def test_an_odd_end_after_the_steps(python: Run, code: str, expected: int) -> None:
    ended = python(f"{STEPS}\n{code}").is_clean()
    assert ended.code == expected
    assert ended.document is not None
    assert ended.document["steps"]["measured"] == 5


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["no-such-program"], "No such file or directory"),
        (["./missing/program"], "No such file or directory"),
        (["/"], "Permission denied"),
        (["./folder"], "Permission denied"),
        (["./not-executable"], "Permission denied"),
        (["./not-executable/below"], "Not a directory"),
        (["./bad-interpreter"], "No such file or directory"),
        (["x" * 300], "File name too long"),
        ([""], "Permission denied"),
        (["./loop"], "Too many levels of symbolic links"),
    ],
    ids=["missing", "path", "root", "folder", "mode", "below", "interpreter", "long", "empty", "loop"],
)
def test_what_cannot_be_run_is_a_sentence(profile: Run, tmp_path: Path, arguments: list[str], reason: str) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "not-executable").write_text("#!/bin/sh\n")
    (tmp_path / "bad-interpreter").write_text("#!/no/such/interpreter\n")
    (tmp_path / "bad-interpreter").chmod(0o755)
    (tmp_path / "loop").symlink_to("loop")
    ended = profile(*arguments).is_clean()
    assert ended.code == 2
    (sentence,) = ended.sentences
    assert reason in sentence
    assert "it cannot be run (" in sentence


def test_a_script_without_its_first_line_runs_as_in_a_shell(profile: Run, tmp_path: Path) -> None:
    script = tmp_path / "train.sh"
    script.write_text(f"{PYTHON} -c 'import steps; steps.train()'\nexit 4\n")
    script.chmod(0o755)
    ended = profile(script).is_clean()
    assert (ended.code, ended.document is not None) == (4, True)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--json", "-"], ["--json '-'", "standard output is the command's", "a file"]),
        (["--json", "p", "--trace", "./p"], ["--trace './p'", "of --json too", "another"]),
        (["--steps", "abc"], ["--steps is 'abc'", "an integer"]),
        (["--json", "missing/x.json"], ["--json", "a folder that exists"]),
        (["--html", "missing/x.html"], ["--html", "a folder that exists"]),
        (["--trace", "-"], ["--trace '-'", "a file"]),
        (["--steps", "0"], ["--steps is 0", ">= 1"]),
        (["--warmup", "-1"], ["--warmup is -1", ">= 0"]),
        (["--with-baselines"], ["--with-baselines", "without a command"]),
        (["--topk-ratio", "0.5"], ["--topk-ratio '0.5'", "without a command"]),
        (["--model", "tiny"], ["--model 'tiny'", "without a command"]),
        (["--rig", "none"], ["--rig 'none'", "without a command"]),
    ],
    ids=lambda value: value[0] if isinstance(value, list) and value[0].startswith("--") else "",
)
def test_options_that_a_command_has_no_use_for_are_refused_before_it_runs(
    profile: Run, tmp_path: Path, options: list[str], words: list[str]
) -> None:
    ended = profile("touch", "it-ran", options=options)
    assert ended.code == 2
    (sentence,) = ended.sentences
    assert all(word in sentence for word in words), sentence
    assert not (tmp_path / "it-ran").exists()
