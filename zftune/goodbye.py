"""A last word of a process that a signal from outside ends."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable

PART_S = 10.0
"""Most time of the goodbye before a signal ends the process; the sender of a later SIGKILL waits about as long."""
_SIGNALS = (signal.SIGTERM, signal.SIGHUP)


class Goodbye:
    """Calls `say` when a signal from outside ends this process, which then ends as before.

    A handler of the program's own stays, and ignored signals stay ignored; outside the main thread no handler can be
    set. A fork's child, such as a worker of a DataLoader, ends as it does without us.
    """

    def __init__(self, say: Callable[[], None]) -> None:
        self._say = say
        self._follows_forks = False
        self._forking = threading.local()

    def hear(self) -> None:
        if threading.current_thread() is not threading.main_thread():
            return
        if not self._follows_forks:
            self._follows_forks = True
            os.register_at_fork(
                before=self._hold, after_in_parent=self._take, after_in_child=lambda: self._take(of_child=True)
            )
        for number in _SIGNALS:
            if signal.getsignal(number) is signal.SIG_DFL:
                signal.signal(number, self._end_by)

    def deafen(self) -> None:
        for number in self._heard() if threading.current_thread() is threading.main_thread() else ():
            signal.signal(number, signal.SIG_DFL)

    def _heard(self) -> list[signal.Signals]:
        return [number for number in _SIGNALS if signal.getsignal(number) == self._end_by]

    def _hold(self) -> None:
        """For the time of a fork: Python forgets a signal that comes to the child before its handlers are as before."""
        self._forking.mask = signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS) if self._heard() else None

    def _take(self, *, of_child: bool = False) -> None:
        if of_child:
            self.deafen()
        mask = getattr(self._forking, "mask", None)
        if mask is not None:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)

    def _end_by(self, number: int, _: object) -> None:
        """Say goodbye, and end by the signal; a second one does not wait."""
        signal.signal(number, signal.SIG_DFL)
        # In a thread of its own: what this one was interrupted in may hold the locks that it takes.
        goodbye = threading.Thread(target=self._say, name="zftune-goodbye", daemon=True)
        try:
            goodbye.start()  # not once Python is ending, from 3.12 on: the tuners part by themselves then
            goodbye.join(PART_S)
        finally:
            os.kill(os.getpid(), number)
