"""`zftune top` in a terminal, which is as it was afterwards."""

from __future__ import annotations

import os
import pty
import select
import struct
import subprocess
import sys
import termios
import time
from fcntl import ioctl
from pathlib import Path
from typing import Any

from tests.support.zftune.daemon.daemons import SOON_S, environment
from tests.support.zftune.daemon.scripted import training_under

LEAVES = b"\x1b[?1049l"


class Terminal:
    """A terminal of 80 x 24 in which a command runs."""

    def __init__(self, folder: Path, *arguments: str) -> None:
        self.screen, self._inside = pty.openpty()
        ioctl(self._inside, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
        self.before = termios.tcgetattr(self._inside)
        more = {"TERM": "xterm-256color", "COLUMNS": "", "LINES": ""}
        self.process = subprocess.Popen(
            [sys.executable, "-c", "from zftune.cli.main import main; main()", *arguments],
            env={name: value for name, value in environment(folder, **more).items() if value},
            stdin=self._inside,
            stdout=self._inside,
            stderr=self._inside,
            start_new_session=True,
            preexec_fn=lambda: ioctl(0, termios.TIOCSCTTY, 0),
        )
        self.seen = b""

    def until(self, text: bytes) -> None:
        ends = time.monotonic() + SOON_S
        while text not in self.seen:
            ready, _, _ = select.select([self.screen], [], [], max(0.0, ends - time.monotonic()))
            assert ready, self.seen
            self.seen += os.read(self.screen, 1 << 16)
        self.seen = self.seen.partition(text)[2]

    @property
    def after(self) -> list[Any]:
        return termios.tcgetattr(self._inside)

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self.screen)
        os.close(self._inside)


def test_it_goes_on_until_ctrl_c_and_leaves_the_terminal_as_it_was(folder: Path) -> None:
    with training_under(folder, "gpt2") as (daemon, (training,)):
        terminal = Terminal(folder, "top", "--interval-s", "0.1")
        try:
            terminal.until(b"\x1b[?1049h")
            terminal.until(f" {training.step} ".encode())
            training.go_on()
            terminal.until(f" {training.step} ".encode())
            training.transport.post(f"/v1/runs/{training.run}/pause")
            terminal.until(b"paused")
            daemon.process.kill()
            terminal.until(b"what is below is old")
            terminal.until(training.called.encode())
            os.write(terminal.screen, b"\x03")
            terminal.until(LEAVES)
            assert terminal.process.wait(SOON_S) == 0
            assert terminal.after == terminal.before
            assert b"Traceback" not in terminal.seen
        finally:
            terminal.close()
