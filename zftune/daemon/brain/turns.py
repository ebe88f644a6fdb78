"""Whose turn it is to work in Python: one search is made or thought about at a time, and not without pauses.

Their threads share one interpreter with the thread that answers agents, which gets a fifth of it while they work. Many
searches one after the other would keep agents waiting for 0.3 s; with pauses an agent waits for one of them.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

_REST = 3.0
"""For each second of work: searches take a quarter of the interpreter at most."""
_LONGEST_REST_S = 0.1


class Turns:
    """Of the threads of one daemon."""

    def __init__(self) -> None:
        self._turn = threading.Lock()
        self._rested_at_s = 0.0
        """When the next may begin; of whose turn it is."""
        self._mine = threading.local()

    @contextmanager
    def working(self) -> Iterator[None]:
        """Work when it is this thread's turn; it must not wait for another thread that works."""
        self._begin()
        try:
            yield
        finally:
            self._end()

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Let others work while this thread waits for a process."""
        if not getattr(self._mine, "held", False):
            yield
            return
        self._end()
        try:
            yield
        finally:
            self._begin()

    def _begin(self) -> None:
        self._turn.acquire()
        time.sleep(max(0.0, self._rested_at_s - time.monotonic()))
        self._mine.held, self._mine.began_s = True, time.thread_time()

    def _end(self) -> None:
        worked_s = time.thread_time() - self._mine.began_s
        self._mine.held = False
        self._rested_at_s = time.monotonic() + min(_REST * worked_s, _LONGEST_REST_S)
        self._turn.release()
