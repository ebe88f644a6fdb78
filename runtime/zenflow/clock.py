"""The clock for all waits and measurements: the machine's own, unless a device brings a simulated one."""

from __future__ import annotations

import queue
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol, TypeVar

T = TypeVar("T")


class Event(Protocol):
    """What is used of `threading.Event`."""

    def is_set(self) -> bool:
        """Whether it has happened."""

    def set(self) -> None:
        """Say that it has happened; safe in a finalizer."""

    def clear(self) -> None:
        """Wait for it anew."""

    def wait(self, timeout: float | None = None) -> bool:
        """Block until it has happened or the time (seconds) is over; whether it has happened."""


class Queue(Protocol[T]):
    """What is used of `queue.SimpleQueue`."""

    def put(self, item: T) -> None:
        """Add an item; safe in a finalizer."""

    def get(self) -> T:
        """Block until there is an item, and take the oldest."""


class Condition(Protocol):
    """What is used of `threading.Condition`."""

    def __enter__(self) -> bool: ...

    def __exit__(self, *details: Any) -> None: ...

    def notify_all(self) -> None:
        """Wake all that wait; entered."""

    def wait(self, timeout: float | None = None) -> bool:
        """Leave, block until woken or the time (seconds) is over, and enter again; whether it was woken."""

    def wait_for(self, predicate: Callable[[], T], timeout: float | None = None) -> T:
        """Wait until a predicate holds or the time (seconds) is over; its last value."""


class Thread(Protocol):
    """What is used of `threading.Thread`."""

    def start(self) -> None:
        """Begin."""

    def is_alive(self) -> bool:
        """Whether it has begun and not ended."""

    def join(self, timeout: float | None = None) -> None:
        """Block until it has ended or the time (seconds) is over."""


class Clock(ABC):
    """Tells the time, and makes everything that threads wait with."""

    simulated: bool
    poll_s: float
    """The limit for a wait after which one looks whether those waited for still live."""

    @abstractmethod
    def now(self) -> float:
        """Seconds since some moment."""

    @abstractmethod
    def sleep_until(self, moment_s: float) -> None:
        """Block until `now` is at least that."""

    def sleep(self, seconds: float) -> None:
        """Block for a time."""
        self.sleep_until(self.now() + seconds)

    @abstractmethod
    def event(self, name: str) -> Event:
        """A new event; its name is for messages."""

    @abstractmethod
    def queue(self, name: str) -> Queue[Any]:
        """A new queue."""

    @abstractmethod
    def condition(self, name: str) -> Condition:
        """A new condition."""

    @abstractmethod
    def thread(self, target: Callable[[], object], name: str) -> Thread:
        """A new daemon thread, which takes part until it ends."""

    @abstractmethod
    def outside(self) -> AbstractContextManager[None]:
        """While it lasts the calling thread takes no part, as it waits for what knows nothing of this clock."""


class RealClock(Clock):
    """The machine's: `time.monotonic` and the standard library."""

    simulated = False
    poll_s = 0.2

    def now(self) -> float:
        return time.monotonic()

    def sleep_until(self, moment_s: float) -> None:
        while (left := moment_s - time.monotonic()) > 0:
            time.sleep(left)

    def event(self, name: str) -> Event:
        return threading.Event()

    def queue(self, name: str) -> Queue[Any]:
        return queue.SimpleQueue()

    def condition(self, name: str) -> Condition:
        return threading.Condition()

    def thread(self, target: Callable[[], object], name: str) -> Thread:
        return threading.Thread(target=target, name=name, daemon=True)

    def outside(self) -> AbstractContextManager[None]:
        return nullcontext()


REAL_CLOCK = RealClock()
