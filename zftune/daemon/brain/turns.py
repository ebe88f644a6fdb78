"""Whose turn it is to work in Python: few searches are made or thought about at a time.

Their threads share one interpreter anyway, and the thread that answers agents would wait for each of them.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

_MOST = 2
"""So that one which waits for the disk does not stop all."""


class Turns:
    """Of the threads of one daemon."""

    def __init__(self) -> None:
        self._turn = threading.Semaphore(_MOST)
        self._mine = threading.local()

    @contextmanager
    def working(self) -> Iterator[None]:
        """Work when it is this thread's turn; it must not wait for another thread that works."""
        with self._turn:
            self._mine.held = True
            try:
                yield
            finally:
                self._mine.held = False

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Let others work while this thread waits for a process."""
        if not getattr(self._mine, "held", False):
            yield
            return
        self._mine.held = False
        self._turn.release()
        try:
            yield
        finally:
            self._turn.acquire()
            self._mine.held = True
