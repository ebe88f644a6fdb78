"""`zftune run` around a program that is no Python: it stays as its parent, to say at the end what came of it.

Signals that were sent to it go to the program; those of a terminal reach both. It ends as the program does.
"""

from __future__ import annotations

import contextlib
import os
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from zftune.agent.bootstrap.sitecustomize import GOES_ON, Notes, missed
from zftune.profile.command.document import interpreter_flag
from zftune.profile.command.keeper import die_with_parent

_FORWARDED = frozenset({signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2})
_BY_A_PROCESS = 0
"""Greatest `si_code` of a signal that a process has sent, and not the kernel or a terminal."""
_ENDS_S = 1.0
"""For helpers of what has ended, such as multiprocessing's, to end too."""
_POLL_S = 0.05


def is_python(command: Sequence[str], environment: Mapping[str, str]) -> bool:
    """Whether a command's own process is a Python that takes up zftune, and says at its end what is to be said.

    Args:
        command: a program and its arguments.
        environment: its $PATH finds the program.
    """
    found = shutil.which(command[0], path=environment.get("PATH"))
    if found is None or interpreter_flag(command) is not None:
        return False
    if Path(found).name.startswith("python"):
        return True
    with contextlib.suppress(OSError), Path(found).open("rb") as file:
        first, second = file.readline(512), file.readline(512)
        return first.startswith(b"#!") and (b"python" in first or second.startswith(b"'''exec'"))  # of a long path
    return False


def stay(command: Sequence[str], environment: Mapping[str, str], asked: Mapping[str, Any]) -> NoReturn:
    """Run a command to its end, say why nothing came of what was asked for, and end as the command did.

    Args:
        command: a program and its arguments.
        environment: of the command.
        asked: of `zftune run`.

    Raises:
        OSError: it cannot be run.
    """
    descriptor = os.memfd_create(Notes.KIND)
    path = f"/proc/{os.getpid()}/fd/{descriptor}"
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {*_FORWARDED, signal.SIGCHLD})

    def in_child() -> None:
        die_with_parent()
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)

    child = subprocess.Popen(
        command,
        env={**environment, Notes.NAME: path},
        close_fds=False,
        preexec_fn=in_child,  # noqa: PLW1509
    )
    while (status := child.poll()) is None:
        told = signal.sigwaitinfo({*_FORWARDED, signal.SIGCHLD})
        if told.si_signo != signal.SIGCHLD and told.si_code <= _BY_A_PROCESS:
            child.send_signal(told.si_signo)
    if status == 0 and Path(path).exists():  # else the command has said what is wrong, or nobody could leave a note
        said = missed(os.pread(descriptor, os.fstat(descriptor).st_size, 0), asked)
        with contextlib.suppress(OSError, ValueError, AttributeError):  # standard error may be closed
            sys.stderr.write(GOES_ON if said and _goes_on(path) else said)
            sys.stderr.flush()
    _end_like(status)


def _goes_on(notes: str) -> bool:
    """Whether a process of the command lives a while after it."""
    until_s = time.monotonic() + _ENDS_S
    while _lives(f"{Notes.NAME}={notes}".encode()):
        if time.monotonic() > until_s:
            return True
        time.sleep(_POLL_S)
    return False


def _lives(variable: bytes) -> bool:
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # ended meanwhile, or another user's
            if variable in (folder / "environ").read_bytes().split(b"\0"):
                return True
    return False


def _end_like(status: int) -> NoReturn:
    """End with an exit code, or by a signal."""
    if status < 0:
        with contextlib.suppress(OSError, ValueError):  # SIGKILL and real-time signals have no handler
            resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
            signal.signal(-status, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {-status})
        os.kill(os.getpid(), -status)
    raise SystemExit(status if status >= 0 else 128 - status)
