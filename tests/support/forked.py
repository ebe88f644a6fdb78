"""Processes for scripts that need torch and nothing else: one interpreter has imported it, and forks.

Imports (torch alone), environment, limits, threads and the end are as in an interpreter started for the script.
Trainings use `tests.support.fork_server`, which has imported everything.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import IO

_SERVER = """
import gc, json, os, sys, warnings
import torch
gc.collect()
gc.freeze()  # or every script would end with a search through all of torch
for line in sys.stdin:
    asked = json.loads(line)
    child = os.fork()
    if child == 0:
        break
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
else:
    sys.exit()
for number, name in enumerate((os.devnull, *asked["files"])):
    opened = os.open(name, os.O_RDWR)
    os.dup2(opened, number)
    os.close(opened)
os.environ.clear()
os.environ.update(asked["environment"])
warnings.simplefilter(asked["warnings"])
exec(compile(asked["script"], "<string>", "exec"), {"__name__": "__main__"})
"""
_AT_START = {"MALLOC_ARENA_MAX": "1", "OPENBLAS_NUM_THREADS": "1"}  # a script that limits its memory knows what it has

_server: subprocess.Popen[str] | None = None


def run(
    script: str, *, environment: Mapping[str, str] | None = None, warnings: str = "error", timeout_s: float = 120.0
) -> subprocess.CompletedProcess[str]:
    """Run a script (with `python -W warnings`) to its end, as `subprocess.run` does with captured text."""
    with tempfile.TemporaryDirectory() as folder:
        files = [Path(folder) / name for name in ("stdout", "stderr")]
        for file in files:
            file.touch()
        asked = {"script": script, "environment": dict(os.environ if environment is None else environment)}
        code = _answer(json.dumps({**asked, "warnings": warnings, "files": [str(file) for file in files]}), timeout_s)
        return subprocess.CompletedProcess(["python", "-c", script], code, *(file.read_text() for file in files))


def end() -> None:
    global _server
    if _server is None:
        return
    with contextlib.suppress(ProcessLookupError):
        os.killpg(_server.pid, 9)
    _server.communicate()
    _server = None


def _answer(asked: str, timeout_s: float) -> int:
    global _server
    if _server is None:
        _server = subprocess.Popen(
            [sys.executable, "-c", _SERVER],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=Path(__file__).parents[2],  # whose modules a script may import
            env={**os.environ, **_AT_START},
            start_new_session=True,
        )
    questions, answers = _pipes(_server)
    questions.write(f"{asked}\n")
    questions.flush()
    if not select.select([answers], [], [], timeout_s)[0]:
        end()
        raise subprocess.TimeoutExpired(["python", "-c", json.loads(asked)["script"]], timeout_s)
    answer = answers.readline()
    assert answer, "the interpreter that scripts are forked from has ended"
    return int(answer)


def _pipes(server: subprocess.Popen[str]) -> tuple[IO[str], IO[str]]:
    assert server.stdin is not None
    assert server.stdout is not None
    return server.stdin, server.stdout
