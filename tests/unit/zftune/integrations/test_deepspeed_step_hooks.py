"""Hooks around `step()` of the optimizer that a script hands to DeepSpeed."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from zenflow import UnsupportedError, ZenFlowConfig
from zenflow.optimizer import ZenFlowOptimizer
from zenflow.rules import RULES
from zftune.integrations.deepspeed.engine_optimizer import EngineOptimizer
from zftune.integrations.deepspeed.optimizers import from_client

CONFIG = ZenFlowConfig(update_interval=1, overlap_step=False, skip_nonfinite=True, host_threads=1)


class Scaler:
    cur_scale = 8.0

    def update_scale(self, overflow: bool) -> None:
        """As with a scale that stays."""


@contextlib.contextmanager
def trained(scaler: Any = None) -> Iterator[tuple[nn.Linear, torch.optim.AdamW, EngineOptimizer]]:
    model = nn.Linear(4, 4)
    client = torch.optim.AdamW(model.parameters(), lr=1e-2)
    defaults = {"lr": 1e-2, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0}
    ZenFlowOptimizer([nn.Parameter(torch.ones(2, 2))], defaults, RULES["adamw"]).close()  # torch hooks its step()
    made = EngineOptimizer([], from_client(client), CONFIG, model, scaler)
    yield model, client, made
    made.close()


def backward(model: nn.Linear, factor: float = 1.0) -> None:
    (model(torch.ones(2, 4)).sum() * factor).backward()


def test_they_get_the_optimizer_that_steps_and_what_they_change_counts() -> None:
    with trained() as (model, client, made):
        seen: list[Any] = []

        def before(it: torch.optim.Optimizer, args: Any, kwargs: Any) -> tuple[Any, Any]:
            seen.append(it)
            for parameter in it.param_groups[0]["params"]:
                parameter.grad.zero_()
            return (it, lambda: 7.0), {}

        client.register_step_pre_hook(before)
        weights = model.weight.detach().clone()
        backward(model)
        assert made.step() == 7.0
        assert seen == [made]
        torch.testing.assert_close(model.weight.detach(), weights * (1 - 1e-2 * 1e-2))  # it only decays


def test_with_fp16_one_before_the_step_is_refused_in_a_sentence() -> None:
    with trained(Scaler()) as (model, client, made):
        client.register_step_pre_hook(lambda *_: None)
        backward(model)
        with pytest.raises(UnsupportedError, match=r"hook before step.. would get gradients that are scaled.*use bf16"):
            made.step()


def test_with_fp16_one_after_it_is_left_out_at_a_step_that_is_skipped() -> None:
    with trained(Scaler()) as (model, client, made):
        seen: list[int] = []
        client.register_step_post_hook(lambda *_: seen.append(made.steps))
        for factor in (1.0, torch.inf, 1.0):
            backward(model, factor)
            made.step()
            made.zero_grad()
        assert seen == [1, 3]


def test_sleeping_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, logger="zftune")
    with trained() as (_, _, made):
        for _step in range(2):
            made.offload_states()
            made.reload_states()
    assert len(caplog.messages) == 1
    assert caplog.messages[0].startswith("offload_states() moves nothing: ")
