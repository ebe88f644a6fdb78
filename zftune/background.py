"""Work beside a training, in a thread that ends with the process."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Generic, TypeVar, cast

from zenflow.clock import REAL_CLOCK, Clock

T = TypeVar("T")


@contextmanager
def taking_time(clock: Clock, takes_s: float | None) -> Iterator[None]:
    """The body takes `takes_s` of a simulated clock, which stands still meanwhile; None: the real duration."""
    began_s = time.monotonic()
    try:
        yield
    finally:
        if clock.simulated:
            clock.sleep(time.monotonic() - began_s if takes_s is None else takes_s)


class Background(Generic[T]):
    """Begins `work` at once; its thread ends with the process. `takes_s`: simulated time; None: the real duration."""

    def __init__(
        self, work: Callable[[], T], name: str, clock: Clock = REAL_CLOCK, takes_s: float | None = None
    ) -> None:
        self._work, self._clock, self._takes_s = work, clock, takes_s
        self._result: T | None = None
        self._error: Exception | None = None
        self._thread = clock.thread(self._run, name)
        self._thread.start()
        self.join = self._thread.join

    @property
    def done(self) -> bool:
        return not self._thread.is_alive()

    @property
    def failed(self) -> bool:
        return self._error is not None

    @property
    def result(self) -> T:
        """Ask when it is done. Raises what the work raised."""
        if self._error is not None:
            raise self._error
        return cast("T", self._result)

    def _run(self) -> None:
        try:
            with taking_time(self._clock, self._takes_s):
                self._result = self._work()
        except Exception as error:  # noqa: BLE001 - whoever asks for the result gets it
            self._error = error
