"""Gradients that a script edits under another name than `.grad`, and those that it converts after a step."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from zenflow import ZenFlowAdamW, ZenFlowConfig

SETTINGS: dict[str, dict[str, Any]] = {
    "synchronous": {"topk_ratio": 0.1, "update_interval": 1, "overlap_step": False},
    "all deferred": {"topk_ratio": 0.0, "update_interval": 1, "overlap_step": False},
    "windows": {"topk_ratio": 0.1, "update_interval": 3, "select_interval": 3},
    "on the device": {"offload_ratio": 0.0},
}
Edits = Iterator[None]
"""What a script does before a backward pass, and what it does before the step."""


def edit(gradients: Iterable[Tensor]) -> None:
    for gradient in gradients:
        gradient.mul_(0.5)
        gradient.view(-1)[::3].neg_()


def older_hook(model: nn.Module) -> Edits:
    held: list[Tensor] = []
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(lambda p: held.append(p.grad))
    while True:
        held.clear()
        yield
        edit(held)
        yield


def detached_hook(model: nn.Module) -> Edits:
    held: list[Tensor] = []
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(lambda p: held.append(p.grad.detach()))
    while True:
        held.clear()
        yield
        edit(held)
        yield


def numpy_hook(model: nn.Module) -> Edits:
    held = []
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(lambda p: held.append(p.grad.numpy()))
    while True:
        held.clear()
        yield
        edit(map(torch.from_numpy, held))
        yield


def flat_buffer(model: nn.Module) -> Edits:
    parameters = list(model.parameters())
    flat = torch.zeros(sum(parameter.numel() for parameter in parameters))
    while True:
        flat.zero_()
        for parameter, part in zip(parameters, flat.split([one.numel() for one in parameters]), strict=True):
            parameter.grad = part.view_as(parameter)
        yield
        flat.mul_(1 / (flat.norm() + 1))
        flat[:100].neg_()
        yield


def own_tensors(model: nn.Module) -> Edits:
    held = [torch.zeros_like(parameter, requires_grad=False) for parameter in model.parameters()]
    while True:
        for parameter, gradient in zip(model.parameters(), held, strict=True):
            parameter.grad = gradient.zero_()
        yield
        edit(held)
        yield


WAYS: dict[str, Callable[[nn.Module], Edits]] = {
    one.__name__: one for one in (older_hook, detached_hook, numpy_hook, flat_buffer, own_tensors)
}


def trained(way: Callable[[nn.Module], Edits], make: Callable[[nn.Module], torch.optim.Optimizer]) -> list[Tensor]:
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 9))
    edits = way(model)  # before the optimizer's own hooks
    optimizer = make(model)
    for _ in range(5):
        optimizer.zero_grad()
        next(edits)
        model(torch.randn(4, 16)).square().mean().backward()
        next(edits)
        optimizer.step()
    if isinstance(optimizer, ZenFlowAdamW):
        optimizer.flush()
        optimizer.close()
    return [parameter.detach() for parameter in model.parameters()]


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("way", WAYS)
def test_an_edit_under_another_name_counts(way: str, setting: str) -> None:
    def make(model: nn.Module, **more: Any) -> torch.optim.Optimizer:
        config = ZenFlowConfig(**{**SETTINGS[setting], **more})
        return ZenFlowAdamW(model.parameters(), lr=1e-2, config=config, module=model)

    streamed, whole = trained(WAYS[way], make), trained(WAYS[way], lambda model: make(model, stream=False))
    assert all(map(torch.equal, streamed, whole))
    if setting != "windows":
        theirs = trained(WAYS[way], lambda model: torch.optim.AdamW(model.parameters(), lr=1e-2))
        assert all(torch.allclose(one, other, atol=3e-6) for one, other in zip(streamed, theirs, strict=True))


def test_gradients_that_nobody_holds_leave_during_backward() -> None:
    model = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 9))
    optimizer = ZenFlowAdamW(model.parameters(), config=ZenFlowConfig(topk_ratio=0.1), module=model)
    model(torch.randn(4, 16)).square().mean().backward()
    assert [type(layer.weight.grad).__name__ for layer in (model[0], model[2])] == ["GradientPlaceholder"] * 2
    optimizer.close()


@pytest.mark.parametrize("setting", SETTINGS)
def test_a_model_is_converted_after_a_step(setting: str) -> None:
    def run(make: Callable[[nn.Module], torch.optim.Optimizer]) -> list[Tensor]:
        torch.manual_seed(4)
        model = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 9))
        optimizer = make(model)
        for _ in range(4):
            optimizer.zero_grad()
            model(torch.randn(4, 16)).square().mean().backward()
            optimizer.step()
            model.double()
            model(torch.ones(1, 16, dtype=torch.float64))
            model.float().share_memory()
        if isinstance(optimizer, ZenFlowAdamW):
            optimizer.flush()
            optimizer.close()
        return [parameter.detach() for parameter in model.parameters()]

    def ours(model: nn.Module, **more: Any) -> torch.optim.Optimizer:
        config = ZenFlowConfig(**{**SETTINGS[setting], **more})
        return ZenFlowAdamW(model.parameters(), lr=1e-2, config=config, module=model)

    streamed = run(ours)
    assert all(map(torch.equal, streamed, run(lambda model: ours(model, stream=False))))
    if setting != "windows":
        theirs = run(lambda model: torch.optim.AdamW(model.parameters(), lr=1e-2))
        assert all(torch.allclose(one, other, atol=3e-6) for one, other in zip(streamed, theirs, strict=True))
