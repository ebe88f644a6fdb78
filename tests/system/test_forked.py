from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.support import forked


def test_torch_alone_has_been_imported() -> None:
    done = forked.run(
        "import sys; print(*(name in sys.modules for name in ('torch', 'zenflow', 'triton', 'deepspeed')))"
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "True False False False\n", "")


def test_scripts_see_nothing_of_each_other() -> None:
    first = "import os, torch; torch.set_num_threads(1); os.environ['LEFT'] = 'here'; left = 1; sys = 2"
    assert forked.run(first).returncode == 0
    second = "import os, torch; print(os.environ.get('LEFT'), 'left' in globals(), 'sys' in globals())"
    assert forked.run(second).stdout == "None False False\n"


def test_the_environment_is_the_one_that_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GIVEN", "before")
    shown = "import os; print(os.environ.get('GIVEN'))"
    assert forked.run(shown).stdout == "before\n"
    assert forked.run(shown, environment={**os.environ, "GIVEN": "now"}).stdout == "now\n"
    assert forked.run(shown, environment={}).stdout == "None\n"


def test_a_script_ends_as_python_does() -> None:
    script = "import atexit, sys; atexit.register(lambda: print('last')); print('first'); sys.exit({end})"
    assert (done := forked.run(script.format(end=3))).returncode == 3
    assert done.stdout == "first\nlast\n"
    done = forked.run(script.format(end="'why'"))
    assert (done.returncode, done.stderr) == (1, "why\n")
    assert forked.run("import os; os.kill(os.getpid(), 9)").returncode == -9
    done = forked.run("1 / 0")
    assert done.returncode == 1
    assert done.stderr.endswith("ZeroDivisionError: division by zero\n")


def test_warnings_are_errors_unless_they_are_asked_for() -> None:
    script = "import warnings; warnings.warn('look')"
    assert "UserWarning: look" in forked.run(script).stderr
    assert forked.run(script).returncode == 1
    assert forked.run(script, warnings="ignore").returncode == 0


def test_a_script_that_does_not_end_is_killed_and_others_still_run() -> None:
    with pytest.raises(subprocess.TimeoutExpired):
        forked.run("import time; time.sleep(1000)", timeout_s=0.5)
    assert forked.run("print(1)").stdout == "1\n"


@pytest.mark.skipif(sys.platform != "linux", reason="threads are counted in /proc")
def test_there_are_no_threads() -> None:
    assert forked.run("import os; print(len(os.listdir('/proc/self/task')))").stdout == "1\n"
