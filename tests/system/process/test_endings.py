"""However the command ends: its exit code is kept, and what was measured is reported."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from tests.support.process.fixtures import PYTHON, Run
from tests.support.tiers import fast

SIGNALS = ["SIGKILL", "SIGTERM", "SIGINT", "SIGSEGV", "SIGABRT", "SIGHUP", "SIGPIPE", "SIGUSR1"]
STEPS = "import steps; steps.train(); "
CUT = "import steps; steps.train(4, end=None); "
NOTHING = "pass; "


@pytest.mark.smoke
@pytest.mark.parametrize("code", fast([3], all_of=[0, 1, 2, 3, 77, 126, 127, 130, 255]))
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


@pytest.mark.smoke
@pytest.mark.parametrize("name", fast(["SIGTERM"], all_of=SIGNALS))
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


ODD = {
    "_exit": ("import os; os._exit(9)", 9),
    "exec": ("import os; os.execvp('sh', ['sh', '-c', 'exit 6'])", 6),
    "raise": ("raise RuntimeError('in the middle')", 1),
    "interrupt": ("raise KeyboardInterrupt", 130),
    "abort": ("import os; os.abort()", 134),
    "thread": ("import threading, os, time; threading.Timer(0.1, os._exit, (5,)).start(); time.sleep(60)", 5),
    "trace": ("import sys; sys.settrace(lambda *a: 1/0)\ndef g(): pass\ng()", 1),
}


@pytest.mark.parametrize("name", fast(["_exit"], all_of=list(ODD)))
def test_an_odd_end_after_the_steps(python: Run, name: str) -> None:
    code, expected = ODD[name]
    ended = python(f"{STEPS}\n{code}").is_clean()
    assert ended.code == expected
    assert ended.document is not None
    assert ended.document["steps"]["measured"] == 5


UNFIT = {
    "no-such-program": "No such file or directory",
    "./folder": "Permission denied",
    "./not-executable/below": "Not a directory",
    "./bad-interpreter": "No such file or directory",
    "x" * 300: "File name too long",
    "": "Permission denied",
    "./loop": "Too many levels of symbolic links",
}


@pytest.mark.smoke
@pytest.mark.parametrize("program", fast(["no-such-program"], all_of=list(UNFIT)))
def test_what_cannot_be_run_is_a_sentence(profile: Run, tmp_path: Path, program: str) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "not-executable").write_text("#!/bin/sh\n")
    (tmp_path / "bad-interpreter").write_text("#!/no/such/interpreter\n")
    (tmp_path / "bad-interpreter").chmod(0o755)
    (tmp_path / "loop").symlink_to("loop")
    ended = profile(program).is_clean()
    assert ended.code == 2
    (sentence,) = ended.sentences
    assert UNFIT[program] in sentence
    assert "it cannot be run (" in sentence


def test_a_script_without_its_first_line_runs_as_in_a_shell(profile: Run, tmp_path: Path) -> None:
    script = tmp_path / "train.sh"
    script.write_text(f"{PYTHON} -c 'import steps; steps.train()'\nexit 4\n")
    script.chmod(0o755)
    ended = profile(script).is_clean()
    assert (ended.code, ended.document is not None) == (4, True)
