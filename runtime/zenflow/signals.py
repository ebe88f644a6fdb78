"""Signals that wait: a step that Ctrl-C tears in two leaves an optimizer that nobody could save."""

from __future__ import annotations

# What the module signal wraps: these are called for each weight, and its enums cost five times as much.
import _signal  # type: ignore[import-not-found]
import functools
import signal
import threading
import time
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any, ClassVar, TypeVar, cast

import torch
from torch._C._dynamo.eval_frame import set_eval_frame

_Method = TypeVar("_Method", bound=Callable[..., Any])

# Those whose Python handlers training scripts let raise; not the timers', which may be there to end what hangs.
_NAMES = ("SIGUSR1", "SIGUSR2", "SIGHUP", "SIGTERM", "SIGINT")
HELD = tuple(int(getattr(signal, name)) for name in _NAMES if hasattr(signal, name))


PATIENCE_S = 10.0
"""How long a signal is held at most while what it would interrupt waits for the host."""


_MAIN = threading.main_thread().ident


class HeldSignals:
    """A context in which the main thread's Python signal handlers wait until it ends, and torch.compile traces nothing.

    Other threads never run handlers. Contexts may be nested. A second Ctrl-C is not held: whoever insists may have to
    do with something that hangs. Nor is one that `look_for_signals` finds waiting for too long.

    `patient`: hold a second Ctrl-C too, also where another context is around this one.
    """

    __slots__ = ("_before", "_came", "_inside", "_numbers", "_patient", "_since_s", "_tracer")

    _outermost: ClassVar[HeldSignals | None] = None
    _patient_inside: ClassVar[int] = 0

    def __init__(self, numbers: Sequence[int] = HELD, *, patient: bool = False) -> None:
        self._numbers = numbers
        self._patient = patient
        self._before: dict[int, Any] = {}
        self._came: list[int] = []
        self._since_s = 0.0
        self._inside = False

    def __enter__(self) -> None:
        self._tracer = set_eval_frame(None)  # of a train step that is compiled
        if threading.get_ident() != _MAIN:
            return  # handlers run in the main thread alone
        if HeldSignals._outermost is not None:  # which holds them already
            self._inside = self._patient
            HeldSignals._patient_inside += self._inside
            return
        try:
            for number in self._numbers:
                handler = _signal.getsignal(number)
                if callable(handler):
                    self._before[number] = handler
                    _signal.signal(number, self._note)
            HeldSignals._outermost = self
        except BaseException:  # of a handler that was not replaced yet
            self._restore()
            set_eval_frame(self._tracer)
            raise

    def __exit__(self, *_: object) -> None:
        set_eval_frame(self._tracer)
        HeldSignals._patient_inside -= self._inside
        if HeldSignals._outermost is not self:
            return
        HeldSignals._outermost = None  # while signals are held: their handlers may raise at any later line
        try:
            self._restore()
        finally:
            self._restore()  # where a new signal's handler has raised meanwhile
            self._deliver()

    def _restore(self) -> None:
        for number, handler in self._before.items():
            _signal.signal(number, handler)

    def _deliver(self) -> None:
        came, self._came = self._came, []
        for number in came:
            signal.raise_signal(number)

    def look(self) -> None:
        """Hold nothing any more if it has waited for `PATIENCE_S`."""
        if self._came and time.monotonic() - self._since_s >= PATIENCE_S:
            self._restore()
            self._deliver()

    def _note(self, number: int, _: FrameType | None) -> None:
        patient = self._patient or HeldSignals._patient_inside > 0
        insists = number == signal.SIGINT and number in self._came and not patient
        if not self._came:
            self._since_s = time.monotonic()
        if number not in self._came:
            self._came.append(number)
        if insists:
            self._restore()
            self._deliver()


def look_for_signals() -> None:
    """Called while the main thread waits for the host: let a signal through that is held for too long."""
    if HeldSignals._outermost is not None and threading.get_ident() == _MAIN:
        HeldSignals._outermost.look()


def undivided(method: _Method) -> _Method:
    """A method that is done as a whole, whatever signals come, and outside of autograd."""

    @functools.wraps(method)
    def whole(*args: Any, **kwargs: Any) -> Any:
        with HeldSignals(), torch.inference_mode(False), torch.no_grad():
            return method(*args, **kwargs)

    return cast(_Method, whole)
