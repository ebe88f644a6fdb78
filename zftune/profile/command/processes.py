"""Descendants of a process on Linux, and their end. Standard library only: the keeper uses it too."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import time
from collections.abc import Callable, Iterator
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
) -> None:
    """End processes: let them end by themselves, then SIGTERM, then SIGKILL until none is left.

    Args:
        pids: the processes, asked again and again, since they may start others.
        over: whether none is left; reaps those that ended.
        wait_s: time to end by themselves.
        term_s: time after SIGTERM.
        kill_s: time after which even SIGKILL is given up (a process that hangs in the kernel).
    """
    for signum, seconds in ((None, wait_s), (signal.SIGTERM, term_s)):
        if signum is not None and not over():
            found = pids()
            _signal(found, signum)
            _signal(found, signal.SIGCONT)  # one that is stopped would not notice
        if _wait(over, seconds):
            return
    until = time.monotonic() + kill_s
    while not over() and time.monotonic() < until:
        _signal(pids(), signal.SIGKILL)
        time.sleep(_POLL_S)


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
    """(process, its parent) for every process."""
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
