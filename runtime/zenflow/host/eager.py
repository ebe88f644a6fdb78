"""The host's work in eager PyTorch: the fallback where there is no native module, and what that is compared with."""

from __future__ import annotations

import itertools
import time

import numpy as np
import torch
from numpy.typing import NDArray

from zenflow.device import HostSpan
from zenflow.host.backend import Backend
from zenflow.host.tasks import LogEntry, ReadMasters, Targets, Task, Unpack, Update
from zenflow.rules import Hyper, Rule
from zenflow.state import ColumnState, reread


class EagerBackend(Backend):
    """Does a task when it is waited for, in the thread that waits."""

    name = "eager"
    threads = 1

    def __init__(self) -> None:
        self._tasks: dict[int, Task] = {}
        self._tickets = itertools.count(1)
        self._stopped = False

    @property
    def alive(self) -> bool:
        return not self._stopped

    def allocate(self, nbytes: int, interval_bytes: int) -> NDArray[np.uint8]:
        return np.zeros(nbytes, dtype=np.uint8)  # of the heap, which a forked child has to have whole

    def register(self, rule: Rule, state: ColumnState) -> int:
        return 0

    def forget(self, handle: int) -> None:
        return None

    def start(self, task: Task) -> int:
        ticket = next(self._tickets)
        self._tasks[ticket] = task
        return ticket

    def finish(self, ticket: int) -> HostSpan:
        task = self._tasks.pop(ticket)
        if self._stopped:
            raise RuntimeError("the host engine was closed")
        begin_s = time.monotonic()
        with torch.inference_mode(False), torch.no_grad():
            _do(task)
        return HostSpan(begin_s, time.monotonic())

    def stop(self) -> None:
        self._stopped = True

    def close(self) -> None:
        self.stop()


def _do(task: Task) -> None:
    state = task.columns.state
    if isinstance(task, Update):
        for part in task.parts:
            _update(task, part)
    elif isinstance(task, ReadMasters):
        low, high = task.slots.start, task.slots.stop
        master = state.slice(low, high).master
        master.copy_(reread(master, task.weights) if task.keep else task.weights)
    elif isinstance(task, Unpack):
        state.unpack(task.slots, task.packed)


def _update(task: Update, part: Targets) -> None:
    everything, slots = task.columns.state, part.slots
    state = everything.slice(slots.start, slots.stop) if isinstance(slots, range) else everything.select(slots)
    gradients = [(entry, _rows(entry, index, state.master.shape[1], len(slots))) for entry, index in part.entries]
    coast = task.coast()
    ahead = apply_entries(state, task.columns.rule, gradients, task.closing, coast)
    if not isinstance(slots, range):
        everything.restore(slots, state)
    out = torch.arange(len(slots), device="cpu") if part.out is None else part.out
    if task.weights is not None:
        task.weights.index_copy_(0, out, (state.master if ahead is None else ahead).to(task.weights.dtype))
    if task.packed is not None:
        task.packed.index_copy_(0, out, state.pack(torch.arange(len(slots), device="cpu")))


def _rows(entry: LogEntry, index: torch.Tensor | None, rows: int, targets: int) -> torch.Tensor:
    packed = torch.cat(entry.gradient.pieces())
    matrix = packed.view(-1, rows) if rows else packed.view(targets, 0)
    return matrix if index is None else matrix.index_select(0, index)


def apply_entries(
    state: ColumnState,
    rule: Rule,
    gradients: list[tuple[LogEntry, torch.Tensor]],
    closing: Hyper | None,
    coast: float = 0.0,
) -> torch.Tensor | None:
    """Apply a window's entries to columns on the host, in place.

    `gradients` are the entries in order of their steps, each with its gradient of these columns, [n, rows]; those of
    skipped steps are passed over. `closing`: None replays them; else one update with the mean gradient (ZenFlow paper),
    with these hyperparameters and the product of the entries' decay factors. Returns the masters with so many more last
    updates as `coast` says; None: 0.
    """
    live = [(rows, entry.hyper, entry.live()[0]) for entry, rows in gradients if entry.live()[1]]
    if not live:
        return None
    ahead = torch.empty_like(state.master) if coast else None

    def replay(part: ColumnState, low: int, high: int) -> None:
        before = part.master
        for number, (gradient, hyper, factor) in enumerate(live, 1):
            if ahead is not None and number == len(live):
                before = part.master.clone()
            part.update(rule, _gradient(gradient[low:high], factor), hyper)
        if ahead is not None:
            ahead[low:high] = part.master + (part.master - before) * coast

    def mean(part: ColumnState, low: int, high: int) -> None:
        assert closing is not None
        total = _gradient(live[0][0][low:high], live[0][2]).clone()
        decay = live[0][1].decay
        for gradient, hyper, factor in live[1:]:
            total.add_(_gradient(gradient[low:high], factor))
            decay *= hyper.decay
        part.update(rule, total.div_(len(live)), closing, decay=decay)

    state.each_chunk(replay if closing is None else mean)
    return ahead


def _gradient(rows: torch.Tensor, factor: float) -> torch.Tensor:
    gradient = rows.float()
    return gradient if factor == 1.0 else gradient.mul(factor)
