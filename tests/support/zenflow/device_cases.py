"""The invariants on whatever device the model is on: the same cases run on the CPU and on a GPU (tests/system/gpu)."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.support.oracle import ReferenceAdamW
from zenflow import ZenFlowAdamW, ZenFlowConfig

STEPS = 9
HYPER: dict[str, Any] = {"lr": 1e-2, "betas": (0.9, 0.99), "eps": 1e-6, "weight_decay": 0.1}
WINDOWS: dict[str, Any] = {"topk_ratio": 0.2, "update_interval": 3, "select_interval": 2, "bucket_bytes": 2000}
KNOBS: dict[str, dict[str, Any]] = {
    "windows": WINDOWS,
    "mean": {**WINDOWS, "deferred_update": "mean", "apply_lag": 1},
    "coasting": {**WINDOWS, "look_ahead": "coast"},
    "guessed": {**WINDOWS, "look_ahead": "guess"},
    "staggered": {**WINDOWS, "look_ahead": "guess", "window_phase": "staggered", "select_interval": 4},
    "part": {**WINDOWS, "offload_ratio": 0.6, "max_grad_norm": 0.5},
    "zero-offload": {"topk_ratio": 0.0, "update_interval": 1, "overlap_step": False, "pipeline": "none"},
    "auto": {**WINDOWS, "update_interval": "auto", "select_interval": "auto", "max_update_interval": 5},
    "whole": {**WINDOWS, "stream": False},
}


def model_on(device: torch.device, dtype: torch.dtype) -> nn.Sequential:
    """Odd sizes, a bias, a tied pair of layers."""
    torch.manual_seed(3)
    tied = nn.Linear(37, 37)
    model = nn.Sequential(nn.Linear(23, 37), nn.Tanh(), tied, nn.Tanh(), tied, nn.Linear(37, 19, bias=False))
    return model.to(device, dtype)


def loss_of(model: nn.Module, step: int) -> Tensor:
    parameter = next(model.parameters())
    torch.manual_seed(100 + step)
    inputs = torch.randn(5, 23).to(parameter.device, parameter.dtype)
    out: Tensor = model(inputs)
    return out.float().square().mean()


def weights_of(model: nn.Module) -> list[Tensor]:
    return [parameter.detach().clone() for parameter in model.parameters()]


class RuntimeCases:
    """A subclass has a fixture `device`."""

    def trained(
        self,
        device: torch.device,
        knobs: dict[str, Any],
        dtype: torch.dtype = torch.bfloat16,
        make: Callable[..., Any] = ZenFlowAdamW,
        on_step: Callable[[Any, int], None] = lambda _optimizer, _step: None,
    ) -> list[list[Tensor]]:
        """The weights after every step and after a flush."""
        model = model_on(device, dtype)
        optimizer = make(model.parameters(), config=ZenFlowConfig(**knobs), module=model, **HYPER)
        seen = []
        for step in range(STEPS):
            loss_of(model, step).backward()
            optimizer.step()
            optimizer.zero_grad()
            on_step(optimizer, step)
            seen.append(weights_of(model))
        optimizer.flush()
        seen.append(weights_of(model))
        if isinstance(optimizer, ZenFlowAdamW):
            optimizer.close()
        return seen

    def assert_bitwise(self, actual: list[list[Tensor]], expected: list[list[Tensor]]) -> None:
        for number, (ours, theirs) in enumerate(zip(actual, expected, strict=True)):
            assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True)), f"after step {number + 1}"

    @pytest.mark.parametrize("ratio", [1.0, 0.5, 0.0])
    @pytest.mark.parametrize("topk", [0.0, 0.2, 1.0])
    def test_i1_synchronous_is_adamw(self, device: torch.device, topk: float, ratio: float) -> None:
        knobs = {"topk_ratio": topk, "offload_ratio": ratio, "update_interval": 1, "overlap_step": False}
        seen = self.trained(device, knobs, torch.float32)
        model = model_on(device, torch.float32)
        plain = torch.optim.AdamW(model.parameters(), **HYPER)
        for step in range(STEPS):
            loss_of(model, step).backward()
            plain.step()
            plain.zero_grad()
        for ours, theirs in zip(seen[-1], weights_of(model), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=2e-5, atol=2e-6)

    @pytest.mark.parametrize("name", KNOBS)
    def test_i2_repeats_bitwise_with_other_threads(self, device: torch.device, name: str) -> None:
        one = self.trained(device, {**KNOBS[name], "host_threads": 1})
        self.assert_bitwise(self.trained(device, {**KNOBS[name], "host_threads": 3}), one)

    @pytest.mark.parametrize("name", [name for name in KNOBS if name != "auto"])
    def test_i2_is_the_reference(self, device: torch.device, name: str) -> None:
        knobs = KNOBS[name]
        ours = self.trained(device, knobs, torch.float32)
        theirs = self.trained(device, knobs, torch.float32, make=ReferenceAdamW)
        for a, b in zip(ours[-1], theirs[-1], strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)

    def test_i2b_replay_is_adamw_where_gradients_do_not_depend_on_weights(self, device: torch.device) -> None:
        torch.manual_seed(5)
        start = torch.randn(24, 40)
        gradients = [torch.randn(24, 40) for _ in range(STEPS)]
        ours, plain = (nn.Parameter(start.to(device).clone()) for _ in range(2))
        optimizer = ZenFlowAdamW([ours], config=ZenFlowConfig(**WINDOWS), **HYPER)
        oracle = torch.optim.AdamW([plain], **HYPER)
        for gradient in gradients:
            ours.grad, plain.grad = gradient.to(device).clone(), gradient.to(device).clone()
            optimizer.step()
            oracle.step()
        optimizer.close()
        torch.testing.assert_close(ours, plain, rtol=1e-5, atol=1e-6)

    @pytest.mark.parametrize("saved_after", [1, 4, 5])
    @pytest.mark.parametrize("name", KNOBS)
    def test_i3_goes_on_from_a_checkpoint(self, device: torch.device, name: str, saved_after: int) -> None:
        through = self.trained(device, KNOBS[name])
        config = ZenFlowConfig(**KNOBS[name])
        model, other = model_on(device, torch.bfloat16), model_on(device, torch.bfloat16)
        optimizer = ZenFlowAdamW(model.parameters(), config=config, module=model, **HYPER)
        for step in range(saved_after):
            loss_of(model, step).backward()
            optimizer.step()
            optimizer.zero_grad()
        file = io.BytesIO()
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
        optimizer.abandon()
        file.seek(0)
        checkpoint = torch.load(file, weights_only=True)
        again = ZenFlowAdamW(other.parameters(), config=config, module=other, **HYPER)
        again.load_state_dict(checkpoint["optimizer"])
        other.load_state_dict(checkpoint["model"])
        for step in range(saved_after, STEPS):
            loss_of(other, step).backward()
            again.step()
            again.zero_grad()
            assert all(torch.equal(a, b) for a, b in zip(weights_of(other), through[step], strict=True)), step
        again.close()
        assert all(torch.equal(a, b) for a, b in zip(weights_of(other), through[-1], strict=True))

    def test_i4_nothing_is_lost_while_knobs_change(self, device: torch.device) -> None:
        changes: dict[int, dict[str, Any]] = {1: {"topk_ratio": 0.5}, 4: {"offload_ratio": 0.3, "update_interval": 2}}

        def change(optimizer: Any, step: int) -> None:
            assert all(balance.balanced for balance in optimizer.ledger().values())
            if step in changes:
                assert optimizer.set_knobs(**changes[step]) == step + 2

        first = self.trained(device, {**WINDOWS, "ledger": True}, on_step=change)
        self.assert_bitwise(self.trained(device, {**WINDOWS, "ledger": True}, on_step=change), first)

    @pytest.mark.parametrize("stream", [True, False])
    def test_i5_accumulation_is_the_sum(self, device: torch.device, stream: bool) -> None:
        finals = []
        for passes in (1, 2):
            model = model_on(device, torch.float32)
            config = ZenFlowConfig(**{**WINDOWS, "stream": stream})
            optimizer = ZenFlowAdamW(model.parameters(), config=config, module=model, **HYPER)
            for step in range(STEPS):
                losses = [loss_of(model, 2 * step), loss_of(model, 2 * step + 1)]
                for loss in losses if passes == 2 else [losses[0] + losses[1]]:
                    loss.backward()
                optimizer.step()
                optimizer.zero_grad()
            optimizer.close()
            finals.append(weights_of(model))
        for ours, theirs in zip(*finals, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-4)
