"""The processes of the systems: they take turns, and one has gone quiet before the next begins."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import psutil

from sidebyside.setting import System

WORKER = Path(__file__).parent / "worker.py"
LIMIT_S, STARTING_S = 300.0, 900.0  # the first includes what a busy machine takes; DeepSpeed compiles in the second
_QUIET_S, _QUIET_LIMIT_S = 0.04, 10.0


class ChildError(Exception):
    """A system's process ended or does not answer; the message says which one, and its last lines."""


class Child:
    """One system in a process of its own.

    Args:
        system: which.
        start: what its first line says.
        log: file for what it prints.
    """

    def __init__(self, system: System, start: Mapping[str, Any], log: Path) -> None:
        self.system, self._log = system, log
        ask_read, ask_write = os.pipe()
        answer_read, answer_write = os.pipe()
        with log.open("wb") as output:
            self._process = subprocess.Popen(
                [sys.executable, WORKER, str(ask_read), str(answer_write)],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                cwd=log.parent,
                env={**os.environ, "OMP_NUM_THREADS": str(system.torch_threads)},
                pass_fds=(ask_read, answer_write),
                start_new_session=True,
            )
        os.close(ask_read)
        os.close(answer_write)
        self._asks, self._answers = os.fdopen(ask_write, "w"), os.fdopen(answer_read, "r")
        self._send(start)

    def wait_ready(self) -> None:
        """Until its model is there.

        Raises:
            ChildError: it is not, and will not be.
        """
        self._receive(STARTING_S)

    def do(self, what: str, **more: Any) -> Any:
        """Ask for something and wait for it.

        Raises:
            ChildError: there is no answer.
        """
        self._send({"do": what, **more})
        return self._receive(LIMIT_S)

    def settle(self) -> float:
        """Wait until neither it nor what it has started uses a processor.

        Returns:
            Milliseconds until then.

        Raises:
            ChildError: it does not go quiet.
        """
        began = changed = time.perf_counter()
        used = self.cpu_s()
        while (now := time.perf_counter()) - changed < _QUIET_S:
            time.sleep(0.005)
            if (busy := self.cpu_s()) != used:
                used, changed = busy, time.perf_counter()
            if now - began > _QUIET_LIMIT_S:
                raise ChildError(f"{self.system.name} still computes {_QUIET_LIMIT_S:g} s after its turn")
        return 1e3 * (changed - began)

    def cpu_s(self) -> float:
        """Processor time so far, of it and of what it has started."""
        total = 0.0
        with contextlib.suppress(psutil.NoSuchProcess):
            own = psutil.Process(self._process.pid)
            for process in (own, *own.children(recursive=True)):
                with contextlib.suppress(psutil.NoSuchProcess):
                    times = process.cpu_times()
                    total += times.user + times.system
        return total

    def end(self) -> None:
        """End it and all that it has started."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)  # the workers too, which DeepSpeed leaves behind
        self._process.wait()
        for stream in (self._asks, self._answers):
            with contextlib.suppress(OSError):
                stream.close()

    def _send(self, document: Mapping[str, Any]) -> None:
        try:
            self._asks.write(json.dumps(document) + "\n")
            self._asks.flush()
        except OSError as error:
            raise self._failed("has ended") from error

    def _receive(self, limit_s: float) -> Any:
        if not select.select([self._answers], [], [], limit_s)[0]:
            raise self._failed(f"has not answered within {limit_s:.0f} s")
        line = self._answers.readline()
        if not line:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(10)  # it says why after it has closed its end
            raise self._failed("has ended")
        return json.loads(line)["answer"]

    def _failed(self, how: str) -> ChildError:
        last = self._log.read_text(encoding="utf-8", errors="replace").strip().splitlines()[-3:]
        return ChildError(f"{self.system.name} {how}: {' | '.join(last)}")
