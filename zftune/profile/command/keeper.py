"""The process between `zftune profile` and the command: it keeps every descendant, whatever they do.

Started by `Child` in an interpreter without site packages: standard library only. It adopts what the command's
processes leave behind, and ends all of it when the command has ended, when it is told to, or when its own parent has
died: its end of the control pipe is then closed. Signals of the terminal reach the command by themselves.

    control   "signal N" for the command; "stop"
    status    one JSON object a line: {"started": pid}, {"failed": errno}, {"ended": exit status},
              {"alone": true, "left": processes that had to be ended}
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

_SET_PDEATHSIG = 1
_SET_CHILD_SUBREAPER = 36
_GET_CHILD_SUBREAPER = 37
_POLL_S = 0.02


def adopt_orphans(adopt: bool = True) -> None:
    """Become (or cease to be) the one to whom the kernel gives orphaned descendants."""
    _prctl(_SET_CHILD_SUBREAPER, int(adopt))


def adopts_orphans() -> bool:
    """Whether `adopt_orphans` is in force."""
    flag = ctypes.c_int(0)
    _prctl(_GET_CHILD_SUBREAPER, ctypes.addressof(flag))
    return bool(flag.value)


def die_with_parent() -> None:
    """Let the kernel kill this process when its parent dies; survives exec."""
    _prctl(_SET_PDEATHSIG, int(signal.SIGKILL))


def descendants(root: int) -> list[int]:
    """All processes below `root`, parents before children; those that ended meanwhile may be among them."""
    children: dict[int, list[int]] = {}
    for pid, parent in _parents():
        children.setdefault(parent, []).append(pid)
    found, open_ = [], [root]
    while open_:
        below = children.get(open_.pop(), [])
        found += below
        open_ += below
    return found


def end_all(
    pids: Callable[[], list[int]], *, over: Callable[[], bool], wait_s: float, term_s: float, kill_s: float = 10.0
) -> int:
    """End processes: let them end by themselves, then SIGTERM, then SIGKILL until none is left.

    Returns:
        How many had not ended by themselves.

    Args:
        over: whether none is left; reaps those that ended.
        wait_s: time to end by themselves.
        term_s: time after SIGTERM.
        kill_s: time after which even SIGKILL is given up (a process that hangs in the kernel).
    """
    found: list[int] = []
    for signum, seconds in ((None, wait_s), (signal.SIGTERM, term_s)):
        if signum is not None and not over():
            found = pids()
            _signal(found, signum)
            _signal(found, signal.SIGCONT)  # one that is stopped would not notice
        if _wait(over, seconds):
            return len(found)
    until = time.monotonic() + kill_s
    while not over() and time.monotonic() < until:
        _signal(pids(), signal.SIGKILL)
        time.sleep(_POLL_S)
    return len(found)


def _wait(over: Callable[[], bool], seconds: float) -> bool:
    until = time.monotonic() + seconds
    while not over():
        if time.monotonic() >= until:
            return False
        time.sleep(_POLL_S)
    return True


def _signal(pids: list[int], signum: int) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError, PermissionError):  # ended meanwhile, or another user's (sudo)
            os.kill(pid, signum)


def _parents() -> Iterator[tuple[int, int]]:
    for folder in Path("/proc").iterdir():
        if not folder.name.isdigit():
            continue
        try:
            text = (folder / "stat").read_bytes()
        except OSError:  # ended meanwhile
            continue
        # The second field is the command's name in parentheses, which may hold anything.
        fields = text[text.rindex(b")") + 1 :].split()
        yield int(folder.name), int(fields[1])


def _prctl(option: int, argument: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(ctypes.c_int(option), ctypes.c_ulong(argument), *[ctypes.c_ulong(0)] * 3) != 0:
        raise OSError(ctypes.get_errno(), f"prctl({option})")


FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
ORPHANS_WAIT_S = 1.0
TERM_S = 10.0
"""Time between SIGTERM and SIGKILL."""
ABANDONED_S = 1.0
"""The same when the profile itself was killed."""
_GROUP_SIGNAL_S = 0.05
_FOLDER = "ZFTUNE_AGENT_DIR"


class Supervisor:
    """Keeps one command.

    Args:
        control: pipe that tells what to do.
        status: pipe to tell what happens.
    """

    def __init__(self, command: Sequence[str], control: int, status: int, mask: Sequence[int]) -> None:
        self._command = list(command)
        self._control = control
        self._status = status
        self._mask = mask
        self._ended: int | None = None
        self._pid = 0
        self._unread = b""
        self._parent = os.getppid()

    def run(self) -> None:
        adopt_orphans()
        wake = _wake_on_child()
        try:
            child = self._start()
        except OSError as error:
            self._tell({"failed": error.errno or errno.EINVAL})
            return
        self._pid = child.pid
        self._tell({"started": child.pid})
        while not self._reap_and_look():
            ready, _, _ = select.select([wake, self._control], [], [])
            if wake in ready:
                os.read(wake, 4096)
            if self._control in ready and not self._obey():
                break
        left = end_all(self._below, over=self._reap, wait_s=ORPHANS_WAIT_S, term_s=TERM_S)
        self._tell({"alone": True, "left": left})

    def _start(self) -> subprocess.Popen[bytes]:
        try:
            return self._popen(self._command)
        except OSError as error:
            if error.errno != errno.ENOEXEC:
                raise
            return self._popen(["/bin/sh", *self._command])  # a script without its first line, as shells do it

    def _popen(self, command: Sequence[str]) -> subprocess.Popen[bytes]:
        # The keeper has one thread, so that running code between fork and exec is safe.
        return subprocess.Popen(command, close_fds=False, preexec_fn=self._in_child)  # noqa: PLW1509

    def _in_child(self) -> None:
        die_with_parent()
        signal.pthread_sigmask(signal.SIG_SETMASK, self._mask)

    def _obey(self) -> bool:
        part = os.read(self._control, 4096)
        if not part:
            end_all(self._below, over=self._reap, wait_s=0.0, term_s=ABANDONED_S)
            if os.getppid() != self._parent:  # it was killed, and cannot remove what it made
                shutil.rmtree(os.environ.get(_FOLDER, ""), ignore_errors=True)
            return False
        *lines, self._unread = (self._unread + part).split(b"\n")
        for line in lines:
            word, _, number = line.partition(b" ")
            if word == b"signal":
                self._forward(int(number))
            elif word == b"stop":
                end_all(self._below, over=self._reap, wait_s=0.0, term_s=TERM_S)
        return True

    def _forward(self, signum: int) -> None:
        """Send a signal on, unless the whole process group got it (a terminal's Ctrl-C): then the command has it."""
        if signal.sigtimedwait([signum], _GROUP_SIGNAL_S) is None and self._ended is None:
            os.kill(self._pid, signum)

    def _reap_and_look(self) -> bool:
        self._reap()
        return self._ended is not None

    def _reap(self) -> bool:
        """Collect what has ended; whether nothing is left."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return True
            if pid == 0:
                return False
            if pid == self._pid:
                self._ended = os.waitstatus_to_exitcode(status)
                self._tell({"ended": self._ended})

    def _below(self) -> list[int]:
        return descendants(os.getpid())

    def _tell(self, message: dict[str, int | bool]) -> None:
        try:
            os.write(self._status, json.dumps(message).encode() + b"\n")
        except BrokenPipeError:  # nobody listens any more: the control pipe says so too
            return


def _wake_on_child() -> int:
    """A pipe that can be read whenever a child has ended."""
    read, write = os.pipe()
    os.set_blocking(write, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(write, warn_on_full_buffer=False)
    return read


def main() -> None:
    """Read the arguments: control pipe, status pipe, blocked signals with commas, the command."""
    control, status = int(sys.argv[1]), int(sys.argv[2])
    for pipe in (control, status):
        os.set_inheritable(pipe, False)
    mask = [int(number) for number in sys.argv[3].split(",") if number]
    Supervisor(sys.argv[4:], control, status, mask).run()
