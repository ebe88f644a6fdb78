"""The statistics of the steps so far, and those after one of them."""

from __future__ import annotations

import copy

import torch
from torch import nn

from zenflow import ZenFlowAdamW, ZenFlowConfig


def train(optimizer: ZenFlowAdamW, weight: nn.Parameter, steps: int) -> None:
    for _ in range(steps):
        weight.grad = torch.randn_like(weight)
        optimizer.step()


def test_the_steps_after_one_are_the_end_of_all_of_them() -> None:
    weight = nn.Parameter(torch.randn(8, 6))
    optimizer = ZenFlowAdamW([weight], config=ZenFlowConfig(topk_ratio=0.2, update_interval=2))
    assert optimizer.history(after=0) == []
    train(optimizer, weight, 9)
    whole = optimizer.history(wait=True)
    assert [one.step for one in whole] == list(range(1, 10))
    for after in (-1, 0, 1, 7, 8, 9, 100):
        assert optimizer.history(after=after) == whole[max(0, after) :]
    optimizer.abandon()


def test_after_a_checkpoint_that_went_back_only_the_steps_since_then_follow() -> None:
    """Step numbers begin again where a state was loaded: those of the first time have the same ones."""
    weight = nn.Parameter(torch.randn(8, 6))
    optimizer = ZenFlowAdamW([weight], config=ZenFlowConfig(topk_ratio=0.2, update_interval=2))
    train(optimizer, weight, 4)
    state, values = copy.deepcopy(optimizer.state_dict()), weight.detach().clone()
    train(optimizer, weight, 6)
    with torch.no_grad():
        weight.copy_(values)
    optimizer.load_state_dict(state)
    train(optimizer, weight, 3)
    assert [one.step for one in optimizer.history(wait=True, after=5)] == [6, 7]
    optimizer.abandon()


def test_statistics_are_printed_without_their_tables() -> None:
    weight = nn.Parameter(torch.randn(8, 400))
    optimizer = ZenFlowAdamW([weight], config=ZenFlowConfig(topk_ratio=0.2, update_interval=2))
    train(optimizer, weight, 1)
    (stats,) = optimizer.history(wait=True)
    assert stats.coverage_curve is not None
    assert "step=1," in repr(stats)
    assert "array" not in repr(stats)
    optimizer.abandon()
