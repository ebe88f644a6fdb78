"""`zftune run -- CMD` is CMD: its exit code, signals, streams and terminal; only DeepSpeed finds something new."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.tiers import by_day

ZFTUNE = [str(Path(sys.executable).with_name("zftune"))]
PYTHON = sys.executable


def run(*command: object, options: tuple[str, ...] = (), **more: Any) -> subprocess.CompletedProcess[str]:
    """Run a command under `zftune run`."""
    environment = {**os.environ, **more.pop("env", {})}
    words = [*ZFTUNE, "run", *options, "--", *map(str, command)]
    return subprocess.run(words, env=environment, capture_output=True, text=True, check=False, timeout=90, **more)


@pytest.fixture
def fake(tmp_path: Path) -> Path:
    """A folder with a module `deepspeed` that says whether it was wrapped."""
    (tmp_path / "deepspeed.py").write_text(
        '__version__ = "0.19.6"\n'
        "def initialize(args=None, model=None, optimizer=None, config=None):\n"
        '    return "plain"\n'
    )
    return tmp_path


@pytest.mark.parametrize("code", by_day([0, 77], all_of=[0, 1, 2, 77, 255]))
def test_the_exit_code_is_the_commands(code: int) -> None:
    done = run(PYTHON, "-c", f"import sys; print('out'); print('err', file=sys.stderr); sys.exit({code})")
    assert (done.returncode, done.stdout) == (code, "out\n")
    said, rest = done.stderr.split("zftune: no call of deepspeed.initialize came, ")  # test_run_nothing.py
    assert (said, rest.count("\n")) == ("err\n", 1)


@pytest.mark.parametrize(
    "name", by_day(["SIGKILL", "SIGINT"], all_of=["SIGKILL", "SIGTERM", "SIGINT", "SIGSEGV", "SIGHUP"])
)
def test_a_signal_that_ends_it_is_seen_as_its_own(name: str) -> None:
    number = signal.Signals[name]
    done = run(PYTHON, "-c", f"import os, signal; signal.signal({int(number)}, 0) if {int(number)} != 9 else 0; "
               f"os.kill(os.getpid(), {int(number)})")  # fmt: skip
    assert done.returncode == -number


def test_it_is_the_same_process() -> None:
    script = "import os; print(os.getpid())"
    started = subprocess.Popen([*ZFTUNE, "run", "--", PYTHON, "-c", script], stdout=subprocess.PIPE, text=True)
    out, _ = started.communicate(timeout=60)
    assert int(out) == started.pid


def test_a_pipe_that_is_closed_ends_it_as_in_a_shell() -> None:
    words = " ".join([*ZFTUNE, "run", "--", "yes"])
    done = subprocess.run(
        ["bash", "-c", f"{words} | head -1; exit ${{PIPESTATUS[0]}}"], capture_output=True, check=False
    )
    assert done.stdout == b"y\n"
    assert done.returncode == 128 + signal.SIGPIPE


def test_ctrl_c_goes_to_the_command_alone() -> None:
    wait = (
        "try:\n    print('ready', flush=True)\n    time.sleep(60)\nexcept KeyboardInterrupt:\n    raise SystemExit(5)"
    )
    script = f"import time\n{wait}"
    started = subprocess.Popen([*ZFTUNE, "run", "--", PYTHON, "-c", script], stdout=subprocess.PIPE, text=True)
    assert started.stdout is not None
    assert started.stdout.readline() == "ready\n"
    started.send_signal(signal.SIGINT)
    assert started.wait(30) == 5
    started.stdout.close()


def test_it_has_the_terminal() -> None:
    ours, theirs = pty.openpty()
    script = "import os, sys; print(sys.stdin.isatty(), sys.stdout.isatty(), input())"
    started = subprocess.Popen([*ZFTUNE, "run", "--", PYTHON, "-c", script], stdin=theirs, stdout=theirs, stderr=theirs)
    os.close(theirs)
    os.write(ours, b"typed\n")
    assert started.wait(60) == 0
    said = b""
    with contextlib.suppress(OSError):  # where nobody has the terminal any more, its end is one
        while part := os.read(ours, 4096):
            said += part
    assert b"True True typed" in said
    os.close(ours)


def test_deepspeed_is_wrapped_once_it_is_imported(fake: Path) -> None:
    script = "import deepspeed; print(hasattr(deepspeed.initialize, '__zftune_original__'), deepspeed.initialize())"
    done = run(PYTHON, "-c", script, env={"PYTHONPATH": str(fake)})
    assert done.stdout == "True plain\n", done.stderr


def test_zftune_disable_leaves_everything_alone(fake: Path) -> None:
    script = (
        "import deepspeed, os; print(hasattr(deepspeed.initialize, '__zftune_original__'), 'ZFTUNE_RUN' in os.environ)"
    )
    done = run(PYTHON, "-c", script, env={"PYTHONPATH": str(fake), "ZFTUNE_DISABLE": "1"})
    assert done.stdout == "False False\n", done.stderr


def test_a_python_without_zftune_runs_untouched_and_says_so(fake: Path) -> None:
    script = "import deepspeed; print(deepspeed.initialize())"
    done = run(PYTHON, "-S", "-c", f"import sys; sys.path.insert(0, {str(fake)!r}); {script}")
    assert done.stdout == "plain\n"  # -S: no site, no sitecustomize
    bare = Path(sys.base_prefix) / "bin" / "python3"
    done = run(bare, "-c", script, env={"PYTHONPATH": str(fake)}, cwd=fake)
    assert done.stdout == "plain\n", done.stderr
    assert "zftune: this Python has no zftune" in done.stderr
    assert done.stderr.count("\n") == 1


def test_ranks_beyond_the_first_are_silent(fake: Path) -> None:
    bare = Path(sys.base_prefix) / "bin" / "python3"
    done = run(bare, "-c", "import deepspeed", env={"PYTHONPATH": str(fake), "RANK": "1"}, cwd=fake)
    assert (done.returncode, done.stderr) == (0, "")


BAD: list[tuple[tuple[str, ...], dict[str, Any] | None, str]] = [
    (("--backend", "torch"), None, "--backend is 'torch'; it must be zenflow or deepspeed"),
    (("--quality", "best"), None, "--quality is 'best'; it must be exact, published or loose"),
    (("--preset", "mine"), None, "preset 'mine' is not in the store, which has no presets yet: `zftune tune`"),
    (("--fresh",), None, "--fresh needs --online, whose search begins anew then"),
    (("--preset", "./mine.json"), None, "mine.json"),
    (
        (),
        {"zftune": {"preset": "theirs"}},
        "preset 'theirs' is not in the store, which has no presets yet: `zftune tune`",
    ),
    ((), {"zftune": {"online": 1}}, "zftune.online is 1; it must be true or false"),
]


@pytest.mark.parametrize(
    ("options", "config", "sentence"),
    by_day(BAD[::3], all_of=BAD),
)
def test_bad_input_is_known_before_anything_starts(
    tmp_path: Path, options: tuple[str, ...], config: Any, sentence: str
) -> None:
    file = tmp_path / "ds_config.json"
    file.write_text(json.dumps(config or {}))
    done = run(
        PYTHON, "-c", "print('started')", "--deepspeed", file,
        options=options, env={"ZFTUNE_DB": str(tmp_path / "z.db")}, cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode == 2
    assert done.stdout == ""
    assert sentence in done.stderr
    assert done.stderr.count("\n") == 1


def test_fresh_is_said_to_whoever_attaches(tmp_path: Path) -> None:
    nowhere = {"ZFTUNE_SOCKET": str(tmp_path / (120 * "x")), "ZFTUNE_DB": str(tmp_path / "z.db")}
    code = "import os; print(os.environ.get('ZFTUNE_FRESH'), os.environ['ZFTUNE_ONLINE'])"
    for options, said in ((("--online", "--fresh"), "1 daemon\n"), (("--online",), "None daemon\n")):
        assert run(PYTHON, "-c", code, options=options, env=nowhere).stdout == said


@pytest.mark.parametrize(
    ("command", "sentence"),
    [
        (("no-such-program",), "CMD 'no-such-program' cannot be run (No such file or directory)"),
        (("/",), "CMD '/' cannot be run (Permission denied)"),
        ((), "CMD is missing: give a program with its arguments, such as: -- python train.py"),
    ],
)
def test_a_command_that_cannot_be_run(command: tuple[str, ...], sentence: str) -> None:
    done = run(*command)
    assert done.returncode == 2
    assert sentence in done.stderr
