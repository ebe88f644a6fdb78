"""One piece of work in a thread of its own, and the simulated time that it takes."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Generic, TypeVar, cast

from zenflow.clock import REAL_CLOCK, Clock

T = TypeVar("T")


@contextmanager
def taking_time(clock: Clock, takes_s: float | None) -> Iterator[None]:
    """What is done inside takes time by a clock: on a simulated one it stands still meanwhile, and then moves on.

    Args:
        clock: of the training.
        takes_s: in simulated time; None: what it really took.
    """
    began_s = time.monotonic()
    try:
        yield
    finally:
        if clock.simulated:
            clock.sleep(time.monotonic() - began_s if takes_s is None else takes_s)


class Background(Generic[T]):
    """Begins at once; its thread ends with the process.

    Args:
        work: what is done.
        name: of the thread.
        clock: of the training.
        takes_s: in simulated time; None: what it really took.
    """

    def __init__(
        self, work: Callable[[], T], name: str, clock: Clock = REAL_CLOCK, takes_s: float | None = None
    ) -> None:
        self._work, self._clock, self._takes_s = work, clock, takes_s
        self._result: T | None = None
        self._error: Exception | None = None
        self._thread = clock.thread(self._run, name)
        self._thread.start()

    @property
    def done(self) -> bool:
        """Whether it is over."""
        return not self._thread.is_alive()

    @property
    def failed(self) -> bool:
        """Whether the work raised."""
        return self._error is not None

    @property
    def result(self) -> T:
        """What came of it; ask when it is done. Raises what the work raised."""
        if self._error is not None:
            raise self._error
        return cast("T", self._result)

    def join(self, most_s: float) -> None:
        """Wait for its end, so many seconds at most."""
        self._thread.join(most_s)

    def _run(self) -> None:
        try:
            with taking_time(self._clock, self._takes_s):
                self._result = self._work()
        except Exception as error:  # noqa: BLE001 - whoever asks for the result gets it
            self._error = error
