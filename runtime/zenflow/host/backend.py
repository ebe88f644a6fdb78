"""Who does the host's work: the native engine, or PyTorch where there is none."""

from __future__ import annotations

import os
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from zenflow.device import HostSpan
from zenflow.errors import ConfigError, HostEngineError
from zenflow.host.tasks import Task
from zenflow.names import VARIABLES, did_you_mean, unread_variables
from zenflow.rules import Rule
from zenflow.state import ColumnState

MODES = ("require", "auto", "off")


class Backend(ABC):
    """Does tasks one after the other, in the order in which they were started.

    `start` and `finish` are called by one thread each; a task's memory must live until its `finish` has returned.
    """

    name: str
    threads: int

    @abstractmethod
    def allocate(self, nbytes: int, interval_bytes: int) -> NDArray[np.uint8]:
        """Zeroed memory, placed near the threads that will work on it.

        Each `interval_bytes` of it are worked on as a unit, and so shared out between the threads. Raises MemoryError
        if there is not as much, HostEngineError if the engine has failed.
        """

    @abstractmethod
    def register(self, rule: Rule, state: ColumnState) -> int:
        """Make columns known, whose memory must live as long as the backend; the number for `HostColumns.handle`."""

    @abstractmethod
    def forget(self, handle: int) -> None:
        """Let go of the memory of columns that no task will name again."""

    def prepare(self, cpus: list[int]) -> Callable[[], None]:
        """Get ready to work on other processors, with one thread on each.

        What it returns makes the change; to be called while no task is being done, once. Raises HostEngineError if the
        threads could not be started.
        """
        return lambda: None

    @abstractmethod
    def start(self, task: Task) -> int:
        """Begin a task, or queue it behind others; a ticket for `finish`. All its inputs have arrived.

        Raises RuntimeError if an earlier task failed.
        """

    @abstractmethod
    def finish(self, ticket: int) -> HostSpan:
        """Block until a task is done; it is forgotten then.

        Raises RuntimeError if it failed, or an earlier one did, or the backend was closed.
        """

    @property
    @abstractmethod
    def alive(self) -> bool:
        """Whether every thread runs."""

    @abstractmethod
    def stop(self) -> None:
        """Drop the tasks that have not begun. Any thread may call it."""

    @abstractmethod
    def close(self) -> None:
        """Stop, and end the threads."""


def choose_backend(cpus: list[int]) -> Backend:
    """The backend that `$ZENFLOW_NATIVE` asks for; `cpus` has the core of each thread, -1 for any.

    Raises ConfigError if the variable has a value that is not allowed, HostEngineError if it is "require" and there is
    no native module, or threads could not be started.
    """
    from zenflow.host.eager import EagerBackend
    from zenflow.host.native import NativeBackend, load_native

    for sentence in unread_variables(os.environ, "ZENFLOW_", VARIABLES):
        warnings.warn(sentence, stacklevel=2)
    mode = os.environ.get("ZENFLOW_NATIVE") or "auto"
    if mode not in MODES:
        raise ConfigError.of("ZENFLOW_NATIVE", mode, f"{' or '.join(MODES)}{did_you_mean(mode, MODES)}")
    if mode == "off":
        return EagerBackend()
    try:
        native = load_native()
    except HostEngineError as error:
        if mode == "require":
            raise
        warnings.warn(f"host updates run in PyTorch, several times slower: {error}", stacklevel=2)
        return EagerBackend()
    return NativeBackend(native, cpus)
