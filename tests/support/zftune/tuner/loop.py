"""A loop that knows nothing of tuning, and what attaches to it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

import zftune
from zenflow import ZenFlowAdamW, ZenFlowConfig
from zftune.store.store import Store
from zftune.tuner.space import Setting

BEGIN = ZenFlowConfig(topk_ratio=0.1, update_interval=4, ledger=True, host_threads=1)
Attach = Callable[..., "zftune.Tuner"]


class Loop:
    """A loop that knows nothing of tuning but that it logs its loss."""

    def __init__(
        self, config: ZenFlowConfig = BEGIN, *, logs: bool = True, given: bool = True, lr: float = 1e-5
    ) -> None:
        torch.manual_seed(0)
        self.module = nn.Sequential(nn.Linear(32, 64, bias=False), nn.Tanh(), nn.Linear(64, 8, bias=False))
        module = self.module if given else None
        self.optimizer = ZenFlowAdamW(self.module.parameters(), lr=lr, config=config, module=module)
        self.batch = torch.randn(16, 32)
        self.logs = logs

    def loss(self) -> torch.Tensor:
        return self.module(self.batch).square().mean()  # type: ignore[no-any-return]

    def step(self, scale: float = 1.0) -> None:
        loss = self.loss() * scale
        loss.backward()
        if self.logs:
            zftune.log_loss(loss)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def run(self, tuner: zftune.Tuner, until: Callable[[], bool] = lambda: False) -> None:
        ends = time.monotonic() + 240
        while tuner.searching and not until():
            self.step()
            if tuner.live is None or tuner.live.request is None:
                time.sleep(0.01)  # these steps are so short that a thought would last for thousands of them
            assert time.monotonic() < ends

    @property
    def knobs(self) -> Setting:
        return Setting.of(self.optimizer.config)


@pytest.fixture
def attach(store: Store) -> Iterator[Attach]:
    tuners: list[zftune.Tuner] = []
    optimizers: list[ZenFlowAdamW] = []

    def attach(loop: Loop, **more: Any) -> zftune.Tuner:
        tuners.append(zftune.attach(loop.optimizer, **{"store": store, "most_measurements": 5, **more}))
        optimizers.append(loop.optimizer)
        return tuners[-1]

    yield attach
    for tuner in tuners:
        tuner.close()
    for optimizer in optimizers:  # a logged error holds it longer than the test does
        optimizer.close()
