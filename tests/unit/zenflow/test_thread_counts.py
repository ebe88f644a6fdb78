"""What a step takes of the training thread, counted: launches, copies, marks, operations of torch, calls of Python.

A ceiling is what the runtime needed when it was set, rounded up: lower it with what it needs, never raise it.
"""

from __future__ import annotations

import functools
from collections import Counter, defaultdict
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, NamedTuple

import pytest
import torch

from tests.support.zenflow.null_device import (
    SELECT_INTERVAL,
    NullDevice,
    autograds_thread,
    kind_of,
    null_kernels,
    optimizer_of,
    pieces,
    train_step,
)
from tests.support.zenflow.thread_calls import PythonCalls, TorchCalls
from zenflow import ZenFlowAdamW

pytest.importorskip("triton", reason="Triton cannot be imported here")


class Counts(NamedTuple):
    launches: float
    """Of Triton's kernels; operations of torch are in the fourth column."""
    copies: float
    marks: float
    torch: float
    python: float


A_WEIGHT = {
    "forward": Counts(0, 0, 0, 0, 7),
    "hooks": Counts(0, 0, 0, 5.5, 21),
    "plain": Counts(0, 0, 0, 9, 72),
    "close": Counts(0, 0, 0, 5, 38),
    "selection": Counts(0, 2, 2, 90, 235),
}
"""Ceilings for a matrix and a quarter of a vector; the last three are of `step()`, by the kind of the step."""
BESIDE = {
    "forward": Counts(0, 0, 0, 0, 0),
    "hooks": Counts(2, 2, 0, 16, 110),
    "plain": Counts(4, 5, 3, 66, 375),
    "close": Counts(4, 4, 2, 30, 300),
    "selection": Counts(5, 5, 4, 34, 335),
}
"""Ceilings for what a step takes besides, however many weights there are."""
MATRICES = 4
PLAIN_STEP = 2 * SELECT_INTERVAL - 1
Found = dict[tuple[int, str], Counts]
"""By step and part."""


def counted(matrices: int, *, python: bool, offloads: bool) -> Found:
    """Counts over a period of selections.

    Args:
        matrices: of the model, which has a quarter as many vectors.
        python: count calls of Python; else operations of torch, since counting those calls Python.
        offloads: False: the model alone.
    """
    device = NullDevice()
    model = pieces(matrices, matrices // 4)
    found: Found = {}

    def watch(part: str, function: Callable[[], Any]) -> None:
        operations, calls = Counter[str](), Counter[str]()
        device.calls.clear()
        tool = PythonCalls(calls, Counter()) if python else TorchCalls(operations)
        with tool if step > SELECT_INTERVAL else nullcontext():
            function()
        launches, copies, marks = (device.calls[name] for name in ("launches", "copies", "marks"))
        found[step, part] = Counts(launches, copies, marks, operations.total(), calls.total())

    with null_kernels(device), autograds_thread(watch) as watched:
        optimizer = (
            optimizer_of(model, device, bucket_bytes=1 << 20)
            if offloads
            else torch.optim.SGD(model.parameters(), lr=0.0)
        )
        for step in range(1, 2 * SELECT_INTERVAL + 1):  # noqa: B007 - watch() reads it
            train_step(model, optimizer, torch.zeros(()), watched)
            if isinstance(optimizer, ZenFlowAdamW):
                optimizer._training.engine.drain()  # whether host work is late depends on the machine
        if isinstance(optimizer, ZenFlowAdamW):
            optimizer.abandon()
    return {place: counts for place, counts in found.items() if place[0] > SELECT_INTERVAL}


@functools.cache
def counts_of(matrices: int) -> Found:
    """All counts; those of passes without what the model alone takes."""
    by_torch, by_python, torch_alone, python_alone = (
        counted(matrices, python=python, offloads=offloads) for offloads in (True, False) for python in (False, True)
    )
    found = {}
    for place, counts in by_torch.items():
        alone = place[1] in ("forward", "backward")
        found[place] = counts._replace(
            torch=counts.torch - alone * torch_alone[place].torch,
            python=by_python[place].python - alone * python_alone[place].python,
        )
    return found


def most(matrices: int) -> dict[str, Counts]:
    """By row of the tables, the largest counts of a step."""
    rows: dict[str, list[Counts]] = defaultdict(list)
    for (step, part), counts in counts_of(matrices).items():
        row = {"forward": "forward", "backward": "hooks", "step": kind_of(step)}.get(part)
        if row is not None:
            rows[row].append(counts)
    return {row: Counts(*map(max, zip(*counts, strict=True))) for row, counts in rows.items()}


@pytest.mark.parametrize("row", A_WEIGHT)
def test_counts_of_a_step(row: str) -> None:
    few, more = most(MATRICES)[row], most(2 * MATRICES)[row]
    a_weight = Counts(*((b - a) / MATRICES for a, b in zip(few, more, strict=True)))
    beside = Counts(*(a - MATRICES * each for a, each in zip(few, a_weight, strict=True)))
    assert all(count <= ceiling for count, ceiling in zip(a_weight, A_WEIGHT[row], strict=True)), a_weight
    assert all(count <= ceiling for count, ceiling in zip(beside, BESIDE[row], strict=True)), beside


@pytest.mark.parametrize("part", ["backward", "step"])
def test_more_weights_add_no_launch(part: str) -> None:
    few, more = (counts_of(matrices)[PLAIN_STEP, part] for matrices in (MATRICES, 2 * MATRICES))
    assert more.launches == few.launches


def test_calls_of_python_are_the_same_each_time() -> None:
    again = counted(MATRICES, python=True, offloads=True)
    assert {place: counts.python for place, counts in again.items() if place[1] == "step"} == {
        place: counts.python for place, counts in counts_of(MATRICES).items() if place[1] == "step"
    }
