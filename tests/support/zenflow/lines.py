"""Ctrl-C at a line that a test chooses: every moment at which one could come, without a clock."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator
from types import FrameType
from typing import Any

import pytest
import torch


class Lines:
    """Counts the lines of Python that the calling thread runs, and interrupts at one of them.

    It also interrupts where Python never calls a handler: between the body of a `with` and its end, which is then
    skipped. What torch keeps of that for the thread, and no later test could get rid of, is put back.

    Args:
        at: number of the line, from 1; None: none.
    """

    def __init__(self, at: int | None = None) -> None:
        self.count = 0
        self._at = at
        self._torch_functions = torch._C.DisableTorchFunctionSubclass()

    def __enter__(self) -> Lines:
        with self._torch_functions:
            pass  # it has noted what to go back to
        sys.settrace(self._trace)
        return self

    def __exit__(self, *_: object) -> None:
        sys.settrace(None)
        self._torch_functions.__exit__(None, None, None)

    def _trace(self, frame: FrameType, event: str, _: object) -> Any:
        if event == "line":
            self.count += 1
            if self.count == self._at:
                sys.settrace(None)
                signal.raise_signal(signal.SIGINT)
                return None
        return self._trace


@pytest.fixture
def raising() -> Iterator[None]:
    """The handler that Python has by default, whatever the tests were begun with."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)
