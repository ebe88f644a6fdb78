"""Quality exact: whatever an optimizer was made with and whatever it loads, its steps are those of torch's AdamW."""

from __future__ import annotations

import copy
import logging
from typing import Any

import pytest
import torch
from torch import nn

from zenflow import ZenFlowAdamW, ZenFlowConfig
from zftune.exactness import EXACT, keep_exact

LATE = ZenFlowConfig(topk_ratio=0.25, update_interval=4)
SYNCHRONOUS = ZenFlowConfig(topk_ratio=0.25, update_interval=1, overlap_step=False)
SAVED_AFTER, STEPS = 6, 12


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 8))


def train(module: nn.Module, optimizer: torch.optim.Optimizer, first: int, last: int) -> None:
    for step in range(first, last):
        batch = torch.randn(4, 8, generator=torch.Generator().manual_seed(step))
        module(batch).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def saved(made: ZenFlowConfig, then: dict[str, Any]) -> tuple[Any, Any]:
    """The states of a model and of its optimizer, whose settings were changed."""
    module = model()
    optimizer = ZenFlowAdamW(module.parameters(), lr=1e-2, config=made, module=module)
    optimizer.set_knobs(**then)
    train(module, optimizer, 0, SAVED_AFTER)
    states = copy.deepcopy(optimizer.state_dict()), copy.deepcopy(module.state_dict())
    optimizer.close()
    return states


@pytest.mark.parametrize("loads_first", [True, False])
@pytest.mark.parametrize("made", [LATE, SYNCHRONOUS])
@pytest.mark.parametrize(
    ("before", "then"), [(SYNCHRONOUS, {}), (SYNCHRONOUS, {"update_interval": 4, "overlap_step": True}), (LATE, {})]
)
def test_no_update_is_late_after_a_state_was_loaded(
    before: ZenFlowConfig, then: dict[str, Any], made: ZenFlowConfig, loads_first: bool,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    state, weights = saved(before, then)
    module = model()
    optimizer = ZenFlowAdamW(module.parameters(), lr=1e-2, config=made, module=module)
    caplog.set_level(logging.WARNING, logger="zftune")
    if not loads_first:
        assert keep_exact(optimizer) is (made is LATE)
        keep_exact(optimizer)  # a backend and a tuner both promise it
    module.load_state_dict(weights)
    optimizer.load_state_dict(state)
    is_late = then != {} or before is LATE
    if loads_first:
        assert keep_exact(optimizer) is (is_late or made is LATE)
    train(module, optimizer, SAVED_AFTER, STEPS)
    assert {name: getattr(optimizer.config, name) for name in EXACT} == EXACT
    assert not any(one.staleness_max_steps for one in optimizer.history(wait=True)[2:])  # those two close the window
    told = caplog.text.count("updates would be late after what was loaded")
    assert told == (not loads_first and (is_late or made is LATE))
    optimizer.close()
    if is_late:
        return
    plain = model()
    oracle = torch.optim.AdamW(plain.parameters(), lr=1e-2)
    train(plain, oracle, 0, STEPS)
    for one, other in zip(module.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)
