"""Processes that think, forked from the zygote and not of the lowest priority.

A real one imports for three seconds of a processor that it only gets where nobody else wants it: beside a busy machine
a test would wait for minutes. `tests/zftune/tuner/test_thinking.py` has real ones.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import IO

from tests import zygote

_THINKS = "from zftune.tuner import sampler_process as it; it._give_way = lambda: None; it.main()"


class _Forked:
    """What `zftune.tuner.sampler_process` needs of `subprocess.Popen`."""

    def __init__(
        self, command: Sequence[str], *, stdin: int, stdout: int, stderr: IO[bytes], env: Mapping[str, str]
    ) -> None:
        assert command[2:4] == ["-m", "zftune.tuner.sampler_process"]
        assert stdin == stdout == subprocess.PIPE
        read, write = os.pipe()
        read_answers, write_answers = os.pipe()
        self._process = zygote.fork(["-c", _THINKS], (read, write_answers, stderr.fileno()), env=env)
        os.close(read)
        os.close(write_answers)
        self.stdin, self.stdout = os.fdopen(write, "wb"), os.fdopen(read_answers, "rb")

    @property
    def pid(self) -> int | None:
        return self._process.pid

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self) -> int | None:
        self._process.join()
        return self._process.exitcode

    def kill(self) -> None:
        self._process.kill()


FORKING = SimpleNamespace(Popen=_Forked, PIPE=subprocess.PIPE)
"""In place of `subprocess` in `zftune.tuner.sampler_process`."""
