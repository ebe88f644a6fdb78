"""What a process needs of its own."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class OfProcess(Generic[T]):
    """A lock, say, and a new one in a forked child: its parent's may be held for ever, by a thread it has not got."""

    def __init__(self, make: Callable[[], T]) -> None:
        self._make = make
        self._process = os.getpid()
        self._own = make()

    def __call__(self) -> T:
        if self._process != os.getpid():
            self._own = self._make()
            self._process = os.getpid()
        return self._own
