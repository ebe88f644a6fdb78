"""One piece of work in a thread of its own."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Generic, TypeVar, cast

T = TypeVar("T")


class Background(Generic[T]):
    """Begins at once; its thread ends with the process.

    Args:
        work: what is done.
        name: of the thread.
    """

    def __init__(self, work: Callable[[], T], name: str) -> None:
        self._work = work
        self._result: T | None = None
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
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
            self._result = self._work()
        except Exception as error:  # noqa: BLE001 - whoever asks for the result gets it
            self._error = error
