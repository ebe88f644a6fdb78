"""How many kernels and copies a step gives a GPU: each costs the training thread microseconds that no figure shows."""

from __future__ import annotations

import threading
from itertools import pairwise
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from tests.support.tiers import fast
from tests.support.zenflow.simulated_cuda import SimulatedCuda
from zenflow import ZenFlowAdamW, ZenFlowConfig
from zenflow.config import AUTO_SELECT_INTERVAL
from zenflow.deferred import DeferredTier

MOST_A_WEIGHT = 10
MOST_OF_ALL = 64
"""That do not depend on how many weights there are."""
WARM_UP = 3
"""Steps until the first window has closed and gradients leave during backward."""
CASES: dict[str, dict[str, Any]] = {
    "default": {},
    "max_grad_norm": {"max_grad_norm": 1.0, "skip_nonfinite": True},
    "zero-offload": {"topk_ratio": 0.0, "update_interval": 1, "overlap_step": False},
    "no-offload": {"offload_ratio": 0.0, "update_interval": 1, "overlap_step": False},
}


def model_of(gpu: SimulatedCuda, weights: int) -> nn.Module:
    """Matrices alone, of which a GPU sums the longer ones' columns in two launches: the dearest model there is."""
    torch.manual_seed(0)
    shapes = ((8, 200) if place % 2 else (200, 8) for place in range(weights))
    return nn.Sequential(*(nn.Linear(*shape, bias=False) for shape in shapes)).bfloat16().to(gpu.device)


def loss_of(gpu: SimulatedCuda, model: nn.Module) -> Tensor:
    loss: Tensor = model(torch.randn(4, 200).bfloat16().to(gpu.device)).float().square().mean()
    return loss


def given(gpu: SimulatedCuda, part: str) -> int:
    """Launches and copies."""
    counts = gpu.counted.pop(part)
    return counts.launches.total() + counts.copies.total()


def launches_a_step(gpu: SimulatedCuda, knobs: dict[str, Any], weights: int, *, clips: bool) -> float:
    """That the optimizer adds to a step, on average over a period of selections, with those of `clip_grad_norm_`."""
    model = model_of(gpu, weights)
    with gpu.part("alone"):
        loss_of(gpu, model).backward()
    alone = given(gpu, "alone")
    model.zero_grad()
    optimizer = ZenFlowAdamW(model.parameters(), config=ZenFlowConfig(**knobs), module=model)
    for step in range(WARM_UP + AUTO_SELECT_INTERVAL):
        if step == WARM_UP:
            gpu.counted.pop("step")
        with gpu.part("step"):
            loss_of(gpu, model).backward()
            if clips:
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
        optimizer.zero_grad()
    optimizer.close()
    return given(gpu, "step") / AUTO_SELECT_INTERVAL - alone


LAUNCHED = fast([("default", False)], all_of=[*((name, False) for name in CASES), ("default", True)])


@pytest.mark.smoke
@pytest.mark.simulated_cuda(kernels="triton", arrival=1.0)
@pytest.mark.parametrize(("name", "clips"), LAUNCHED)
def test_launches_of_a_step(gpu: SimulatedCuda, name: str, clips: bool) -> None:
    sizes = (2, 4, 8)
    launches = {weights: launches_a_step(gpu, CASES[name], weights, clips=clips) for weights in sizes}
    for few, more in pairwise(sizes):
        of_weight = (launches[more] - launches[few]) / (more - few)
        assert 0 <= of_weight <= MOST_A_WEIGHT
        assert launches[more] - more * of_weight <= MOST_OF_ALL, launches


@pytest.mark.simulated_cuda(kernels="triton", arrival=1.0)
@pytest.mark.parametrize("name", ["default", "zero-offload"])
def test_to_read_how_far_weights_move_takes_none(gpu: SimulatedCuda, name: str) -> None:
    """Counted where they are read: a whole step's copies depend on when the host gives room back."""
    read, counts, inside = DeferredTier.note_movement, gpu.counts, threading.local()
    reads = 0

    def reading(*arguments: Any) -> None:
        nonlocal reads
        reads, inside.reads = reads + 1, True
        try:
            read(*arguments)
        finally:
            inside.reads = False

    def counts_of_here() -> Any:
        return gpu.counted["movement"] if getattr(inside, "reads", False) else counts()

    with mock.patch.object(DeferredTier, "note_movement", reading), mock.patch.object(gpu, "counts", counts_of_here):
        launches_a_step(gpu, CASES[name], 2, clips=False)
    assert reads > 0
    found = gpu.counted["movement"]
    assert (found.launches.total(), found.copies.total(), found.waits.total()) == (0, 0, 0)
