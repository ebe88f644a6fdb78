"""Host memory that stays is allocated for the first gradients, never in a later hook of backward."""

from __future__ import annotations

import io
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.support.zenflow.small import Stack, tokens_of
from zenflow import ZenFlowAdamW, ZenFlowConfig
from zenflow.host.memory import HostMemory

STEPS = 14


class Allocations:
    """What is allocated to stay, by what the training thread is in."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.found: Counter[tuple[str, int]] = Counter()
        self.inside = "making"
        self.step = 0
        monkeypatch.setattr(HostMemory, "empty", self._counted(HostMemory.empty))

    def _counted(self, allocate: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def counted(*args: Any, **kwargs: Any) -> torch.Tensor:
            self.found[self.inside, self.step] += 1
            return allocate(*args, **kwargs)

        return counted

    def train(self, model: Stack, optimizer: ZenFlowAdamW, steps: range, halfway: Callable[[], object]) -> None:
        for self.step in steps:
            loss = model(tokens_of(self.step))
            self.inside = "backward"
            loss.backward()
            self.inside = "step"
            optimizer.step()
            optimizer.zero_grad()
            if self.step == STEPS // 2:
                halfway()

    def by(self, inside: str) -> list[int]:
        """The steps in which there were some."""
        return sorted(step for where, step in self.found if where == inside)


@pytest.fixture
def allocations(monkeypatch: pytest.MonkeyPatch) -> Allocations:
    return Allocations(monkeypatch)


def made(**knobs: Any) -> tuple[Stack, ZenFlowAdamW]:
    torch.manual_seed(3)
    model = Stack(width=50, depth=2).to(torch.bfloat16)
    config = ZenFlowConfig(select_interval=1 << 30, bucket_bytes=1300, **{"update_interval": 3, **knobs})
    return model, ZenFlowAdamW(model.parameters(), config=config, module=model)


@pytest.mark.parametrize(
    "knobs",
    [{}, {"topk_ratio": 0.0}, {"update_interval": 1}, {"update_interval": "auto", "max_update_interval": 4}],
    ids=str,
)
def test_only_the_first_step_allocates(allocations: Allocations, knobs: dict[str, Any]) -> None:
    model, optimizer = made(**knobs)
    allocations.train(model, optimizer, range(1, STEPS + 1), lambda: None)
    assert allocations.by("backward") == [1]
    assert allocations.by("step") == []
    optimizer.close()


@pytest.mark.parametrize("change", [{"update_interval": 7}, {"topk_ratio": 0.4}, {"offload_ratio": 0.5}], ids=str)
def test_a_change_of_knobs_allocates_nothing_in_backward_either(
    allocations: Allocations, change: dict[str, Any]
) -> None:
    model, optimizer = made()
    allocations.train(model, optimizer, range(1, STEPS + 1), lambda: optimizer.set_knobs(**change))
    assert allocations.by("backward") == [1]
    optimizer.close()


def test_loading_allocates_what_a_saved_run_will_need(allocations: Allocations) -> None:
    model, optimizer = made()
    allocations.train(model, optimizer, range(1, 3), lambda: None)
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    optimizer.abandon()
    resumed = ZenFlowAdamW(model.parameters(), config=optimizer.config, module=model)
    allocations.inside = "loading"
    resumed.load_state_dict(torch.load(file, weights_only=True))
    allocations.found.clear()
    allocations.train(model, resumed, range(3, STEPS), lambda: None)
    assert not allocations.found
    resumed.close()
