"""The system without offloading: it trains as torch's AdamW does, and steps take the time of the device."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from zenflow.device import device_for
from zftune.profile.companions import FusedAdamW, TorchAdamW

PLAIN = TorchAdamW(max_grad_norm=None, skip_nonfinite=False)


def model_of(dtype: torch.dtype) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 4)).to(dtype)


def gradients(model: nn.Module, step: int, scale: float = 1.0) -> None:
    generator = torch.Generator().manual_seed(step)
    for parameter in model.parameters():
        parameter.grad = (scale * torch.randn(parameter.shape, generator=generator)).to(parameter.dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("max_grad_norm", [None, 0.5])
def test_it_is_adamw_on_fp32_masters(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, max_grad_norm: float | None
) -> None:
    monkeypatch.setattr("zftune.profile.companions._PART_ELEMENTS", 36)  # two parts
    ours = model_of(dtype)
    masters = copy.deepcopy(ours).float()
    system = TorchAdamW(max_grad_norm=max_grad_norm, skip_nonfinite=False)
    optimizer = FusedAdamW(ours.parameters(), lr=1e-2, system=system, device=device_for(torch.device("cpu")))
    plain = torch.optim.AdamW(masters.parameters(), lr=1e-2, foreach=False)
    for step in range(4):
        gradients(ours, step)
        for parameter, master in zip(ours.parameters(), masters.parameters(), strict=True):
            assert parameter.grad is not None
            master.grad = parameter.grad.float()
        if max_grad_norm is not None:
            nn.utils.clip_grad_norm_(masters.parameters(), max_grad_norm)
        optimizer.step()
        plain.step()
    tolerance = 1e-6 if dtype == torch.float32 else 1e-2
    for parameter, master in zip(ours.parameters(), masters.parameters(), strict=True):
        torch.testing.assert_close(parameter.float(), master, rtol=tolerance, atol=tolerance)


def test_a_step_that_is_not_finite_is_skipped() -> None:
    model = model_of(torch.bfloat16)
    before = [parameter.clone() for parameter in model.parameters()]
    system = TorchAdamW(max_grad_norm=1.0, skip_nonfinite=True)
    optimizer = FusedAdamW(model.parameters(), lr=1e-2, system=system, device=device_for(torch.device("cpu")))
    gradients(model, 0, scale=float("inf"))
    optimizer.step()
    assert all(map(torch.equal, model.parameters(), before))
    gradients(model, 1)
    optimizer.step()
    assert not any(map(torch.equal, model.parameters(), before))


def test_what_is_frozen_or_has_no_gradient_stays() -> None:
    model = model_of(torch.bfloat16)
    model[0].requires_grad_(False)
    optimizer = FusedAdamW(model.parameters(), lr=1e-2, system=PLAIN, device=device_for(torch.device("cpu")))
    before = copy.deepcopy(model)
    weight = next(model[1].parameters())
    weight.grad = torch.ones_like(weight)
    optimizer.step()
    changed = [not torch.equal(*pair) for pair in zip(model.parameters(), before.parameters(), strict=True)]
    assert changed == [False, False, True, False]
