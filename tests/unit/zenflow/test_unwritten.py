"""Weights that are looked at together: the same training as with each of them looked at by itself."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from tests.support.tiers import repeated
from zenflow import ZenFlowAdamW, ZenFlowConfig
from zenflow.writes import Unwritten

SIZES = [(24, 40), (40, 24), (40, 40), (40, 40), (7,)]
LAST = 24


def scale(weights: list[nn.Parameter], number: int) -> None:
    with torch.no_grad():
        weights[number].mul_(0.9)


def exchange(weights: list[nn.Parameter], _: int) -> None:
    """Both keep memory that is shared lazily."""
    weights[2].data, weights[3].data = weights[3].data, weights[2].data


def replace(weights: list[nn.Parameter], number: int) -> None:
    weights[number].data = weights[number].detach() * 0.9


def cut(weights: list[nn.Parameter], number: int) -> None:
    weights[number].data[:3] = 0.5


def pointer(weights: list[nn.Parameter], number: int) -> None:
    values = weights[number].detach()
    values.view(torch.uint8).numpy()[...] = (0.9 * values).view(torch.uint8).numpy()


WRITES: list[Callable[[list[nn.Parameter], int], None]] = [scale, exchange, replace, cut, pointer]


def trained(seed: int, together: Counter[bool]) -> list[Tensor]:
    """Weights after each step, between which somebody writes; counts those with some looked at together."""
    chance = random.Random(seed)
    torch.manual_seed(seed)
    dtype = chance.choice([torch.float32, torch.bfloat16])
    weights = [nn.Parameter(torch.randn(size).to(dtype)) for size in SIZES]
    interval, share = chance.choice([1, 3, 4]), chance.choice([0.0, 1.0, 1.0, 1.0])
    config = ZenFlowConfig(topk_ratio=0.2, update_interval=interval, select_interval=8, offload_ratio=share)
    optimizer = ZenFlowAdamW(weights, lr=1e-2, config=config)
    seen = []
    for step in range(LAST):
        for weight in weights if step % 5 else weights[1:]:
            weight.grad = torch.randn_like(weight)
        optimizer.step()
        optimizer.zero_grad()
        if step == LAST // 2:
            weights.append(nn.Parameter(torch.randn(16, 40).to(dtype)))
            optimizer.add_param_group({"params": [weights[-1]]})
        if step % 6 == 2:
            optimizer.set_knobs(topk_ratio=chance.choice([0.1, 0.4]), offload_ratio=chance.choice([0.0, 1.0, 1.0, 1.0]))
        if step % 6 == 4:
            with optimizer.flushed_weights():
                pass
        if step % 6 > 2 or chance.random() < 0.4:
            chance.choice(WRITES)(weights, chance.randrange(len(weights)))
        together[bool(optimizer._training.model._watched)] += 1
        seen += [weight.detach().clone() for weight in weights]
    optimizer.flush()
    optimizer.close()
    return seen + [weight.detach().clone() for weight in weights]


def test_training_is_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    counts: Counter[bool] = Counter()
    seeds = range(repeated(40))
    together = [trained(seed, counts) for seed in seeds]
    assert counts[True] > counts[False] / 2
    monkeypatch.setattr(Unwritten, "holds", lambda self: False)
    for seed, found in zip(seeds, together, strict=True):
        assert all(map(torch.equal, found, trained(seed, Counter()))), seed
