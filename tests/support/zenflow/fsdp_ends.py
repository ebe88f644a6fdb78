"""A training over FSDP2 that saves as it goes, a rank of which is ended from outside; and what goes on from there."""

from __future__ import annotations

import os
import resource
import signal
import sys
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch

from tests.support.zenflow.fsdp_cases import CLIPPED, Case, Odd, Run, loss_of, model_of, sharded, tokens_of
from zenflow import distributed

CASE = Case(replace(CLIPPED, ledger=False, update_interval=2))
LAST, EVERY = 24, 2
"""Steps, and how many there are between two checkpoints."""
FOLDER = "ZENFLOW_TEST_ENDS"
"""The environment's: where the checkpoint is."""
TIMEOUT = timedelta(seconds=12)
"""After which a rank gives up the others."""


class Shared(Run):
    """Each rank has a share of the batch, not always an equal one; gradients are those of the whole batch's mean."""

    def __init__(self, model: Odd, rank: int, size: int) -> None:
        super().__init__(CASE, model, slice(None))
        self._rows = torch.arange(len(tokens_of(0, 0))).tensor_split(size)[rank]
        self._weight = len(self._rows) * size / len(tokens_of(0, 0))

    def step(self, number: int) -> None:
        self.optimizer.zero_grad()
        (loss_of(self.model, tokens_of(number, 0)[self._rows], recompute=False) * self._weight).backward()
        self.optimizer.step()


def train() -> None:
    """The life of a rank that a launcher has begun."""
    signal.signal(signal.SIGUSR1, lambda *_: _exhaust())
    torch.set_num_threads(1)
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    store = f"file://{os.environ[FOLDER]}/store"
    torch.distributed.init_process_group("gloo", init_method=store, rank=rank, world_size=size, timeout=TIMEOUT)
    run = Shared(sharded(model_of()), rank, size)
    for number in range(1, LAST + 1):
        run.step(number)
        if number % EVERY == 0:
            distributed.save(run.model, run.optimizer, checkpoint())
        print(f"step {number}", flush=True)
    sys.stdout.flush()
    os._exit(0)


def _exhaust() -> None:
    """From now on this process gets no more memory."""
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used, used))


def checkpoint() -> Path:
    """Where the training saves."""
    return Path(os.environ[FOLDER]) / "checkpoint"


def resumed(rank: int) -> dict[str, Any]:
    """Go on from the checkpoint to the end, on as many ranks as there are now."""
    size = torch.distributed.get_world_size()
    run = Shared(sharded(model_of()), rank, size)
    distributed.load(run.model, run.optimizer, checkpoint())
    begun = run.optimizer.steps
    for number in range(begun + 1, LAST + 1):
        run.step(number)
    run.optimizer.flush()
    weights = run.weights()
    run.optimizer.abandon()
    return {"begun": begun, "weights": weights}


def undisturbed() -> dict[str, torch.Tensor]:
    """What one process makes of it."""
    run = Shared(model_of(), 0, 1)
    for number in range(1, LAST + 1):
        run.step(number)
    run.optimizer.close()
    return run.weights()


WORK: dict[str, Callable[[int], Any]] = {"resumed": resumed}
