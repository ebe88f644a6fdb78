"""A daemon beside a training, to be held still."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil

from zftune.daemon.client.http import DaemonClient
from zftune.errors import DaemonError

_SOON_S = 120.0


class Daemon:
    """A daemon as users start it, with a store on disk, that can be held still."""

    def __init__(self, folder: Path) -> None:
        os.environ["ZFTUNE_SOCKET"] = str(folder / "z.sock")
        os.environ["ZFTUNE_DB"] = f"sqlite:///{folder / 'z.db'}"
        command = [sys.executable, "-c", "from zftune.cli.main import main; main()", "daemon", "start"]
        with (folder / "log").open("wb") as log:  # a session of its own, so that a signal finds all that it starts
            self._popen = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
            )
        self._process = psutil.Process(self._popen.pid)
        self.client = DaemonClient(timeout_s=_SOON_S)
        ends_s = time.monotonic() + _SOON_S
        while True:
            try:
                self.client.get("/v1/health")
            except DaemonError:
                if time.monotonic() > ends_s:
                    raise
                time.sleep(0.1)
            else:
                break

    def hold(self, still: bool) -> None:
        """Hold it and what thinks for it still, or let them go on."""
        os.killpg(self._popen.pid, signal.SIGSTOP if still else signal.SIGCONT)

    def processor_s(self) -> tuple[float, float]:
        """Of its own, and of what thinks for it."""
        own, thinks = self._process.cpu_times(), [child.cpu_times() for child in self._process.children()]
        return own.user + own.system, sum(one.user + one.system for one in thinks)

    def close(self) -> None:
        """End it."""
        self.hold(still=False)
        self.client.close()
        self._popen.terminate()
        self._popen.wait(_SOON_S)

    @property
    def run(self) -> dict[str, Any]:
        """The newest that has not ended; {}: there is none."""
        runs: list[dict[str, Any]] = self.client.get("/v1/runs")
        return next((run for run in reversed(runs) if run["state"] != "ended"), {})
