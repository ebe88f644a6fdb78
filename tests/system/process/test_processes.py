"""Whatever the command leaves behind, and whoever is killed: nothing of it outlives the profile."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from tests.support.process.fixtures import PYTHON, Run, command_line, environment, is_running, wait_for
from tests.support.tiers import fast

# Each writes its own process number into the file, then does what its name says: for longer than a profile may take.
STAY = "open('stays', 'a').write(f'{os.getpid()}\\n'); time.sleep(600)"
LEAVE = {
    "fork": f"pid = os.fork()\nif pid == 0:\n    {STAY}",
    "daemon": f"if os.fork() == 0:\n    os.setsid()\n    if os.fork() == 0:\n        {STAY}\n    os._exit(0)",
    "deaf": f"if os.fork() == 0:\n    signal.signal(signal.SIGHUP, signal.SIG_IGN)\n    os.setsid()\n    {STAY}",
    "many": f"for _ in range(20):\n    if os.fork() == 0:\n        {STAY}",
    "stopped": "pid = os.fork()\nif pid == 0:\n    open('stays', 'a').write(f'{os.getpid()}\\n')\n"
    "    os.kill(os.getpid(), signal.SIGSTOP)",
    "shell": "subprocess.Popen(['sh', '-c', 'echo $$ >> stays; sleep 600 & wait'])",
    "session": "subprocess.Popen(['sh', '-c', 'echo $$ >> stays; exec sleep 600'], start_new_session=True)",
}
WAIT = "\nuntil = time.time() + 30\nwhile not os.path.exists('stays') and time.time() < until: time.sleep(0.01)\n"
IMPORTS = "import os, signal, subprocess, sys, time, steps\n"


def left(folder: Path) -> list[int]:
    return [int(line) for line in (folder / "stays").read_text().split()]


@pytest.mark.parametrize("kind", fast(["daemon", "stopped"], all_of=list(LEAVE)))
def test_what_is_left_behind_is_ended(python: Run, tmp_path: Path, kind: str) -> None:
    ended = python(f"{IMPORTS}steps.train()\n{LEAVE[kind]}\n{WAIT}sys.exit(3)").is_clean()
    assert ended.code == 3
    assert ended.document is not None
    assert not [pid for pid in left(tmp_path) if is_running(pid)]


def test_children_that_are_waited_for_are_left_alone(python: Run, tmp_path: Path) -> None:
    code = "subprocess.run([sys.executable, '-c', 'import time; time.sleep(1.5); open(\"done\", \"w\")'])"
    ended = python(f"{IMPORTS}steps.train()\n{code}").is_clean()
    assert (ended.code, (tmp_path / "done").exists()) == (0, True)


def test_a_rank_that_was_killed_is_missing_and_the_others_are_reported(python: Run) -> None:
    code = (
        "for rank in range(3):\n"
        "    if os.fork() == 0:\n"
        "        steps.train(6 if rank else 1, rank=rank, world=3, end='measured' if rank else None)\n"
        "        os.kill(os.getpid(), signal.SIGKILL if rank == 0 else signal.SIGCONT)\n"
        "        os._exit(0)\n"
        "[os.wait() for _ in range(3)]"
    )
    ended = python(IMPORTS + code).is_clean()
    assert ended.document is not None
    assert [rank["rank"] for rank in ended.document["ranks"]] == [1, 2]
    assert ended.document["command"]["ranks"] == 3
    ended.says("2 of 3 ranks were recorded here")


class Running:
    def __init__(self, folder: Path, code: str, *options: object) -> None:
        self.folder = folder
        self.json = folder / "profile.json"
        self.process = subprocess.Popen(
            command_line([PYTHON, "-c", IMPORTS + code], options, self.json),
            env=environment({}),
            cwd=folder,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def wait_for(self, name: str) -> str:
        file = self.folder / name
        wait_for(lambda: file.exists() and file.read_text().endswith("\n"))
        return file.read_text()

    def end(self) -> tuple[int, str, dict[str, Any] | None]:
        try:
            _, error = self.process.communicate(timeout=60)
        finally:
            self.process.kill()
        return self.process.returncode, error, json.loads(self.json.read_text()) if self.json.exists() else None


PIDS = "open('pids.tmp', 'w').write(f'{os.getpid()} {os.getppid()}\\n'); os.rename('pids.tmp', 'pids')\n"
DEAF = "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
GRANDCHILD = "grandchild = subprocess.Popen(['sleep', '100'])\nopen('stays', 'w').write(f'{grandchild.pid}\\n')\n"


@pytest.mark.smoke
@pytest.mark.parametrize(
    ("signum", "to"),
    fast(
        [(signal.SIGTERM, "profile"), (signal.SIGINT, "group")],
        all_of=list(product([signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT], ["profile", "group"])),
    ),
)
def test_a_signal_reaches_the_command_once_and_the_report_is_made(
    tmp_path: Path, signum: signal.Signals, to: str
) -> None:
    code = (
        "got = []\n"
        f"signal.signal({int(signum)}, lambda *_: got.append(1))\n"
        f"steps.train(4)\n{PIDS}"
        "until = time.monotonic() + 30\n"
        "while not got and time.monotonic() < until: time.sleep(0.01)\n"
        "time.sleep(0.5)\n"
        "sys.exit(40 + len(got))"
    )
    running = Running(tmp_path, code)
    running.wait_for("pids")
    (os.kill if to == "profile" else os.killpg)(running.process.pid, signum)
    code_, error, document = running.end()
    assert (code_, document is not None) == (41, True), error


@pytest.mark.smoke
@pytest.mark.parametrize("victim", ["profile", "keeper"])
def test_nothing_outlives_a_profile_that_was_killed(tmp_path: Path, victim: str) -> None:
    tell = "open('folder', 'w').write(os.environ['ZFTUNE_AGENT_DIR'] + '\\n')\n"
    running = Running(tmp_path, f"{DEAF}{tell}steps.train()\n{GRANDCHILD}{PIDS}time.sleep(100)")
    command, keeper = map(int, running.wait_for("pids").split())
    (grandchild,) = left(tmp_path)
    os.kill(running.process.pid if victim == "profile" else keeper, signal.SIGKILL)
    code, error, document = running.end()
    wait_for(lambda: not any(map(is_running, (command, keeper, grandchild))), 60)
    assert not Path(running.wait_for("folder").strip()).exists()
    if victim == "keeper":  # the profile itself goes on, and tells what it knows
        assert (code, document is not None) == (137, True), error
        assert "Traceback" not in error


def test_stop_ends_every_rank_after_its_steps(tmp_path: Path) -> None:
    code = (
        "print(os.environ['ZFTUNE_AGENT_STOP'], flush=True)\n"
        "for rank in range(2):\n"
        "    if os.fork() == 0:\n"
        "        steps.train(rank=rank, world=2)\n"
        "        time.sleep(100)\n"
        "time.sleep(100)"
    )
    running = Running(tmp_path, code, "--stop")
    ended, error, document = running.end()
    assert ended == 0, error
    assert document is not None
    assert (document["command"]["stopped"], document["command"]["exit_code"]) == (True, None)
    assert len(document["ranks"]) == 2


def test_stop_kills_what_does_not_end(tmp_path: Path) -> None:
    running = Running(tmp_path, f"{DEAF}steps.train()\n{GRANDCHILD}time.sleep(100)", "--stop")
    code, error, document = running.end()
    assert (code, document is not None) == (0, True), error
    assert not any(map(is_running, left(tmp_path)))


def test_stop_waits_for_a_rank_that_is_not_done(tmp_path: Path) -> None:
    code = (
        "if os.fork() == 0:\n"
        "    steps.train(rank=0, world=2)\n"
        "    time.sleep(100)\n"
        "time.sleep(2)\n"
        "steps.train(rank=1, world=2)\n"
        "time.sleep(100)"
    )
    ended, error, document = Running(tmp_path, code, "--stop").end()
    assert ended == 0, error
    assert document is not None
    assert [rank["rank"] for rank in document["ranks"]] == [0, 1]


def test_this_process_is_what_the_tests_take_it_for() -> None:
    assert is_running(os.getpid())
    gone = subprocess.Popen([sys.executable, "-c", "pass"])
    wait_for(lambda: not is_running(gone.pid))
    gone.wait()
