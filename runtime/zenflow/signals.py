"""Signals that wait: a step that Ctrl-C tears in two leaves an optimizer that nobody could save."""

from __future__ import annotations

import signal
import threading
from collections.abc import Sequence
from types import FrameType
from typing import Any

# Those whose Python handlers training scripts let raise; not the timers', which may be there to end what hangs.
_NAMES = ("SIGUSR1", "SIGUSR2", "SIGHUP", "SIGTERM", "SIGINT")
HELD = tuple(getattr(signal, name) for name in _NAMES if hasattr(signal, name))


class HeldSignals:
    """A context in which the main thread's Python signal handlers wait until it ends; they are called then.

    Other threads never run handlers. Contexts may be nested. A second Ctrl-C is not held: whoever insists may have to
    do with something that hangs.

    Args:
        numbers: which signals.
        patient: hold a second Ctrl-C too.
    """

    __slots__ = ("_before", "_came", "_numbers", "_patient")

    def __init__(self, numbers: Sequence[int] = HELD, *, patient: bool = False) -> None:
        self._numbers = numbers
        self._patient = patient
        self._before: dict[int, Any] = {}
        self._came: list[int] = []

    def __enter__(self) -> None:
        if threading.get_ident() != threading.main_thread().ident:
            return
        try:
            for number in self._numbers:
                handler = signal.getsignal(number)
                if callable(handler):
                    self._before[number] = handler
                    signal.signal(number, self._note)
        except BaseException:  # of a handler that was not replaced yet
            self._restore()
            raise

    def __exit__(self, *_: object) -> None:
        if not self._before:
            return
        try:
            self._restore()
        finally:
            self._restore()  # where a new signal's handler has raised meanwhile
            came, self._came = self._came, []
            for number in came:
                signal.raise_signal(number)

    def _restore(self) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _note(self, number: int, _: FrameType | None) -> None:
        insists = number == signal.SIGINT and number in self._came and not self._patient
        if number not in self._came:
            self._came.append(number)
        if insists:
            self._came.clear()
            self._restore()
            signal.raise_signal(number)
