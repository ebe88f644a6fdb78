"""A thread that does something at a steady rate until it is stopped."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator

MAX_RATE_HZ = 20.0
_JOIN_S = 5.0


class Ticker:
    """Runs `body` in a thread of its own.

    Args:
        body: gets an iterator that yields at every tick, at once, then at the rate, then once more on `stop`. It opens
            what it needs before the first tick and closes it after the last.
        rate_hz: ticks a second, above 0 and at most 20. A tick that takes too long delays the next; none is made up.
        name: of the thread.

    Raises:
        ValueError: the rate is not allowed.
    """

    def __init__(self, body: Callable[[Iterator[None]], None], *, rate_hz: float, name: str) -> None:
        if not 0 < rate_hz <= MAX_RATE_HZ:
            raise ValueError(f"rate_hz is {rate_hz}, allowed is a number above 0 and at most {MAX_RATE_HZ:g}")
        self._body = body
        self._period_s = 1 / rate_hz
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self.failure: str | None = None
        """Why the thread ended early or does not end."""

    @property
    def stopping(self) -> bool:
        """Whether this tick is the last."""
        return self._stopping.is_set()

    def start(self) -> None:
        """Start the thread; once."""
        self._thread.start()

    def stop(self) -> None:
        """Let the thread make its last tick and wait for its end, at most 5 s: a driver may hang."""
        self._stopping.set()
        if self._thread.ident is not None:
            self._thread.join(_JOIN_S)
        if self._thread.is_alive():
            self.failure = f"the sampler has not answered for {_JOIN_S:g} s"

    def _run(self) -> None:
        try:
            self._body(self._ticks())
        except Exception as error:  # noqa: BLE001 - a sampler must not end what it watches; the reason is kept
            self.failure = f"the sampler failed: {type(error).__name__}: {error}"

    def _ticks(self) -> Iterator[None]:
        due_s = time.monotonic()
        while not self._stopping.is_set():
            yield
            due_s = max(due_s + self._period_s, time.monotonic())
            self._stopping.wait(due_s - time.monotonic())
        yield
