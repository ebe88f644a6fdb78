"""Weights that somebody else writes to: obeyed, and nothing of what is pending is lost."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.zenflow.cases import same_bits
from tests.zenflow.test_optimizer import set_grads, weights_of
from zenflow import ZenFlowAdamW, ZenFlowConfig
from zenflow.rules import AdamW, AdamWHyper
from zenflow.state import ColumnState

HYPER = AdamWHyper(lr=0.1, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.01)
SPLITS: list[dict[str, Any]] = [
    {"topk_ratio": 0.0},
    {"topk_ratio": 0.25},
    {"topk_ratio": 0.25, "offload_ratio": 0.5},
    {"offload_ratio": 0.0},
]


@pytest.fixture(params=SPLITS, ids=["deferred", "selected", "split", "resident"])
def split(request: pytest.FixtureRequest) -> dict[str, Any]:
    knobs: dict[str, Any] = request.param
    return knobs


def make(weights: list[nn.Parameter], **knobs: Any) -> ZenFlowAdamW:
    return ZenFlowAdamW(weights, lr=0.1, config=ZenFlowConfig(select_interval=1000, **knobs))


class PlainAdamW:
    """AdamW on fp32 masters with the runtime's own rule, without tiers: what every split must equal after a flush."""

    def __init__(self, weights: list[nn.Parameter]) -> None:
        self.states = [ColumnState(weight.detach().float().clone(), 2) for weight in weights]

    def step(self, weights: list[nn.Parameter]) -> None:
        for weight, state in zip(weights, self.states, strict=True):
            assert weight.grad is not None
            state.update(AdamW(), weight.grad.float(), HYPER)

    def write(self, values: list[Tensor]) -> None:
        for state, value in zip(self.states, values, strict=True):
            state.master.copy_(value)

    def assert_equal(self, weights: list[nn.Parameter]) -> None:
        for weight, state in zip(weights, self.states, strict=True):
            expected = state.master.to(weight.dtype)
            different = (~same_bits(weight.detach(), expected)).any(0).nonzero().flatten().tolist()
            assert different == [], f"columns {different}"


def load(weights: list[nn.Parameter], values: list[Tensor]) -> None:
    with torch.no_grad():
        for weight, value in zip(weights, values, strict=True):
            weight.copy_(value)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_load_between_flush_and_step_is_taken_up(split: dict[str, Any], dtype: torch.dtype) -> None:
    weights = weights_of(dtype)
    optimizer, plain = make(weights, update_interval=3, **split), PlainAdamW(weights)
    loaded = [torch.full_like(weight.detach(), 2.0) for weight in weights]
    for step in range(1, 9):
        set_grads(weights, step)
        plain.step(weights)
        optimizer.step()
        if step == 4:
            optimizer.flush()
            plain.assert_equal(weights)
            load(weights, loaded)
            plain.write([value.float() for value in loaded])
    optimizer.close()
    plain.assert_equal(weights)


@pytest.mark.parametrize("before_flush", [True, False], ids=["flush", "step"])
def test_a_load_inside_a_window_is_taken_up_and_pending_updates_go_on_top(
    split: dict[str, Any], before_flush: bool
) -> None:
    """Columns that the host has yet to update get the two gradients on top of the new value; others had them before."""
    weights = weights_of()
    optimizer = make(weights, update_interval=4, **split)
    plain = PlainAdamW(weights)
    fresh = PlainAdamW(weights)
    loaded = [torch.full_like(weight.detach(), 2.0) for weight in weights]
    fresh.write(loaded)
    for step in (1, 2):
        set_grads(weights, step)
        plain.step(weights)
        fresh.step(weights)
        optimizer.step()
    load(weights, loaded)
    plain.write(loaded)
    if not before_flush:
        set_grads(weights, 3)
        plain.step(weights)
        fresh.step(weights)
        optimizer.step()
    optimizer.close()
    counted = 0
    for weight, new, old in zip(weights, fresh.states, plain.states, strict=True):
        on_top = same_bits(weight.detach(), new.master).all(0)
        history = same_bits(weight.detach(), old.master).all(0)
        assert bool((on_top | history).all()), (on_top, history)
        counted += int(on_top.sum())
    assert counted == DEFERRED_COLUMNS[tuple(sorted(split.items()))]


# Of two weights of eight columns.
DEFERRED_COLUMNS: dict[tuple[tuple[str, float], ...], int] = {
    (("topk_ratio", 0.0),): 16,
    (("topk_ratio", 0.25),): 12,
    (("offload_ratio", 0.5), ("topk_ratio", 0.25)): 6,  # the first is resident
    (("offload_ratio", 0.0),): 0,
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_average_swapped_in_and_out_keeps_the_masters(split: dict[str, Any], dtype: torch.dtype) -> None:
    results = []
    for swaps in (True, False):
        weights = weights_of(dtype)
        optimizer = make(weights, update_interval=3, **split)
        for step in range(1, 10):
            set_grads(weights, step)
            optimizer.step()
            if step == 5:
                optimizer.flush()
                if swaps:
                    kept = [weight.detach().clone() for weight in weights]
                    load(weights, [torch.full_like(weight.detach(), 9.0) for weight in weights])
                    load(weights, kept)
        optimizer.close()
        results.append(weights)
    for ours, theirs in zip(*results, strict=True):
        assert bool(same_bits(ours.detach(), theirs.detach()).all())


def in_flight(weights: list[nn.Parameter]) -> ZenFlowAdamW:
    """An optimizer after the step that closed its first window."""
    optimizer = make(weights, topk_ratio=0.25, update_interval=4)
    for step in range(1, 5):
        set_grads(weights, step)
        optimizer.step()
    return optimizer


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_updates_that_are_in_flight_count_on_top_of_a_write(dtype: torch.dtype) -> None:
    """Where nobody wrote, and where the old value is written back, nothing changes by a bit."""
    results = []
    for writes in (True, False):
        weights = weights_of(dtype)
        optimizer = in_flight(weights)
        old = [weight.detach().clone() for weight in weights]
        if writes:
            load(weights, [torch.full_like(value, 3.0) for value in old])
            load(weights, old)
            with torch.no_grad():
                weights[1][0, :] += 0.5
        set_grads(weights, 5)
        optimizer.step()
        optimizer.close()
        results.append(weights)
    (first, second), (first_without, second_without) = ([w.detach().float() for w in weights] for weights in results)
    assert torch.equal(first, first_without)
    assert torch.equal(second[1:], second_without[1:])
    decay = (1 - HYPER.lr * HYPER.weight_decay) ** 5
    tolerance = 1e-6 if dtype == torch.float32 else 2**-7
    torch.testing.assert_close(second[0] - second_without[0], torch.full((8,), 0.5 * decay), rtol=0.02, atol=tolerance)


def test_a_write_after_a_flush_is_taken_up_whatever_was_in_flight_before_it() -> None:
    results = []
    for windows in (True, False):
        weights = weights_of()
        optimizer = make(weights, topk_ratio=0.25, update_interval=4 if windows else 1, overlap_step=windows)
        for step in range(1, 5):
            set_grads(weights, step)
            optimizer.step()
        optimizer.flush()
        load(weights, [torch.full_like(weight.detach(), 2.0) for weight in weights])
        set_grads(weights, 5)
        optimizer.step()
        optimizer.close()
        results.append(weights)
    for ours, theirs in zip(*results, strict=True):
        assert bool(same_bits(ours.detach(), theirs.detach()).all())
