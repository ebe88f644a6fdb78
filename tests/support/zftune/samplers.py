"""The search process in tests: a thread, or a fork that has all imports. `test_thinking.py` starts real ones."""

from __future__ import annotations

import contextlib
import os
import pickle
import subprocess
import threading
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import IO, BinaryIO

from tests.support import fork_server
from zftune.tuner import sampler_process

_THINKS = "from zftune.tuner import sampler_process as it; it._give_way = lambda: None; it.main()"


class _Forked:
    """The part of `subprocess.Popen` that `zftune.tuner.sampler_process` uses; so is `_Threaded`."""

    def __init__(
        self, command: Sequence[str], *, stdin: int, stdout: int, stderr: IO[bytes], env: Mapping[str, str]
    ) -> None:
        assert command[2:4] == ["-m", "zftune.tuner.sampler_process"]
        assert stdin == stdout == subprocess.PIPE
        read, write = os.pipe()
        read_answers, write_answers = os.pipe()
        self._process = fork_server.fork(["-c", _THINKS], (read, write_answers, stderr.fileno()), env=env)
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


class _Threaded:
    pid = -1  # no process whose waits for a core the kernel would count

    def __init__(
        self, command: Sequence[str], *, stdin: int, stdout: int, stderr: IO[bytes], env: Mapping[str, str]
    ) -> None:
        assert command[2:4] == ["-m", "zftune.tuner.sampler_process"]
        assert stdin == stdout == subprocess.PIPE
        read, write = os.pipe()
        read_answers, write_answers = os.pipe()
        self.stdin, self.stdout = os.fdopen(write, "wb"), os.fdopen(read_answers, "rb")
        self._ended = threading.Event()
        self._answers = os.fdopen(write_answers, "wb")
        threading.Thread(target=self._run, args=(os.fdopen(read, "rb"),), daemon=True).start()

    def poll(self) -> int | None:
        return -9 if self._ended.is_set() else None

    def wait(self) -> int:
        self._ended.wait()
        return -9

    def kill(self) -> None:
        """Let nothing more be answered; a computation under way goes on unheard."""
        self._ended.set()
        for pipe in (self.stdin, self._answers):  # who waits for an answer hears its end
            with contextlib.suppress(OSError):
                pipe.close()

    def _run(self, questions: BinaryIO) -> None:
        answers = self._answers
        with questions, answers, contextlib.suppress(EOFError, OSError, ValueError):  # the last once it is closed
            while True:
                question = sampler_process._receive(questions)
                if pickle.loads(question)[0] is sampler_process._rest:
                    answer: tuple[bool, object] = (True, None)  # the interval timer is for a process of its own
                else:
                    answer = sampler_process._answer(question)
                if self._ended.is_set():
                    return
                sampler_process._send(answers, pickle.dumps(answer))


FORKING = SimpleNamespace(Popen=_Forked, PIPE=subprocess.PIPE)
"""In place of `subprocess` in `zftune.tuner.sampler_process`: tests in `system`."""
THREADED = SimpleNamespace(Popen=_Threaded, PIPE=subprocess.PIPE)
"""The same for tests in `unit`."""
