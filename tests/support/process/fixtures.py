"""`zftune profile -- CMD` as a user runs it: a process of its own, and what it must never do."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from zftune.profile.schema import validate

ZFTUNE = Path(sys.executable).with_name("zftune")
LIB = Path(__file__).parent / "lib"
PYTHON = sys.executable

_OUR_FRAME = re.compile(r'File "[^"]*/zftune/[^"]*"')


@dataclass(frozen=True)
class Profiled:
    code: int
    out: bytes
    err: str
    document: dict[str, Any] | None

    @property
    def sentences(self) -> list[str]:
        return [line.removeprefix("zftune: ") for line in self.err.splitlines() if line.startswith("zftune: ")]

    def is_clean(self) -> Profiled:
        assert not _OUR_FRAME.search(self.err), self.err
        assert self.document is not None or self.sentences, self.err
        assert all(sentence and not sentence.endswith(".") for sentence in self.sentences), self.sentences
        if self.document is not None:
            validate(self.document)
            assert "zftune profile" in self.err
        return self

    def says(self, part: str) -> Profiled:
        assert any(part in sentence for sentence in self.sentences), self.err
        return self


Run = Callable[..., Profiled]


def command_line(arguments: Sequence[object], options: Sequence[object], json_path: Path) -> list[str]:
    json_option = () if "--json" in options else ("--json", json_path)
    return [str(part) for part in (ZFTUNE, "profile", "--steps", 5, *json_option, *options, "--", *arguments)]


def environment(changes: Mapping[str, str | None]) -> dict[str, str]:
    merged = {**os.environ, "PYTHONPATH": str(LIB), "COLUMNS": "120", **changes}
    return {name: value for name, value in merged.items() if value is not None}


@pytest.fixture
def profile(tmp_path: Path) -> Run:
    """Profile a command: exit code, its standard output, standard error, and the document if there is one."""

    def run(
        *command: object,
        options: Sequence[object] = (),
        env: Mapping[str, str | None] | None = None,
        cwd: Path | None = None,
        **more: Any,
    ) -> Profiled:
        path = tmp_path / "profile of this test.json"
        streams = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE} | more
        done: Any = subprocess.run(
            command_line(command, options, path),
            env=environment(env or {}),
            cwd=cwd or tmp_path,
            timeout=120,
            check=False,
            **streams,
        )
        document = json.loads(path.read_text()) if path.exists() else None
        return Profiled(done.returncode, done.stdout or b"", (done.stderr or b"").decode(errors="replace"), document)

    return run


@pytest.fixture
def python(profile: Run) -> Run:
    def run(code: str, **more: Any) -> Profiled:
        return profile(PYTHON, "-c", code, **more)

    return run


def is_running(pid: int) -> bool:
    """Whether a process is there, and not only waited for."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return text[text.rindex(")") + 2] != "Z"


def wait_for(condition: Callable[[], object], seconds: float = 30.0) -> None:
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until, "it took too long"
        time.sleep(0.02)
