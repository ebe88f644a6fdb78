"""The invariants on a CUDA device, and that `step()` never waits for it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from tests.zenflow.device_cases import HYPER, KNOBS, RuntimeCases, loss_of, model_on, weights_of
from zenflow import ZenFlowAdamW, ZenFlowConfig

pytestmark = pytest.mark.gpu


@contextmanager
def no_synchronisation() -> Iterator[None]:
    """torch raises where something waits for the device."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


class TestOnAGpu(RuntimeCases):
    @pytest.fixture
    def device(self) -> torch.device:
        return torch.device("cuda", torch.cuda.current_device())

    @pytest.mark.parametrize("name", KNOBS)
    def test_step_does_not_synchronise_the_device(self, device: torch.device, name: str) -> None:
        model = model_on(device, torch.bfloat16)
        config = ZenFlowConfig(**{**KNOBS[name], "max_grad_norm": 0.5})
        optimizer = ZenFlowAdamW(model.parameters(), config=config, module=model, **HYPER)
        for step in range(8):
            loss_of(model, step).backward()
            if step < 2:  # allocations of the first steps
                optimizer.step()
            else:
                with no_synchronisation():
                    optimizer.step()
            optimizer.zero_grad()
        optimizer.close()

    def test_scaled_fp16_is_the_unscaled_run(self, device: torch.device) -> None:
        finals = []
        for scale in (1.0, 1024.0):
            model = model_on(device, torch.float16)
            optimizer = ZenFlowAdamW(
                model.parameters(), config=ZenFlowConfig(**KNOBS["windows"]), module=model, **HYPER
            )
            scaler = torch.amp.GradScaler("cuda", init_scale=scale, growth_interval=1000)
            for step in range(6):
                scaler.scale(loss_of(model, step)).backward()
                scaler.unscale_(optimizer)
                torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad()
            optimizer.close()
            finals.append(weights_of(model))
        for ours, theirs in zip(*finals, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=2e-2, atol=2e-3)

    def test_a_step_is_timed_with_its_stall(self, device: torch.device) -> None:
        model = model_on(device, torch.bfloat16)
        optimizer = ZenFlowAdamW(model.parameters(), config=ZenFlowConfig(**KNOBS["zero-offload"]), module=model)
        for step in range(5):
            loss_of(model, step).backward()
            optimizer.step()
            optimizer.zero_grad()
        last = optimizer.history(wait=True)[-1]
        optimizer.close()
        assert last.step_ms is not None
        assert last.stall_ms is not None
        assert 0 < sum(last.stall_ms.values()) < last.step_ms
