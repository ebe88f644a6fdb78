"""What the training thread does for each weight, counted: calls of Python and of torch, launches, copies and marks."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from tests.support.zenflow.null_device import NullDevice, model_of, null_kernels
from zenflow import ZenFlowAdamW, ZenFlowConfig

INTERVAL, SELECT_INTERVAL = 4, 16
WARM_UP = 16
ON_CPU = {
    "published": (ZenFlowConfig(), 215, 26),
    "exact": (ZenFlowConfig(update_interval=1, overlap_step=False), 300, 37),
    "zero_offload": (ZenFlowConfig.zero_offload(), 275, 29),
}
"""Most calls of Python and of torch for a weight in a step, on average over a window."""
ON_DEVICE = {"launch": 5.5, "d2h": 1.2, "h2d": 0.5, "mark": 1.0}
"""Most for a weight in a step on a device, on average over a period of selections."""


class Operations(TorchDispatchMode):
    """Counts the operations of torch."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.count = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))


@contextmanager
def python_calls() -> Iterator[Counter[str]]:
    """Calls of Python functions in this thread."""
    calls: Counter[str] = Counter()

    def profiled(frame: Any, event: str, _: object) -> None:
        if event == "call":
            calls[frame.f_code.co_qualname] += 1

    sys.setprofile(profiled)
    try:
        yield calls
    finally:
        sys.setprofile(None)


def on_cpu(config: ZenFlowConfig, weights: int) -> tuple[float, float]:
    """Calls of Python and of torch in a step, on average over a window; nothing is selected in it."""
    torch.manual_seed(0)
    parameters = nn.ParameterList(nn.Parameter(torch.randn(32, 32)) for _ in range(weights))
    optimizer = ZenFlowAdamW(parameters.parameters(), config=config)

    def step() -> None:
        torch.stack([parameter.sum() for parameter in parameters]).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    try:
        return counted(step)
    finally:
        optimizer.close()


def counted(step: Callable[[], None]) -> tuple[float, float]:
    for _ in range(WARM_UP + 1):  # with the step that selects
        step()
    with python_calls() as calls:
        for _ in range(INTERVAL):
            step()
    with Operations() as operations:
        for _ in range(INTERVAL):
            step()
    return calls.total() / INTERVAL, operations.count / INTERVAL


@pytest.mark.parametrize("setting", ON_CPU)
def test_calls_for_a_weight_on_a_cpu(setting: str) -> None:
    config, most_python, most_torch = ON_CPU[setting]
    few, more = (on_cpu(config, weights) for weights in (8, 24))
    python, of_torch = ((many - one) / 16 for one, many in zip(few, more, strict=True))
    print(setting, python, of_torch)
    assert 0 < python <= most_python
    assert 0 < of_torch <= most_torch


def on_device(matrices: int) -> Counter[str]:
    """Launches, copies and marks in a period of selections."""
    device = NullDevice()
    model = model_of(matrices, vectors=2, columns=64)
    config = ZenFlowConfig(topk_ratio=0.25, update_interval=INTERVAL, select_interval=SELECT_INTERVAL, host_threads=1)
    with null_kernels(device):
        optimizer = ZenFlowAdamW(model.parameters(), config=config, module=model, device=device)
        for step in range(WARM_UP + SELECT_INTERVAL):
            if step == WARM_UP:
                device.calls.clear()
            model(torch.zeros(())).backward()
            optimizer.step()
            optimizer.zero_grad()
        optimizer.close()
    calls: Counter[str] = Counter()
    for name, count in device.calls.items():
        calls[name.partition(" ")[0]] += count
    return calls


def test_launches_and_copies_for_a_weight_on_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")  # as for the other tests of this process
    pytest.importorskip("triton", reason="Triton cannot be imported here")
    few, more = on_device(8), on_device(24)
    found = {name: (more[name] - few[name]) / 16 / SELECT_INTERVAL for name in ON_DEVICE}
    print(found)
    for name, most in ON_DEVICE.items():
        assert 0 < found[name] <= most, found
