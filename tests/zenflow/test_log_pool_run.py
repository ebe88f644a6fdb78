"""The log's pool through a training run: within the plan, and in few pieces, though the order of draining differs."""

from __future__ import annotations

import random
from collections import deque
from dataclasses import dataclass, field

import pytest
import torch
from torch import nn

from tests.zenflow.small import has_room
from zenflow import ZenFlowConfig
from zenflow.host.log_pool import Extents, LogPool
from zenflow.host.places import padded
from zenflow.layout import plan_model

STEPS = 4
WINDOWS = 50


def bucket_sizes(*, layers: int, hidden: int, kv: int, inner: int, vocabulary: int, bucket_bytes: int) -> list[int]:
    """Bytes of an entry of each bucket of a transformer in bf16, in forward order; the head is not tied."""
    layer = [(hidden, hidden), (kv, hidden), (kv, hidden), (hidden, hidden), (inner, hidden), (inner, hidden)]
    shapes = [(vocabulary, hidden), *(layers * [*layer, (hidden, inner)]), (vocabulary, hidden)]
    parameters = [nn.Parameter(torch.empty(shape, dtype=torch.bfloat16, device="meta")) for shape in shapes]
    plan = plan_model(parameters, ZenFlowConfig(update_interval=STEPS, bucket_bytes=bucket_bytes), set())
    return [(high - low) * weight.rows * 2 for weight in plan.weights for low, high in weight.bucket_slots]


MODELS = {
    "1b": bucket_sizes(layers=16, hidden=2048, kv=512, inner=8192, vocabulary=128256, bucket_bytes=1 << 25),
    # Its head has buckets more than twice as large as any other.
    "1b, large buckets": bucket_sizes(
        layers=16, hidden=2048, kv=512, inner=8192, vocabulary=128256, bucket_bytes=1 << 26
    ),
    "tiny": bucket_sizes(layers=4, hidden=64, kv=16, inner=256, vocabulary=1000, bucket_bytes=1 << 14),
}


@dataclass
class Run:
    """Windows are filled in backward order while those before them are drained in forward order."""

    sizes: list[int]
    promises: bool = True
    drains: float = 0.0
    """Chance that the host is through with a bucket while the next entry is taken; 0: not before it must be."""
    seed: int = 0
    pieces: list[int] = field(default_factory=list)
    most_free_bytes: int = 0

    def __post_init__(self) -> None:
        memory = torch.empty(2 * max(self.sizes), dtype=torch.uint8)  # shared: only sizes matter here
        sizes = [padded(size) for size in self.sizes]
        self.pool = LogPool(STEPS * (sum(sizes) + max(sizes)), lambda nbytes: memory[:nbytes])
        self.chance = random.Random(self.seed)
        self.draining: deque[list[Extents]] = deque()
        self.drained = 0
        for _ in range(WINDOWS):
            self.fill()

    def drain(self) -> None:
        if self.draining:
            for extents in self.draining.popleft():
                self.pool.give(extents)
            self.drained += 1

    def fill(self) -> None:
        log: list[list[Extents]] = [[] for _ in self.sizes]
        for step in range(STEPS):
            while self.draining and self.drained * STEPS < step * len(self.sizes):
                self.drain()  # what is due
            for bucket in reversed(range(len(self.sizes))):
                while self.draining and self.chance.random() < self.drains:
                    self.drain()
                waited = False
                while not has_room(self.pool, self.sizes[bucket]):
                    assert self.draining, "a take waits for what nobody gives back"
                    self.drain()
                    waited = True
                if waited:
                    free_bytes = self.pool.capacity_bytes - self.pool.taken_bytes
                    self.most_free_bytes = max(self.most_free_bytes, free_bytes)
                log[bucket].append(self.pool.take(self.sizes[bucket], timeout_s=0))
                self.pieces.append(len(log[bucket][-1].views))
        while self.draining:
            self.drain()
        self.draining.extend(log)
        self.drained = 0
        if self.promises:
            for extents in (extents for entries in log for extents in entries):
                self.pool.promise(extents)

    @property
    def mean_pieces(self) -> float:
        return sum(self.pieces) / len(self.pieces)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("drains", [0.0, 1 / STEPS], ids=["host late", "host keeps up"])
def test_a_run_stays_within_its_plan_and_in_few_pieces(name: str, drains: float) -> None:
    sizes = MODELS[name]
    seed = random.randrange(1 << 30)
    print(f"seed {seed}")
    run = Run(sizes, drains=drains, seed=seed)
    print(f"{run.mean_pieces:.3f} pieces on average, at most {max(run.pieces)}")
    assert run.pool.peak_allocated_bytes <= STEPS * (sum(map(padded, sizes)) + padded(max(sizes)))
    assert run.mean_pieces < 2.5
    assert max(run.pieces) <= 30
    # Waiting for fewer pieces does not make the training thread wait for all of the window before.
    assert run.most_free_bytes <= run.pool.capacity_bytes / 32 + STEPS * max(sizes)


def test_a_run_without_promises_stays_within_its_plan() -> None:
    sizes = MODELS["tiny"]
    run, promising = Run(sizes, promises=False), Run(sizes)
    assert run.pool.peak_allocated_bytes <= STEPS * (sum(map(padded, sizes)) + padded(max(sizes)))
    assert run.mean_pieces > 2 * promising.mean_pieces  # else promises are not worth their lines
