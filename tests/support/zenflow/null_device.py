"""A device whose kernels do nothing: what a step takes there is the training thread's own work.

All Python runs as on a GPU, the wrappers of Triton's kernels included, up to the launch. Memory is the host's; copies
are made at once, of tensors that are small.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes

import zenflow.runtime
from zenflow import ZenFlowAdamW, ZenFlowConfig
from zenflow.device import Arrived, Device, HostSpan, Mark, Transfer

UPDATE_INTERVAL, SELECT_INTERVAL = 4, 16
BUCKET_BYTES = 7 * 8 * 256 * 2
"""Of the seven matrices of a layer."""
KINDS = ("plain", "close", "selection")
"""Kinds of steps; "selection" is every step from a look at the selection to the close that exchanges its columns."""
PARTS = ("forward", "backward", "step", "zero_grad")


class NullDevice(Device):
    """Marks are numbers that have been passed. Calls of training threads are counted, a copy up when it is joined."""

    has_streams = True

    def __init__(self) -> None:
        self.torch_device = torch.device("cpu")
        self.calls: Counter[str] = Counter()
        self._number = 0

    def count(self, name: str) -> None:
        """Count a call, unless a thread of the host engine makes it."""
        if not threading.current_thread().name.startswith("zenflow-"):
            self.calls[name] += 1

    def host_empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        return torch.empty(tuple(shape), dtype=dtype)

    def mark(self) -> Mark:
        self.count("marks")
        self._number += 1
        return self._number

    def asked(self) -> Mark:
        return None

    def elapsed_s(self, begin: Mark, end: Mark) -> float:
        return 0.0

    def passed(self, mark: Mark) -> bool:
        return True

    def wait_for(self, mark: Mark) -> None:
        return None

    def d2h(self, source: Tensor, target: Tensor) -> Transfer:
        self.count("copies")
        target.copy_(source)
        return Arrived(self._number, source.nbytes)

    def h2d(self, source: Tensor, after: HostSpan, asked: Mark) -> tuple[Transfer, Tensor]:
        with _disable_current_modes():  # which thread calls this depends on timing
            return Arrived(self._number, source.nbytes), source.clone()

    def send(self, tensor: Tensor) -> Tensor:
        self.count("copies")
        return tensor.clone()

    def join(self, transfer: Transfer, tensor: Tensor) -> None:
        self.count("copies")


class SumsOf:
    """Random sums for kernels, by NumPy, so that no operation of torch is counted."""

    def __init__(self) -> None:
        self.wanted = True
        self._random = np.random.default_rng(0)

    def write(self, sums: Tensor) -> None:
        """Write other sums than the last ones, if they are wanted."""
        if self.wanted:
            sums.numpy()[...] = self._random.random(tuple(sums.shape), dtype=np.float32)


@contextmanager
def null_kernels(device: NullDevice) -> Iterator[SumsOf]:
    """Replace every kernel of Triton, and let optimizers on the CPU launch them."""
    from zenflow.kernels import triton_kernels
    from zenflow.kernels.launcher import Launcher
    from zenflow.kernels.triton_launch import TritonKernels

    sums = SumsOf()

    def launch(launcher: Launcher, _programs: int, _: torch.device, *args: Any, reaches: object = ()) -> None:
        device.count("launches")
        if launcher.kernel is triton_kernels.sum_partials:
            sums.write(args[-1])

    with ExitStack() as replaced:
        replaced.enter_context(mock.patch.object(Launcher, "__call__", launch))
        replaced.enter_context(mock.patch.object(zenflow.runtime, "kernels_for", return_value=TritonKernels()))
        yield sums


class Piece(nn.Module):
    """A weight whose gradient costs next to nothing."""

    def __init__(self, *shape: int) -> None:
        super().__init__()
        self.weight = nn.Parameter((torch.randn(shape) * 0.02).bfloat16())

    def forward(self, x: Tensor) -> Tensor:
        return x + self.weight.sum()


def pieces(matrices: int, vectors: int, rows: int = 8, columns: int = 256) -> nn.Sequential:
    """A model of matrices and vectors, the same each time; small, since what a GPU does is done by the thread here."""
    torch.manual_seed(0)
    return nn.Sequential(*(Piece(rows, columns) for _ in range(matrices)), *(Piece(columns) for _ in range(vectors)))


def optimizer_of(
    model: nn.Module, device: NullDevice, *, select_interval: int = SELECT_INTERVAL, bucket_bytes: int = BUCKET_BYTES
) -> ZenFlowAdamW:
    """The setting whose costs are known: 5% of the columns selected, windows of four steps."""
    config = ZenFlowConfig(
        topk_ratio=0.05,
        update_interval=UPDATE_INTERVAL,
        select_interval=select_interval,
        bucket_bytes=bucket_bytes,
        host_threads=1,
    )
    return ZenFlowAdamW(model.parameters(), lr=1e-5, config=config, module=model, device=device)


def kind_of(step: int, *, select_interval: int = SELECT_INTERVAL) -> str:
    """The kind of a step, counted from 1."""
    if step % select_interval <= UPDATE_INTERVAL:
        return "selection"
    return "plain" if step % UPDATE_INTERVAL else "close"


Watch = Callable[[str, Callable[[], Any]], None]
"""Runs a part of a step, and measures it."""


def train_step(model: nn.Module, optimizer: torch.optim.Optimizer, inputs: Tensor, watch: Watch) -> None:
    """One step on the CPU's own thread, its parts watched."""
    losses: list[Tensor] = []
    watch("forward", lambda: losses.append(model(inputs).sum()))
    watch("backward", losses[0].backward)
    watch("step", optimizer.step)
    watch("zero_grad", optimizer.zero_grad)


@contextmanager
def autograds_thread(watch: Watch) -> Iterator[Watch]:
    """Watch "backward" in a thread of its own, as autograd has one for a GPU."""
    with ThreadPoolExecutor(1, "autograd") as pool:

        def watched(part: str, function: Callable[[], Any]) -> None:
            if part == "backward":
                pool.submit(watch, part, function).result()
            else:
                watch(part, function)

        yield watched
