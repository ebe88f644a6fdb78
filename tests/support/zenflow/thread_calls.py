"""Counts the calls that a thread makes: functions of Python, of C, and operations of torch."""

from __future__ import annotations

import gc
import sys
import threading
from collections import Counter
from pathlib import Path
from types import FrameType
from typing import Any
from weakref import finalize

from torch.utils._python_dispatch import TorchDispatchMode

from zenflow.host.engine import Job

_LEFT_OUT = (threading.__file__, str(Path(__file__).parent))
"""Waits and the code that only measures."""


_EITHER_THREAD = (finalize.__call__.__code__, Job._send.__code__)
"""Functions that the training thread or one of the host engine's runs, whichever comes last."""


class PythonCalls:
    """Counts calls by the thread that has entered it.

    What depends on timing is left out: waits, calls that another thread may make instead, the collection of garbage.

    Args:
        found: calls of Python functions, by file and function.
        builtins: calls of C functions, by name.
    """

    def __init__(self, found: Counter[str], builtins: Counter[str]) -> None:
        self._found = found
        self._builtins = builtins
        self._skipped: FrameType | None = None

    def __enter__(self) -> None:
        gc.disable()
        sys.setprofile(self._profile)

    def __exit__(self, *_: object) -> None:
        sys.setprofile(None)
        gc.enable()

    def _profile(self, frame: FrameType, event: str, argument: Any) -> None:
        code = frame.f_code
        if self._skipped is not None:
            if event == "return" and frame is self._skipped:
                self._skipped = None
        elif event == "call" and code in _EITHER_THREAD:
            self._skipped = frame
        elif code.co_filename.startswith(_LEFT_OUT):
            return
        elif event == "call":
            self._found[f"{Path(code.co_filename).name}:{code.co_qualname}"] += 1
        elif event == "c_call":
            self._builtins[argument.__qualname__] += 1


class TorchCalls(TorchDispatchMode):
    """Counts operations of torch by the thread that has entered it, views included.

    Args:
        found: counted here, by name.
    """

    def __init__(self, found: Counter[str]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._found = found

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self._found[func._schema.name.removeprefix("aten::")] += 1
        return func(*args, **(kwargs or {}))
