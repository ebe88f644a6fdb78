"""Optimizers on the native engine whose threads are made to fail or to be late, and what they leave behind."""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from zenflow import ZenFlowAdamW, ZenFlowConfig
from zenflow.device import Device
from zenflow.host.native import NativeBackend

SOON_S = 30.0  # a hang, on however busy a machine
ROWS, COLUMNS, WEIGHTS = 40, 30, 4
ALL_DEFERRED: dict[str, Any] = {"topk_ratio": 0.0, "host_threads": 1, "bucket_bytes": 4 * ROWS * COLUMNS}
"""Each weight has a bucket of its own."""
MADE: weakref.WeakSet[ZenFlowAdamW] = weakref.WeakSet()
"""Optimizers that a failed test may have left open."""
CONFIGS = {
    "sync": ZenFlowConfig(update_interval=1, overlap_step=False, **ALL_DEFERRED),
    "in turn": ZenFlowConfig.zero_offload(host_threads=1, bucket_bytes=4 * ROWS * COLUMNS),
    "overlapped": ZenFlowConfig(update_interval=1, **ALL_DEFERRED),
    "windows": ZenFlowConfig(update_interval=3, **ALL_DEFERRED),
    "lagging": ZenFlowConfig(update_interval=3, apply_lag=1, **ALL_DEFERRED),
}


def make(parameters: Any, config: ZenFlowConfig, **arguments: Any) -> ZenFlowAdamW:
    optimizer = ZenFlowAdamW(parameters, lr=0.1, config=config, **arguments)
    MADE.add(optimizer)
    return optimizer


def engine_of(optimizer: ZenFlowAdamW) -> Any:
    backend = optimizer._training.engine.backend
    assert isinstance(backend, NativeBackend)
    return backend.engine


def thread_names() -> list[str]:
    """Of every thread of this process."""
    names = []
    for task in Path("/proc/self/task").iterdir():
        with suppress(OSError):  # it has just ended
            names.append((task / "comm").read_text().strip())
    return names


def os_threads() -> int:
    """But for those that share the kernels' loops, which are the process's as torch's own are."""
    return sum(name != "zenflow-kernels" for name in thread_names())


def engine_threads() -> int:
    """Of all native engines."""
    return thread_names().count("zenflow-engine")


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + SOON_S
    while not condition():
        assert time.monotonic() < deadline, "it never happens"
        time.sleep(0.002)


@contextmanager
def every_thread_ends() -> Iterator[None]:
    """Fails if there are more threads behind it than before."""
    torch.ones(1 << 20).add_(1)  # torch's own threads
    before = os_threads()
    yield
    for optimizer in list(MADE):
        optimizer.abandon()
    until(lambda: os_threads() <= before)


class Plain:
    """Weights with gradients that depend on the step alone; in the end each weight has moved once a step."""

    def __init__(self, config: ZenFlowConfig, device: Device | None = None) -> None:
        generator = torch.Generator().manual_seed(5)
        self.weights = [nn.Parameter(torch.randn(ROWS, COLUMNS, generator=generator)) for _ in range(WEIGHTS)]
        self.optimizer = make(self.weights, config, device=device)
        self.steps = 0

    def step(self) -> None:
        self.steps += 1
        generator = torch.Generator().manual_seed(self.steps)
        for weight in self.weights:
            weight.grad = torch.randn(ROWS, COLUMNS, generator=generator)
        self.optimizer.step()

    def values(self) -> list[Tensor]:
        return [weight.detach().clone() for weight in self.weights]

    def inject(self, kind: str, pieces: int = 0, seconds: float = 0.0) -> None:
        engine_of(self.optimizer).inject(kind, pieces, seconds, 0)
