"""State as torch's optimizers have it: to them and back in one process, and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from tests.support.zenflow.rounding import ULP
from zenflow import CheckpointError, ConfigError, UnsupportedError, ZenFlowConfig
from zenflow.family import ZenFlowAdagrad, ZenFlowAdam, ZenFlowAdamW, ZenFlowSGD

Make = Callable[[list[nn.Parameter]], Any]

CONFIG = ZenFlowConfig.zero_offload(topk_ratio=0.3, offload_ratio=0.8)
WINDOWS = ZenFlowConfig(topk_ratio=0.3, update_interval=3)
RULES: dict[str, tuple[Callable[..., Any], Callable[..., Any], dict[str, Any]]] = {
    "adamw": (ZenFlowAdamW, torch.optim.AdamW, {"lr": 1e-2, "weight_decay": 0.1, "betas": (0.8, 0.95)}),
    "adam": (ZenFlowAdam, torch.optim.Adam, {"lr": 1e-2, "weight_decay": 0.1}),
    "adagrad": (ZenFlowAdagrad, torch.optim.Adagrad, {"lr": 1e-2, "initial_accumulator_value": 0.2}),
}


def weights() -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(1)
    shapes = [(5, 8), (7,), (3, 2, 4), ()]
    made = [nn.Parameter(torch.randn(shape, generator=generator)) for shape in shapes]
    return [*made, nn.Parameter(torch.ones(2, 2), requires_grad=False)]


def train(parameters: list[nn.Parameter], optimizer: Any, first: int, last: int) -> None:
    for number in range(first, last + 1):
        generator = torch.Generator().manual_seed(number)
        for parameter in parameters[:-1]:
            parameter.grad = torch.randn(parameter.shape, generator=generator)
        optimizer.step()


def taken_up(rule: str, *, ours_first: bool) -> list[nn.Parameter]:
    """Weights after 6 steps, of which one optimizer took three and another one the others."""
    ours, torchs, hyper = RULES[rule]
    before, after = weights(), weights()
    made = ours(before if ours_first else after, **hyper, config=CONFIG)
    other = torchs(after if ours_first else before, **hyper)
    for group in made.param_groups:
        group["initial_lr"] = group["lr"]
    first, second = (made, other) if ours_first else (other, made)
    train(before, first, 1, 3)
    with made.torch_state():
        second.load_state_dict(first.state_dict())
    for parameter, value in zip(after, before, strict=True):
        parameter.data.copy_(value.detach())
    train(after, second, 4, 6)
    made.flush()
    made.close()
    return after


@pytest.mark.parametrize("ours_first", [True, False], ids=["to torch", "from torch"])
@pytest.mark.parametrize("rule", RULES)
def test_one_goes_on_from_the_other(rule: str, ours_first: bool) -> None:
    expected = weights()
    _, torchs, hyper = RULES[rule]
    train(expected, torchs(expected, **hyper), 1, 6)
    for found, value in zip(taken_up(rule, ours_first=ours_first), expected, strict=True):
        torch.testing.assert_close(found.detach(), value.detach(), rtol=64 * ULP, atol=64 * ULP)


def test_it_is_what_torchs_optimizer_saves() -> None:
    parameters, twins = weights(), weights()
    optimizer = ZenFlowAdamW(parameters, lr=1e-2, config=CONFIG)
    twin = torch.optim.AdamW(twins, lr=1e-2)
    for steps in (0, 3):
        train(parameters, optimizer, 1, steps)
        train(twins, twin, 1, steps)
        with optimizer.torch_state():
            found = optimizer.state_dict()
        expected = twin.state_dict()
        assert found["param_groups"] == expected["param_groups"]
        if steps:
            torch.testing.assert_close(found["state"], expected["state"], rtol=64 * ULP, atol=64 * ULP)
        else:
            assert all(float(state["step"]) == 0 for state in found["state"].values())
    assert "zenflow" in optimizer.state_dict()["param_groups"][0]
    optimizer.close()


def test_pending_updates_are_refused_until_they_are_flushed() -> None:
    parameters = weights()
    optimizer = ZenFlowAdamW(parameters, lr=1e-2, config=WINDOWS)
    train(parameters, optimizer, 1, 5)
    with optimizer.torch_state():
        with pytest.raises(ConfigError, match=r"while updates are pending or predicted, .* call flush\(\) first"):
            optimizer.state_dict()
        optimizer.flush()
        assert {float(state["step"]) for state in optimizer.state_dict()["state"].values()} == {5.0}
    optimizer.close()


def _of(make: Make, steps: int = 2) -> dict[str, Any]:
    parameters = weights()
    optimizer = make(parameters)
    train(parameters, optimizer, 1, steps)
    state: dict[str, Any] = optimizer.state_dict()
    if isinstance(optimizer, ZenFlowAdamW):
        optimizer.close()
    return state


def _without_moment() -> dict[str, Any]:
    state = _of(torch.optim.AdamW)
    del state["state"][1]["exp_avg"]
    return state


def _of_other_shapes() -> dict[str, Any]:
    state = _of(torch.optim.AdamW)
    state["state"][0]["exp_avg"] = torch.zeros(8, 5)
    return state


REFUSED: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    "nothing": (lambda: None, CheckpointError, 'has no "state" and "param_groups"'),
    "fewer": (lambda: _of(lambda all_: torch.optim.AdamW(all_[:3])), CheckpointError, r"groups of \[3\] parameters"),
    "maxima": (lambda: _of(lambda all_: torch.optim.AdamW(all_, amsgrad=True)), ConfigError, "amsgrad is True"),
    "upwards": (lambda: _of(lambda all_: torch.optim.AdamW(all_, maximize=True)), ConfigError, "maximize is True"),
    "other moments": (lambda: _of(torch.optim.Adagrad), CheckpointError, r"state\[0\] holds step, sum; it must hold"),
    "no moment": (_without_moment, CheckpointError, r"state\[1\] holds step, exp_avg_sq; it must hold step, exp_avg,"),
    "other shapes": (_of_other_shapes, CheckpointError, r'\["exp_avg"\] is \[8, 5\], the parameter \[5, 8\]'),
    "ours": (lambda: _of(lambda all_: ZenFlowAdamW(all_, config=CONFIG)), CheckpointError, "is of a ZenFlow optimizer"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused_changes_nothing(name: str) -> None:
    make, error, match = REFUSED[name]
    parameters = weights()
    optimizer = ZenFlowAdamW(parameters, lr=1e-2, config=CONFIG)
    train(parameters, optimizer, 1, 2)
    before = optimizer.state_dict()
    with optimizer.torch_state(), pytest.raises(error, match=match):
        optimizer.load_state_dict(make())
    after = optimizer.state_dict()
    assert after["param_groups"] == before["param_groups"]
    torch.testing.assert_close(after["state"], before["state"], rtol=0, atol=0)
    optimizer.close()


def test_a_rule_of_another_state_is_refused() -> None:
    optimizer = ZenFlowSGD(weights(), lr=1e-2, momentum=0.9)
    with optimizer.torch_state():
        for do in (optimizer.state_dict, lambda: optimizer.load_state_dict({})):
            with pytest.raises(UnsupportedError, match="rule sgd; it can with adamw, adam, adagrad"):
                do()
    optimizer.close()


def test_torchs_state_is_refused_elsewhere_with_what_takes_it() -> None:
    optimizer = ZenFlowAdamW(weights(), lr=1e-2)
    with pytest.raises(CheckpointError, match=r"`zftune checkpoint import` .* torch_state\(\)"):
        optimizer.load_state_dict(_of(torch.optim.AdamW))
    optimizer.close()
