"""Where steps share their cores with the host update, each has its share of it, and nobody waits for what is held."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from torch import nn

from zenflow import CpuDevice, ZenFlowAdamW, ZenFlowConfig
from zenflow.device import Device

INTERVAL = 4
CONFIG = ZenFlowConfig(topk_ratio=0.25, update_interval=INTERVAL, select_interval=100)
SOON_S = 30.0


class Run:
    """Eight layers, each a bucket; two of them are due after each step of the lag."""

    def __init__(self, device: Device, config: ZenFlowConfig = CONFIG) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(*(nn.Linear(12, 12, bias=False) for _ in range(8)))
        parameters = self.model.parameters()
        self.optimizer = ZenFlowAdamW(parameters, lr=1e-2, config=config, module=self.model, device=device)
        self.steps = 0

    def train(self, steps: int) -> None:
        for _ in range(steps):
            self.steps += 1
            torch.manual_seed(self.steps)
            self.model(torch.randn(3, 12)).square().sum().backward()
            self.optimizer.step()
            self.optimizer.zero_grad()

    def unfinished(self) -> int:
        """Jobs of the last window that the host is not through with, once it has done all that it may."""
        windows = self.optimizer._training.model.windows
        jobs = [flight.window.job for flight in windows.in_flight]
        clock = self.optimizer.device.clock
        until = clock.now() + SOON_S
        while any(not job.finished and job.not_before <= self.steps for job in jobs) and clock.now() < until:
            clock.sleep(0.001)
        return sum(not job.finished for job in jobs)

    def weights(self) -> list[torch.Tensor]:
        return [weight.clone() for weight in self.model.state_dict().values()]


@pytest.fixture
def run() -> Iterator[Run]:
    made = Run(CpuDevice())
    yield made
    made.optimizer.close()


def test_each_step_has_its_share_of_the_host_update(run: Run) -> None:
    run.train(INTERVAL)
    assert run.unfinished() == 6  # of the eight, two may start
    for left in (4, 2, 0):
        run.train(1)
        assert run.unfinished() == left


@pytest.mark.parametrize("ask", ["flush", "state_dict", "ledger"])
def test_whoever_waits_gets_everything(request: pytest.FixtureRequest, ask: str) -> None:
    run = Run(CpuDevice(), replace(CONFIG, ledger=ask == "ledger"))
    request.addfinalizer(run.optimizer.close)
    run.train(INTERVAL)
    assert run.unfinished() == 6
    getattr(run.optimizer, ask)()
    assert run.unfinished() == 0


def test_a_step_that_needs_the_logs_room_waits_for_nothing_that_is_held(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The log is full at a close: where the host did nothing, the next step would have no place for its gradients."""
    monkeypatch.setattr(run.optimizer._training.engine, "reach", lambda step: None)
    run.train(4 * INTERVAL)
    assert run.optimizer.steps == 4 * INTERVAL


def test_weights_are_those_of_a_run_that_holds_nothing(run: Run, request: pytest.FixtureRequest) -> None:
    class Hasty(CpuDevice):
        in_host_memory = False

    other = Run(Hasty())
    request.addfinalizer(other.optimizer.close)
    for one in (run, other):
        one.train(3 * INTERVAL + 1)
    assert all(torch.equal(*pair) for pair in zip(run.weights(), other.weights(), strict=True))


def test_held_jobs_keep_nothing_from_ending() -> None:
    run = Run(CpuDevice())
    run.train(INTERVAL)
    assert run.unfinished() == 6
    run.optimizer.abandon()
