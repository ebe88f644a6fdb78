"""Processes that think, shared by all runs: each holds torch and Optuna in memory, and few think at a time."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from zftune.tuner.thinker import ANSWER_S, Thinker, ThinkerError

_MOST = 2
_LOOK_S = 0.05


class Thinkers:
    """A pool of them, started when somebody asks.

    Args:
        most: processes at a time.
        share: of a core that each may use.
        answer_s: seconds that an answer may take.
    """

    def __init__(self, most: int = _MOST, share: float = 1.0, answer_s: float = ANSWER_S) -> None:
        self._room = threading.Semaphore(most)
        self._share, self._answer_s = share, answer_s
        self._idle: list[Thinker] = []
        self._closed = False
        self._lock = threading.Lock()

    def lend(self) -> Thinker:
        """One for a run, which asks for a process only while it needs an answer."""
        return _Borrowed(self)

    def take(self, unwanted: Callable[[], bool]) -> Thinker:
        """A process; waits until one is free.

        Args:
            unwanted: whether nobody waits for it any more.

        Raises:
            ThinkerError: nobody does, or the pool was closed.
        """
        while not self._room.acquire(timeout=_LOOK_S):
            if unwanted():
                raise ThinkerError("the process that thinks was ended")
        with self._lock:
            if self._closed:
                self._room.release()
                raise ThinkerError("the processes that think were ended")
            if self._idle:
                return self._idle.pop()
        return Thinker(self._answer_s, self._share)

    def give_back(self, thinker: Thinker, *, sound: bool) -> None:
        """Take a process back.

        Args:
            thinker: from `take`.
            sound: whether it can be asked again.
        """
        with self._lock:
            keep = sound and not self._closed and not thinker.closed
            if keep:
                self._idle.append(thinker)
        if not keep:
            thinker.close()
        self._room.release()

    def close(self) -> None:
        """End those that are idle; the others end when they are given back."""
        with self._lock:
            self._closed = True
            idle, self._idle = self._idle, []
        for one in idle:
            one.close()


class _Borrowed(Thinker):
    """What a run takes for its own process."""

    def __init__(self, pool: Thinkers) -> None:
        super().__init__()
        self._pool = pool
        self._using: Thinker | None = None

    def start(self) -> None:
        if self._closed:
            raise ThinkerError("the process that thinks was ended")

    def ready(self) -> None:
        self.start()  # it gets ready with the first question: others may need the room

    def ask(self, function: Callable[..., Any], /, *args: Any, **named: Any) -> Any:
        self.start()
        thinker = self._pool.take(lambda: self._closed)
        sound = False
        try:
            with self._lock:
                self._using = None if self._closed else thinker
            self.start()
            thinker.ready()
            answer = thinker.ask(function, *args, **named)
            sound = True
            return answer
        finally:
            with self._lock:
                self._using = None
            self._pool.give_back(thinker, sound=sound)

    def close(self) -> None:
        with self._lock:
            self._closed = True
            if self._using is not None:
                self._using.close()  # who waits for its answer gets none; it goes back to the pool unsound
