"""How far a step moves the deferred weights, beside what torch's own AdamW does with the same gradients."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.support.seeds import fresh_seeds
from tests.support.tiers import repeated
from zenflow import StepStats, ZenFlowAdamW, ZenFlowConfig

EXACT = ZenFlowConfig.zero_offload()
STEPS = 7
HYPER: dict[str, Any] = {"lr": 3e-3, "weight_decay": 0.1}
Norms = list[tuple[float, float]]
"""Of each step: of what it changed, and of the weights before it."""


def shapes_of(seed: int) -> list[tuple[int, ...]]:
    """Matrices, one with three dimensions, one without a row, and what is never deferred."""
    draw = random.Random(seed)
    sides = [draw.randint(1, 40) for _ in range(6)]
    return [(sides[0], sides[1]), (sides[2], sides[3]), (sides[4], 2, sides[5]), (0, 4), (sides[0],), ()]


def parameters_of(seed: int, dtype: torch.dtype) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(seed)
    return [nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for shape in shapes_of(seed)]


def gradient(parameter: Tensor, seed: int, step: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed + 1000 * step)
    return torch.randn(parameter.shape, generator=generator).to(parameter.dtype)


def groups_of(parameters: list[nn.Parameter]) -> list[dict[str, object]]:
    """Two that differ, and one without parameters."""
    return [
        {"params": parameters[1:]},
        {"params": [], "lr": 1.0},
        {"params": parameters[:1], "lr": 1e-2, "weight_decay": 0.0},
    ]


def ours(seed: int, dtype: torch.dtype, config: ZenFlowConfig, steps: int = STEPS) -> list[StepStats]:
    parameters = parameters_of(seed, dtype)
    optimizer = ZenFlowAdamW(groups_of(parameters), config=config, **HYPER)
    for step in range(1, steps + 1):
        for parameter in parameters:
            parameter.grad = gradient(parameter, seed, step)
        optimizer.step()
    history = optimizer.history(wait=True)
    optimizer.close()
    return history


def torchs(seed: int, dtype: torch.dtype, steps: int = STEPS, every: int = 1) -> Norms:
    """Of every so many steps: the mean change of a step in them."""
    rounded = parameters_of(seed, dtype)
    parameters = [nn.Parameter(one.detach().float()) for one in rounded]
    optimizer = torch.optim.AdamW(groups_of(parameters), **HYPER)
    matrices = [one for one in parameters if one.dim() >= 2]
    found: Norms = []
    before = [one.detach().clone() for one in matrices]
    for step in range(1, steps + 1):
        for parameter, own in zip(parameters, rounded, strict=True):
            parameter.grad = gradient(own, seed, step).float()
        optimizer.step()
        if step % every == 0:
            change = norm([one.detach() - old for one, old in zip(matrices, before, strict=True)])
            found.append((change / every, norm(before)))
            before = [one.detach().clone() for one in matrices]
    return found


def norm(tensors: list[Tensor]) -> float:
    return math.sqrt(sum(float(one.double().square().sum()) for one in tensors))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("seed", fresh_seeds("movement", repeated(12)))
def test_each_step_moves_the_weights_as_far_as_torchs(seed: int, dtype: torch.dtype) -> None:
    history, expected = ours(seed, dtype, EXACT), torchs(seed, dtype)
    for stats, (change, weights) in zip(history, expected, strict=True):
        assert stats.change_norm == pytest.approx(change, rel=1e-3)
        assert stats.weight_norm == pytest.approx(weights, rel=1e-5)
        assert stats.movement_percent == pytest.approx(100 * change / weights, rel=1e-3)


@pytest.mark.parametrize("seed", fresh_seeds("movement in windows", repeated(4)))
def test_a_window_that_is_late_tells_the_mean_of_its_steps(seed: int) -> None:
    late = ZenFlowConfig(topk_ratio=0.0, update_interval=3, apply_lag=1)
    history, expected = ours(seed, torch.float32, late, steps=10), torchs(seed, torch.float32, steps=9, every=3)
    known = {stats.step: stats for stats in history if stats.change_norm is not None}
    assert list(known) == [4, 7, 10]  # a step after each window has closed
    for stats, (change, weights) in zip(known.values(), expected, strict=True):
        assert stats.change_norm == pytest.approx(change, rel=1e-3)
        assert stats.weight_norm == pytest.approx(weights, rel=1e-5)


@pytest.mark.parametrize("spread", [0.0, 1.0])
def test_of_a_large_weight_some_columns_stand_for_all(spread: float) -> None:
    """Columns whose norms differ by a factor of e cost exactness, which the study tells of real models."""
    torch.manual_seed(0)
    weight = nn.Parameter(torch.randn(64, 4096) * torch.exp(spread * torch.randn(4096)))
    before = weight.detach().clone()
    optimizer = ZenFlowAdamW([weight], config=EXACT, **HYPER)
    for _ in range(2):
        before = weight.detach().clone()
        weight.grad = torch.randn(64, 4096)
        optimizer.step()
    stats = optimizer.history(wait=True)[-1]
    assert stats.weight_norm is not None
    assert stats.change_norm == pytest.approx(norm([weight.detach() - before]), rel=0.05)
    assert stats.weight_norm == pytest.approx(norm([before]), rel=0.5 if spread else 0.05)
    assert stats.weight_norm != pytest.approx(norm([before]), rel=1e-6)  # it is a sample
    optimizer.close()
