"""A host engine whose tasks are functions, and waiting that fails instead of hanging."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from zenflow.device import HostSpan
from zenflow.host.backend import Backend
from zenflow.host.tasks import Task
from zenflow.rules import Rule
from zenflow.state import ColumnState

SOON_S = 30.0  # a hang, on however busy a machine


class Calls(Backend):
    """Tasks are functions."""

    name, threads = "calls", 1

    def __init__(self) -> None:
        self._tasks: dict[int, Any] = {}
        self.alive_flag = True

    @property
    def alive(self) -> bool:
        return self.alive_flag

    def allocate(self, nbytes: int, interval_bytes: int) -> NDArray[np.uint8]:
        return np.zeros(nbytes, dtype=np.uint8)

    def register(self, rule: Rule, state: ColumnState) -> int:
        return 0

    def forget(self, handle: int) -> None:
        raise AssertionError("no columns were registered")

    def start(self, task: Task) -> int:
        self._tasks[len(self._tasks)] = task
        return len(self._tasks) - 1

    def finish(self, ticket: int) -> HostSpan:
        if not self.alive_flag:
            raise RuntimeError("the host engine was closed")
        self._tasks[ticket]()
        return HostSpan()

    def stop(self) -> None:
        self.alive_flag = False

    def close(self) -> None:
        self.stop()


def within(seconds: float, work: Callable[[], object]) -> None:
    """Run `work` in a thread that may hang, and fail if it does."""
    errors: list[BaseException] = []

    def guarded() -> None:
        try:
            work()
        except BaseException as error:  # noqa: BLE001 - raised again below
            errors.append(error)

    thread = threading.Thread(target=guarded, daemon=True)
    thread.start()
    thread.join(seconds)
    assert not thread.is_alive(), "it hangs"
    if errors:
        raise errors[0]
