"""The command as a child of the profile, with its keeper in between (see `keeper`)."""

from __future__ import annotations

import fcntl
import json
import os
import select
import signal
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import zftune
from zftune.errors import BadInputError, ProfileError
from zftune.profile.command.keeper import FORWARDED, TERM_S, adopt_orphans, adopts_orphans, descendants, end_all

_KEEPER = "import sys; sys.path.append(sys.argv.pop(1)); from zftune.profile.command.keeper import main; main()"
_LEAST_FD = 10  # above the standard streams, which may be closed
_KEEPER_S = TERM_S + 15.0


@contextmanager
def held_signals() -> Iterator[list[int]]:
    """Hold back Ctrl-C, termination and hang-up while inside; yields the signals that were held back before."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, FORWARDED)
    try:
        yield [int(signum) for signum in before]
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def held_signal() -> int | None:
    """A signal that came meanwhile, once; None: there is none."""
    found = signal.sigtimedwait(FORWARDED, 0)
    return None if found is None else found.si_signo


class SupervisedProcess:
    """A running command: its ends, and the ways to end it. Inside `held_signals` only.

    Args:
        mask: signals that are blocked in the command.

    Raises:
        BadInputError: it cannot be run.
        ProfileError: no process can be started.
    """

    def __init__(self, command: Sequence[str], environment: Mapping[str, str], mask: Iterable[int]) -> None:
        self._adopted_before = adopts_orphans()
        self._foreign = set(descendants(os.getpid()))
        adopt_orphans()  # should the keeper be killed, what it kept comes to us
        control, self._control = _pipe()
        self._status, status = _pipe()
        arguments = [str(control), str(status), ",".join(str(int(number)) for number in mask), *command]
        for inherited in (control, status):
            os.set_inheritable(inherited, True)
        try:
            self._keeper = subprocess.Popen(
                [sys.executable, "-I", "-S", "-c", _KEEPER, str(Path(zftune.__file__).parents[1]), *arguments],
                env=dict(environment),
                close_fds=False,
            )
        except OSError as error:
            raise ProfileError(f"no process can be started ({error.strerror})") from error
        finally:
            os.close(control)
            os.close(status)
        self._unread = b""
        self._over = False
        self._closed = False
        self._failed: int | None = None
        self.pid: int | None = None
        """Of the command itself, once it runs."""
        self.exit_status: int | None = None
        """As Python's subprocess has it (-n: signal n); None while it runs, or when its keeper was killed."""
        self.left = 0
        """Processes that the command had left in the background at its end, and that were ended then."""
        self._wait_for_start(command[0])

    def __enter__(self) -> SupervisedProcess:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def keeper_pid(self) -> int:
        """The process below which all of the command's processes are."""
        return self._keeper.pid

    def over(self, seconds: float) -> bool:
        """Wait at most `seconds`; whether the command and all that it started have ended."""
        if not self._over and select.select([self._status], [], [], seconds)[0]:
            self._read()
        return self._over

    def pass_on_signals(self) -> None:
        """Send on what came for this process alone."""
        while (signum := held_signal()) is not None:
            self._say(f"signal {signum}")

    def stop(self) -> None:
        """Begin to end the command: SIGTERM to all of it, SIGKILL ten seconds later."""
        self._say("stop")

    def close(self) -> None:
        """End what still runs; nothing of the command is left afterwards. A second call does nothing."""
        if self._closed:
            return
        self._closed = True
        os.close(self._control)  # its end is the sign that nobody needs the command any more
        try:
            self._keeper.wait(_KEEPER_S)
        except subprocess.TimeoutExpired:
            self._keeper.kill()
            self._keeper.wait()
        os.close(self._status)
        end_all(self._adopted, over=lambda: self._reap() and not self._adopted(), wait_s=0.0, term_s=TERM_S)
        adopt_orphans(self._adopted_before)

    def _wait_for_start(self, program: str) -> None:
        while self.pid is None and not self._over:
            self._read()
        if self._failed is not None:
            self.close()
            raise BadInputError(f"command '{program}': it cannot be run ({os.strerror(self._failed)})")

    def _adopted(self) -> list[int]:
        return [pid for pid in descendants(os.getpid()) if pid not in self._foreign]

    def _reap(self) -> bool:
        for pid in self._adopted():
            try:
                os.waitpid(pid, os.WNOHANG)
            except ChildProcessError:  # a descendant of a descendant
                continue
        return True

    def _say(self, line: str) -> None:
        try:
            os.write(self._control, f"{line}\n".encode())
        except BrokenPipeError:  # the keeper has ended: `over` will tell
            return

    def _read(self) -> None:
        part = os.read(self._status, 4096)
        *lines, self._unread = (self._unread + part).split(b"\n")
        for line in lines:
            message = json.loads(line)
            self.pid = message.get("started", self.pid)
            self.exit_status = message.get("ended", self.exit_status)
            self._failed = message.get("failed", self._failed)
            self.left = message.get("left", self.left)
            self._over = self._over or "alone" in message
        self._over = self._over or not part


def _pipe() -> tuple[int, int]:
    """A pipe whose ends no other program gets, above the standard streams."""
    ends = os.pipe()
    moved = tuple(fcntl.fcntl(end, fcntl.F_DUPFD_CLOEXEC, _LEAST_FD) for end in ends)
    for end in ends:
        os.close(end)
    return moved[0], moved[1]
