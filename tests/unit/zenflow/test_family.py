"""The optimizers as a user meets them: torch's arguments, refusals in a sentence, groups, schedulers."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR, OneCycleLR

from tests.support.zenflow.cases import same_bits
from tests.support.zenflow.family_cases import OURS, REFERENCE, TORCH_CLASS
from tests.support.zenflow.rule_cases import NAMES
from tests.support.zenflow.torch_oracle import BookLion
from zenflow import ConfigError, ZenFlowConfig, ZenFlowOptimizer

SYNC = ZenFlowConfig(topk_ratio=0.3, update_interval=1, select_interval=2, overlap_step=False)
LATE = ZenFlowConfig(topk_ratio=0.3, update_interval=3, select_interval=2, apply_lag=2, bucket_bytes=40)


def weights_of(seed: int = 0) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(seed)
    return [nn.Parameter(torch.randn(shape, generator=generator)) for shape in ((5, 8), (7,), (3, 11))]


def set_grads(weights: list[nn.Parameter], step: int) -> None:
    generator = torch.Generator().manual_seed(step)
    for weight in weights:
        scale = torch.randn(weight.shape[-1], generator=generator).exp()
        weight.grad = torch.randn(weight.shape, generator=generator) * scale


# Arguments.


def positional(cls: type[Any]) -> dict[str, Any]:
    """Arguments that may be given by position, with their defaults."""
    kinds = inspect.Parameter.POSITIONAL_OR_KEYWORD
    return {p.name: p.default for p in inspect.signature(cls).parameters.values() if p.kind is kinds}


@pytest.mark.parametrize("rule", TORCH_CLASS)
def test_arguments_are_torchs_in_order_and_default(rule: str) -> None:
    theirs = positional(TORCH_CLASS[rule])
    theirs.pop("foreach", None)  # how fast torch is, not what it computes
    ours = positional(OURS[rule])
    assert list(ours.items()) == list(theirs.items())


def test_lions_arguments_are_the_papers() -> None:
    lion = {"params": inspect.Parameter.empty, "lr": 1e-4, "betas": (0.9, 0.99), "weight_decay": 0.0}
    assert list(positional(OURS["lion"]).items()) == list(lion.items())


@pytest.mark.parametrize("rule", NAMES)
def test_how_fast_torch_is_has_no_effect(rule: str) -> None:
    kinds = [p.kind for p in inspect.signature(OURS[rule]).parameters.values()]
    assert kinds[-1] is inspect.Parameter.VAR_KEYWORD  # config, module and the like
    weights, others = weights_of(), weights_of()
    optimizers = [
        OURS[rule](weights, config=SYNC, fused=True, foreach=None, capturable=True, maximize=False),
        OURS[rule](others, config=SYNC),
    ]
    for optimizer in optimizers:
        set_grads(optimizer.param_groups[0]["params"], 1)
        optimizer.step()
        optimizer.close()
    assert all(map(torch.equal, weights, others))


# Refusals.


@pytest.mark.parametrize("flag", ["maximize", "differentiable"])
@pytest.mark.parametrize("rule", NAMES)
def test_what_torch_would_compute_otherwise_is_refused(rule: str, flag: str) -> None:
    with pytest.raises(ConfigError, match=f"{flag} is True"):
        OURS[rule](weights_of(), **{flag: True})


@pytest.mark.parametrize("rule", NAMES)
def test_an_unknown_argument_is_none(rule: str) -> None:
    with pytest.raises(TypeError, match="topk_ratio"):
        OURS[rule](weights_of(), topk_ratio=0.1)


@pytest.mark.parametrize("rule", NAMES)
def test_a_refused_group_leaves_no_trace(rule: str) -> None:
    optimizer = OURS[rule](weights_of(), config=LATE)
    with pytest.raises(ConfigError, match="maximize is True"):
        optimizer.add_param_group({"params": weights_of(1), "maximize": True})
    assert len(optimizer.param_groups) == 1
    set_grads(optimizer.param_groups[0]["params"], 1)
    optimizer.step()
    optimizer.close()


# Training.


# Of the defaults, and of the second group.
OWN: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "adamw": ({"lr": 0.01}, {"lr": 0.02, "betas": (0.5, 0.9), "eps": 1e-3, "weight_decay": 0.2}),
    "adam": ({"lr": 0.01}, {"lr": 0.02, "betas": (0.5, 0.9), "eps": 1e-3, "weight_decay": 0.2}),
    "adagrad": ({"lr": 0.01}, {"lr": 0.02, "lr_decay": 0.3, "eps": 1e-3, "weight_decay": 0.2}),
    "lion": ({"lr": 0.001}, {"lr": 0.002, "betas": (0.5, 0.7), "weight_decay": 0.2}),
    "sgd": ({"lr": 0.01, "momentum": 0.5}, {"lr": 0.02, "momentum": 0.9, "nesterov": True, "weight_decay": 0.2}),
}


def train(make: Any, rule: str, *, scheduler: str = "", **arguments: Any) -> list[Tensor]:
    """Weights after every step of two groups with hyperparameters of their own, and after a last flush."""
    weights = weights_of()
    defaults, own = OWN[rule]
    optimizer = make([{"params": weights[:1]}, {"params": weights[1:], **own}], **defaults, **arguments)
    schedule = scheduled(optimizer, scheduler)
    seen = []
    for step in range(1, 13):
        set_grads(weights, step)
        optimizer.step()
        if schedule is not None:
            schedule.step()
        seen += [weight.detach().clone() for weight in weights]
    if isinstance(optimizer, ZenFlowOptimizer):
        optimizer.close()
    elif hasattr(optimizer, "flush"):
        optimizer.flush()
    return [*seen, *(weight.detach().clone() for weight in weights)]


def scheduled(optimizer: Any, name: str) -> Any:
    if name == "lambda":
        return LambdaLR(optimizer, [lambda step: 1 / (1 + step), lambda step: 0.8**step])
    if name == "one cycle":
        cycles = "betas" in optimizer.defaults or "momentum" in optimizer.defaults
        return OneCycleLR(optimizer, max_lr=[0.02, 0.03], total_steps=14, cycle_momentum=cycles)
    return None


@pytest.mark.parametrize("scheduler", ["lambda", "one cycle"])
@pytest.mark.parametrize("rule", NAMES)
def test_groups_and_schedulers_are_torchs(rule: str, scheduler: str) -> None:
    ours = train(OURS[rule], rule, scheduler=scheduler, config=SYNC)
    theirs = train(TORCH_CLASS.get(rule, BookLion), rule, scheduler=scheduler, foreach=False)
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=3e-5, atol=3e-6)


@pytest.mark.parametrize("scheduler", ["lambda", "one cycle"])
@pytest.mark.parametrize("rule", NAMES)
def test_a_scheduler_reaches_windows_with_each_steps_numbers(rule: str, scheduler: str) -> None:
    late = train(OURS[rule], rule, scheduler=scheduler, config=LATE)
    expected = train(REFERENCE[rule], rule, scheduler=scheduler, config=LATE)
    assert all(bool(same_bits(a, b).all()) for a, b in zip(late, expected, strict=True))
    plain = train(OURS[rule], rule, config=LATE)
    assert not torch.equal(late[-1], plain[-1])


@pytest.mark.parametrize("config", [SYNC, LATE])
def test_momentum_may_come_and_go(config: ZenFlowConfig) -> None:
    """As in torch: while it is 0 the buffer rests, and its first gradient is the first with momentum, undampened."""

    def trained(make: Any, **arguments: Any) -> list[Tensor]:
        weights = weights_of()
        optimizer = make(weights, lr=0.05, dampening=0.5, **arguments)
        for step, momentum in enumerate((0.0, 0.0, 0.9, 0.5, 0.0, 0.9, 0.9), start=1):
            optimizer.param_groups[0]["momentum"] = momentum
            set_grads(weights, step)
            optimizer.step()
        if isinstance(optimizer, ZenFlowOptimizer):
            optimizer.close()
        return [weight.detach() for weight in weights]

    for ours, theirs in zip(trained(OURS["sgd"], config=config), trained(torch.optim.SGD), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=3e-5, atol=3e-6)


@pytest.mark.parametrize("config", [SYNC, LATE])
def test_every_group_has_its_own_initial_accumulator_value(config: ZenFlowConfig) -> None:
    """On every tier; torch gives all groups that of the defaults."""
    first, second = (nn.Parameter(torch.ones(4, 8)) for _ in range(2))
    groups = [{"params": [first]}, {"params": [second], "initial_accumulator_value": 16.0}]
    optimizer = OURS["adagrad"](groups, lr=1.0, initial_accumulator_value=7.0, config=config)
    first.grad = second.grad = torch.full((4, 8), 3.0)
    optimizer.step()
    optimizer.close()
    torch.testing.assert_close(first.detach(), torch.full((4, 8), 1 - 3 / 4))
    torch.testing.assert_close(second.detach(), torch.full((4, 8), 1 - 3 / 5))
