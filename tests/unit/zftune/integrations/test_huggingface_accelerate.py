"""Accelerate with this package's optimizer, accumulated, clipped, saved and resumed; torch's AdamW beside it."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

pytest.importorskip("accelerate", reason="the huggingface extra is not installed")

from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.state import AcceleratorState

from tests.support.zftune.integrations.trainers import EXACT, LATE, furthest, same, weights
from zenflow import ZenFlowAdamW, ZenFlowConfig

LR = 1e-2


@pytest.fixture(autouse=True)
def fresh_state() -> Iterator[None]:
    """Accelerate keeps one state in a process."""
    AcceleratorState._reset_state(True)
    yield
    AcceleratorState._reset_state(True)


class Run:
    """A training loop as Accelerate's documentation has it, 8 batches an epoch."""

    def __init__(self, config: ZenFlowConfig | None, *, passes: int = 1, precision: str = "no") -> None:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(16, 48), nn.GELU(), nn.Linear(48, 4))
        if config is not None:
            config = dataclasses.replace(config, gradient_accumulation_steps=passes)
        if config is None:
            optimizer: torch.optim.Optimizer = torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=0.1)
        else:
            optimizer = ZenFlowAdamW(model.parameters(), lr=LR, weight_decay=0.1, config=config, module=model)
        scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, 20)
        self.inner = optimizer
        self.accelerator = Accelerator(cpu=True, gradient_accumulation_steps=passes, mixed_precision=precision)
        data = TensorDataset(torch.randn(32, 16), torch.randn(32, 4))
        self.model, self.optimizer, self.loader, self.scheduler = self.accelerator.prepare(
            model, optimizer, DataLoader(data, batch_size=4), scheduler
        )
        self.losses: list[float] = []

    def epoch(self, batches: int = 8) -> None:
        for number, (inputs, targets) in enumerate(self.loader):
            if number < batches:
                self.step(inputs, targets)

    def step(self, inputs: Tensor, targets: Tensor) -> None:
        with self.accelerator.accumulate(self.model):
            loss = nn.functional.mse_loss(self.model(inputs), targets)
            self.accelerator.backward(loss)
            if self.accelerator.sync_gradients:
                self.accelerator.clip_grad_norm_(self.model.parameters(), 0.5)
            self.optimizer.step()
            self.scheduler.step()
            self.optimizer.zero_grad()
        self.losses.append(float(loss.detach()))

    @property
    def weights(self) -> dict[str, Tensor]:
        return weights(self.accelerator.unwrap_model(self.model))


@pytest.mark.parametrize("passes", [1, 2])
@pytest.mark.parametrize("precision", ["no", "bf16"])
def test_exact_is_torchs_adamw(precision: str, passes: int) -> None:
    ours, torchs = (Run(config, passes=passes, precision=precision) for config in (EXACT, None))
    for _ in range(2):
        ours.epoch()
        torchs.epoch()
    assert type(ours.optimizer) is AcceleratedOptimizer
    assert ours.scheduler.get_last_lr() == torchs.scheduler.get_last_lr()
    assert ours.losses == pytest.approx(torchs.losses, rel=1e-5 if precision == "no" else 1e-3)
    assert furthest(ours.weights, torchs.weights) < (1e-4 if precision == "no" else 5e-2) * LR
    assert furthest(ours.weights, Run(None, precision=precision).weights) > 3 * LR


@pytest.mark.parametrize("passes", [1, 2])
@pytest.mark.parametrize("precision", ["no", "bf16"])
def test_a_resumed_run_is_the_uninterrupted_one(tmp_path: Path, precision: str, passes: int) -> None:
    """Saved in the middle of a window by `save_state`; bit for bit."""
    whole, before = (Run(LATE, passes=passes, precision=precision) for _ in range(2))
    for run in (whole, before):
        run.epoch(6)
    before.accelerator.save_state(str(tmp_path))
    whole.epoch()
    resumed = Run(LATE, passes=passes, precision=precision)
    resumed.accelerator.load_state(str(tmp_path))
    assert same(resumed.weights, before.weights)
    resumed.epoch()
    assert resumed.losses == whole.losses[6:]
    assert same(resumed.weights, whole.weights)
    seen = whole.weights
    for run in (whole, resumed):
        run.inner.flush()  # type: ignore[attr-defined]
    assert same(resumed.weights, whole.weights)
    assert not same(whole.weights, seen)  # something was pending


@pytest.mark.parametrize("config", [EXACT, LATE], ids=["exact", "late"])
def test_a_loss_scaler_in_the_wrapper(config: ZenFlowConfig) -> None:
    """As with fp16, which Accelerate refuses on a CPU: its wrapper, torch's scaler, and an overflow that is skipped."""
    Accelerator(cpu=True)
    ours, torchs = (_scaled(of) for of in (config, None))
    if config is EXACT:
        assert furthest(ours, torchs) < 1e-4 * LR
    assert all(bool(torch.isfinite(weight).all()) for weight in ours.values())


def _scaled(config: ZenFlowConfig | None) -> dict[str, Any]:
    """Weights after seven steps under a scaler, the fourth of which overflows."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 48), nn.GELU(), nn.Linear(48, 4))
    if config is None:
        inner: torch.optim.Optimizer = torch.optim.AdamW(model.parameters(), lr=LR)
    else:
        inner = ZenFlowAdamW(model.parameters(), lr=LR, weight_decay=0.01, config=config, module=model)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    optimizer = AcceleratedOptimizer(inner, scaler=scaler)
    for number in range(7):
        loss = model(torch.randn(4, 16)).square().mean() * (float("inf") if number == 3 else 1.0)
        scaler.scale(loss).backward()
        scaler.unscale_(inner)
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
    assert scaler.get_scale() == 512.0
    return weights(model)
