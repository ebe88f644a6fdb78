"""The host's work in the native engine (csrc/): threads of their own, which never hold the GIL."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from types import ModuleType
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray

from zenflow.device import HostSpan
from zenflow.errors import HostEngineError, HostThreadsError
from zenflow.host.backend import Backend
from zenflow.host.tasks import LogEntry, ReadMasters, Targets, Task, Update
from zenflow.rules import Hyper, Rule
from zenflow.state import ColumnState

if TYPE_CHECKING:
    from zenflow import _native

_DTYPES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}
_POLL_S = 1.0


def load_native() -> ModuleType:
    """The native module; raises HostEngineError if it is missing or cannot be loaded."""
    try:
        from zenflow import _native
    except ImportError as error:
        raise HostEngineError(f"zenflow's native module cannot be loaded ({error}); reinstall zftune") from error
    return _native


class NativeBackend(Backend):
    """Hands tasks to the engine's threads as addresses, and keeps what is behind them alive."""

    name = "native"

    def __init__(self, native: ModuleType, cpus: list[int]) -> None:
        """Start the threads; raises HostEngineError if they could not be started."""
        self._native = native
        self.engine = self._start_threads(cpus)
        self.threads = len(cpus)
        self._numbers = itertools.count(1)
        self._states: dict[int, tuple[Rule, ColumnState]] = {}
        self._weights: dict[int, int] = {}  # the engine's own numbers
        self._held: dict[int, Task] = {}

    @property
    def alive(self) -> bool:
        return self.engine.alive

    def allocate(self, nbytes: int, interval_bytes: int) -> NDArray[np.uint8]:
        try:
            return self.engine.allocate(nbytes, interval_bytes)
        except MemoryError:
            raise MemoryError(f"the host engine could not get {nbytes} bytes of host memory") from None
        except RuntimeError as error:
            raise HostEngineError(str(error)) from error

    def register(self, rule: Rule, state: ColumnState) -> int:
        handle = next(self._numbers)
        self._states[handle] = rule, state
        self._weights[handle] = _register(self.engine, rule, state)
        return handle

    def forget(self, handle: int) -> None:
        del self._states[handle], self._weights[handle]

    def prepare(self, cpus: list[int]) -> Callable[[], None]:
        engine = self._start_threads(cpus)

        def change() -> None:
            self._weights = {handle: _register(engine, *known) for handle, known in self._states.items()}
            before, self.engine = self.engine, engine
            self.threads = len(cpus)
            before.close()

        return change

    def start(self, task: Task) -> int:
        ticket = self._submit(task)
        self._held[ticket] = task
        return ticket

    def finish(self, ticket: int) -> HostSpan:
        try:
            while (span := self.engine.wait(ticket, _POLL_S)) is None:
                pass
        finally:
            del self._held[ticket]
        return HostSpan(*span)

    def stop(self) -> None:
        self.engine.stop()

    def close(self) -> None:
        self.engine.close()

    def _start_threads(self, cpus: list[int]) -> _native.Engine:
        try:
            engine: _native.Engine = self._native.Engine(cpus)
        except RuntimeError as error:
            raise HostThreadsError(f"the host engine could not start {len(cpus)} threads: {error}") from error
        return engine

    def _submit(self, task: Task) -> int:
        handle = self._weights[task.columns.handle]
        if isinstance(task, Update):
            return self.engine.update(
                handle,
                [self._part(part) for part in task.parts],
                mean=None if task.closing is None else (task.closing.numbers, _decay(task.parts[0])),
                weights=None if task.weights is None else (task.weights.data_ptr(), _DTYPES[task.weights.dtype]),
                packed=None if task.packed is None else task.packed.data_ptr(),
                coast=task.coast(),
            )
        if isinstance(task, ReadMasters):
            dtype = _DTYPES[task.weights.dtype]
            return self.engine.read(
                handle, task.slots.start, len(task.slots), task.weights.data_ptr(), dtype, task.keep
            )
        return self.engine.unpack(handle, task.slots.numpy(), task.packed.data_ptr())

    def _part(self, part: Targets) -> _native.Part:
        entries = []
        for entry, rows in part.entries:
            factor, counts = entry.live()
            if counts:
                entries.append(self._entry(entry, factor, rows))
        native: _native.Part = self._native.Part(
            part.slots.start if isinstance(part.slots, range) else 0,
            len(part.slots),
            entries,
            None if isinstance(part.slots, range) else part.slots.numpy(),
            None if part.out is None else part.out.numpy(),
        )
        return native

    def _entry(self, entry: LogEntry, factor: float, rows: torch.Tensor | None) -> _native.Entry:
        native: _native.Entry = self._native.Entry(
            [(piece.data_ptr(), piece.numel()) for piece in entry.gradient.pieces()],
            _DTYPES[entry.gradient.dtype],
            _hyper(entry.hyper),
            factor,
            None if rows is None else rows.numpy(),
        )
        return native


def _register(engine: _native.Engine, rule: Rule, state: ColumnState) -> int:
    columns, rows = state.master.shape
    moments = [moment.data_ptr() for moment in state.moments]
    return engine.register(rule.name, columns, rows, state.master.data_ptr(), moments, state.count.data_ptr())


def _hyper(hyper: Hyper) -> tuple[tuple[float, ...], float]:
    return hyper.numbers, hyper.decay


def _decay(part: Targets) -> float:
    """Product of the decay factors of the entries that count, in order; the same for every part of a weight."""
    decay = 1.0
    for entry, _ in part.entries:
        if entry.live()[1]:
            decay *= entry.hyper.decay
    return decay
