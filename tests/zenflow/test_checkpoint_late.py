"""A checkpoint whose weights were read while a due host update was still under way: the update is not lost."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from zenflow import CpuDevice, ZenFlowAdamW, ZenFlowConfig
from zenflow.device import HostSpan, Mark, Transfer

INTERVAL = 2
CONFIG = ZenFlowConfig(topk_ratio=0.25, update_interval=INTERVAL, select_interval=100, apply_lag=1)


class GatedHost(CpuDevice):
    """Plain CPU whose host work, from some time on, is done only when a gate opens."""

    def __init__(self) -> None:
        super().__init__()
        self.closed_at: Mark = math.inf
        self.gate = threading.Event()

    def close_gate(self) -> None:
        """What was submitted before passes: a step may wait for it."""
        self.closed_at = self.mark()

    def host_work(
        self, finish: Callable[[], HostSpan], nbytes: int, inputs: Sequence[Transfer], submitted: Mark
    ) -> HostSpan:
        span = finish()
        assert submitted < self.closed_at or self.gate.wait(timeout=60)
        return span


def model_of(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(13, 11), nn.Tanh(), nn.Linear(11, 7))


def optimizer_of(model: nn.Module, device: CpuDevice) -> ZenFlowAdamW:
    return ZenFlowAdamW(model.parameters(), lr=1e-2, config=CONFIG, module=model, device=device)


def train(model: nn.Module, optimizer: ZenFlowAdamW, steps: range) -> None:
    for step in steps:
        batch = torch.randn(5, 13, generator=torch.Generator().manual_seed(step))
        model(batch).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def weights_of(model: nn.Module) -> dict[str, Tensor]:
    """Read past the hooks of `state_dict`, as a script does that copies parameters itself."""
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def test_an_update_that_the_saved_weights_lack_is_made_after_loading() -> None:
    whole, device = model_of(1), GatedHost()
    late_after = 2 * INTERVAL + 1  # the second window's buckets are due
    straight = optimizer_of(whole, CpuDevice())
    train(whole, straight, range(late_after + 4))

    model = model_of(1)
    optimizer = optimizer_of(model, device)
    train(model, optimizer, range(late_after - 2))
    device.close_gate()  # before the window closes
    train(model, optimizer, range(late_after - 2, late_after))
    saved_weights = weights_of(model)
    device.gate.set()
    saved = optimizer.state_dict()
    now = weights_of(model)  # state_dict() has waited
    assert any(not torch.equal(saved_weights[name], now[name]) for name in now), "nothing was late"

    again = model_of(2)
    again.load_state_dict(saved_weights)
    resumed = optimizer_of(again, CpuDevice())
    resumed.load_state_dict(saved)
    train(again, resumed, range(late_after, late_after + 4))
    found, expected = again.state_dict(), whole.state_dict()  # both wait for the last window's update
    assert all(torch.equal(found[name], weight) for name, weight in expected.items())
    optimizer.abandon()
