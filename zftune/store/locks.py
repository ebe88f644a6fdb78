"""Whether the process of a run lives: it holds a lock on a file beside the database, which ends with it in any case.

A lease says the same where there is no such file: on a database server, whose runs are on other machines.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import threading
import time
import weakref
from dataclasses import dataclass
from pathlib import Path

_LOOKS = 5
_LOOK_S = 0.01


@dataclass(frozen=True, slots=True)
class Acquired:
    """The lock of a run is this process's from now on."""

    died: bool
    """Whether its last process ended without giving it back; False: it did, or there are no locks."""


class RunLocks:
    """The locks that this process holds for its runs; none without the file of a database."""

    def __init__(self, database: Path | None) -> None:
        self._folder = None if database is None else database.with_name(database.name + ".runs")
        self._held: dict[str, int] = {}
        self._taking = threading.Lock()
        self._using = threading.Lock()
        """So that no descriptor is closed, and another file's by then, while it is written to."""
        alive = weakref.ref(self)

        def forget() -> None:
            forked = alive()
            if forked is not None:
                forked._forget()

        os.register_at_fork(after_in_child=forget)

    def hold(self, run_id: str) -> bool:
        """Take a run's lock; whether no other process, nor another store of this one, has it.

        Where no lock can be had at all, nobody has one either: the lease decides.
        """
        if self._folder is None or run_id in self._held:
            return True
        try:
            self._folder.mkdir(mode=0o700, exist_ok=True)
            for _ in range(_LOOKS):
                descriptor = self._locked(self._folder / run_id, os.O_CREAT)
                if descriptor is not None:
                    break
                time.sleep(_LOOK_S)  # somebody may only have looked whether it is held
        except OSError:
            return True
        if descriptor is None:
            return False
        self._held[run_id] = descriptor
        return True

    def take(self, run_id: str) -> Acquired | None:
        """Take over the lock of a run that is over; None: it lives, in another process or in this one.

        Of several threads that want it, one gets it.
        """
        with self._taking:
            if run_id in self._held:
                return None
            died = self.lives(run_id) is False
            return Acquired(died) if self.hold(run_id) else None

    def release(self, run_id: str) -> None:
        """Give a run's lock back: its process has said goodbye."""
        with self._using:
            descriptor = self._held.pop(run_id, None)
            if descriptor is not None and self._folder is not None:
                self._remove(self._folder / run_id, descriptor)

    def lives(self, run_id: str) -> bool | None:
        """Whether a process holds a run's lock; None: there is none, so that only its lease tells."""
        if self._folder is None:
            return None
        if run_id in self._held:
            return True
        try:
            descriptor = self._locked(self._folder / run_id, 0, fcntl.LOCK_SH)
        except OSError:
            return None
        if descriptor is None:
            return True
        fcntl.flock(descriptor, fcntl.LOCK_UN)
        os.close(descriptor)
        return False

    def has(self, run_id: str) -> bool:
        """Whether there is a lock's file of a run."""
        return self._folder is not None and (self._folder / run_id).exists()

    def write(self, run_id: str, text: str, *, durable: bool = False) -> bool:
        """Put a text into the file of a lock, always one of the same length; whether the lock is held.

        `durable`: it is on the disk when this returns, if that can be.
        """
        with self._using:
            descriptor = self._held.get(run_id)
            if descriptor is not None:
                with contextlib.suppress(OSError):  # a full disk: the text before stays
                    os.pwrite(descriptor, text.encode(), 0)
                    if durable:
                        os.fdatasync(descriptor)
            return descriptor is not None

    def read(self, run_id: str) -> str:
        """The text in a lock's file; "": there is none."""
        if self._folder is None:
            return ""
        try:
            return (self._folder / run_id).read_text(encoding="utf-8", errors="replace")
        except OSError:
            return ""

    def files(self) -> set[str]:
        """Names of the locks' files."""
        if self._folder is None:
            return set()
        with contextlib.suppress(OSError):  # there is no folder yet
            return {one.name for one in self._folder.iterdir()}
        return set()

    def bury(self, run_id: str) -> None:
        """Remove what a dead run left, unless somebody has taken it up."""
        if self._folder is None or run_id in self._held:
            return
        with contextlib.suppress(OSError):  # nobody needs it to be gone
            descriptor = self._locked(self._folder / run_id, 0)
            if descriptor is not None:
                self._remove(self._folder / run_id, descriptor)

    def close(self, run_id: str | None = None) -> None:
        """Give a lock, or all, back; the files stay, and say that these runs are over."""
        with self._using:
            for one in list(self._held) if run_id is None else [run_id]:
                descriptor = self._held.pop(one, None)
                if descriptor is not None:
                    fcntl.flock(descriptor, fcntl.LOCK_UN)
                    os.close(descriptor)

    def _locked(self, path: Path, flags: int, kind: int = fcntl.LOCK_EX) -> int | None:
        """An open file with the lock, or None where somebody else has it."""
        while True:
            descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | flags, 0o600)
            try:
                fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
                if _is_at(path, descriptor):
                    return descriptor
            except BlockingIOError:
                os.close(descriptor)
                return None
            except OSError:
                os.close(descriptor)
                raise
            os.close(descriptor)  # it was removed in between

    def _remove(self, path: Path, descriptor: int) -> None:
        path.unlink(missing_ok=True)  # before the lock is given back: who waits for it sees that it is gone
        fcntl.flock(descriptor, fcntl.LOCK_UN)
        os.close(descriptor)

    def _forget(self) -> None:
        """In a forked child: the lock is its parent's, and must end with it."""
        for descriptor in self._held.values():
            os.close(descriptor)
        self._held.clear()
        self._taking, self._using = threading.Lock(), threading.Lock()  # whoever had them is not in this process


def _is_at(path: Path, descriptor: int) -> bool:
    try:
        return os.path.samestat(path.stat(follow_symlinks=False), os.fstat(descriptor))
    except FileNotFoundError:
        return False
