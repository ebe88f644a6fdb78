"""Ctrl-C on a terminal, with a real signal."""

from __future__ import annotations

import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

ZFTUNE = Path(sys.executable).with_name("zftune")


def read_until(terminal: int, pattern: str, seconds: float) -> str:
    """What a command shows until it matches `pattern`, or it ends and the terminal is closed."""
    shown, until = "", time.monotonic() + seconds
    while not re.search(pattern, shown) and time.monotonic() < until:
        if not select.select([terminal], [], [], 0.2)[0]:
            continue
        try:
            part = os.read(terminal, 65536)
        except OSError:  # the other end was closed
            break
        shown += part.decode(errors="replace")
    return shown


def test_an_interrupted_profile_ends_in_a_line_and_leaves_no_trace(
    tmp_path: Path, mini_model: Path, mini_rig: Path
) -> None:
    (tmp_path / "profile.json").write_text("previous")
    arguments = ["--rig", str(mini_rig), "--model", str(mini_model), "--sequence", "8", "--steps", "10000"]
    terminal, inner = pty.openpty()
    command = subprocess.Popen(
        [ZFTUNE, "profile", *arguments, "--json", "profile.json"],
        cwd=tmp_path,
        env={**os.environ, "TERM": "xterm", "COLUMNS": "120"},
        stdout=inner,
        stderr=subprocess.PIPE,
        text=True,
    )
    os.close(inner)
    try:
        shown = read_until(terminal, r"\d+/10008", 120)
        assert "measuring this run" in shown
        command.send_signal(signal.SIGINT)
        shown += read_until(terminal, r"(?!)", 60)
        _, error = command.communicate(timeout=60)
    finally:
        command.kill()
        command.wait()
        os.close(terminal)
    assert command.returncode == 130
    assert error == "zftune: interrupted\n"
    assert shown.rfind("\x1b[?25h") > shown.rfind("\x1b[?25l") >= 0  # the cursor that the bar hid is back
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {"profile.json": "previous"}
