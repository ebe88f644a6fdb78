"""I6: the bytes on the link are those of the deferred columns; and the runtime's own count misses none."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from typing import Any

import pytest
import torch
from torch import nn

from tests.support.tiers import combinations, fast, repeated
from tests.support.zenflow.cases import case_of, run
from zenflow import CpuDevice, StepStats, ZenFlowAdamW, ZenFlowConfig
from zenflow.device import HostSpan, Mark, Transfer
from zenflow.layout import plan_model

SHAPES = ((6, 20), (9, 13), (16, 16), (12,), (3, 4, 10))
WINDOWS = 5


class CountingDevice(CpuDevice):
    """Counts every byte that it is asked to copy."""

    in_host_memory = False  # else nothing is copied down

    def __init__(self) -> None:
        super().__init__()
        self.down_bytes = 0
        self.up_bytes = 0

    def d2h(self, source: torch.Tensor, target: torch.Tensor) -> Transfer:
        self.down_bytes += source.numel() * source.element_size()
        return super().d2h(source, target)

    def h2d(self, source: torch.Tensor, after: HostSpan, asked: Mark) -> tuple[Transfer, torch.Tensor]:
        self.up_bytes += source.numel() * source.element_size()
        return super().h2d(source, after, asked)


def parameters(dtype: torch.dtype) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(1)
    return [nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for shape in SHAPES]


def deferred_bytes(weights: Sequence[nn.Parameter], config: ZenFlowConfig) -> int:
    """Bytes of one gradient of all deferred columns, in the parameters' dtype."""
    planned = plan_model(weights, config, set()).weights
    return sum(part.deferred * part.rows * w.element_size() for w, part in zip(weights, planned, strict=True))


def train(
    config: ZenFlowConfig, dtype: torch.dtype, steps: int, device: CountingDevice
) -> tuple[list[StepStats], list[nn.Parameter]]:
    """Stats of `steps` steps, and of a last one without gradients that accounts for what a flush applied."""
    weights = parameters(dtype)
    optimizer = ZenFlowAdamW(weights, config=config, device=device)
    generator = torch.Generator().manual_seed(2)
    for _ in range(steps):
        for weight in weights:
            weight.grad = torch.randn(weight.shape, generator=generator).to(dtype)
        optimizer.step()
    optimizer.flush()
    optimizer.zero_grad()
    optimizer.step()
    stats = optimizer.history(wait=True)
    optimizer.close()
    assert len(stats) == steps + 1
    return stats, weights


@pytest.mark.parametrize(
    ("topk", "interval", "ratio", "dtype"),
    combinations(
        topk=[0.0, 0.05, 0.5, 1.0], interval=[1, 2, 4, 7], ratio=[1.0, 0.6], dtype=[torch.float32, torch.bfloat16]
    ),
)
def test_i6_bytes_of_steady_windows(topk: float, interval: int, ratio: float, dtype: torch.dtype) -> None:
    config = ZenFlowConfig(
        topk_ratio=topk, update_interval=interval, offload_ratio=ratio, select_interval=1000, bucket_bytes=200
    )
    stats, weights = train(config, dtype, WINDOWS * interval, CountingDevice())
    gradient_bytes = deferred_bytes(weights, config)
    assert (gradient_bytes == 0) == (topk == 1.0)
    # The first window has none before it that comes back, and at its close columns change tier.
    steady = stats[2 * interval : WINDOWS * interval]
    assert sum(s.d2h_bytes for s in steady) == gradient_bytes * len(steady)
    assert sum(s.h2d_bytes for s in steady) * interval == gradient_bytes * len(steady)
    total = sum(s.d2h_bytes + s.h2d_bytes for s in steady)
    assert total * interval == gradient_bytes * (interval + 1) * len(steady)  # (1-k)(1 + 1/S) x offloaded, a step
    assert [s.closed for s in stats[:-1]] == [step % interval == 0 for step in range(1, WINDOWS * interval + 1)]
    assert sum(s.migrated_bytes for s in steady) == 0
    assert {s.d2h_bytes for s in stats[:-1]} == {gradient_bytes}


def test_i6_h2d_is_spread_over_the_lag() -> None:
    config = ZenFlowConfig(topk_ratio=0.0, update_interval=4, bucket_bytes=1)  # a bucket a column
    stats, weights = train(config, torch.float32, 16, CountingDevice())
    per_step = [s.h2d_bytes for s in stats[4:16]]
    assert per_step[:4] == per_step[4:8] == per_step[8:]
    largest_column = max(weight.shape[0] if weight.dim() == 2 else 12 for weight in weights) * 4
    even = deferred_bytes(weights, config) / 4
    columns = sum(weight.shape[-1] for weight in weights if weight.dim() > 1)
    assert max(per_step[:4]) <= (columns // 4 + 1) * largest_column
    assert min(per_step[:4]) > even / 2


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_i6_migrations_are_counted_apart(dtype: torch.dtype, overlap: bool) -> None:
    rows, columns, interval, element = 6, 20, 3, dtype.itemsize
    config = ZenFlowConfig(
        topk_ratio=0.25, update_interval=interval, select_interval=interval, overlap_step=overlap, bucket_bytes=60
    )
    weight = nn.Parameter(torch.randn(rows, columns).to(dtype))
    device = CountingDevice()
    optimizer = ZenFlowAdamW([weight], config=config, device=device)
    for step in range(1, 4 * interval + 1):
        grad = torch.ones(rows, columns)
        grad[:, (step // interval * 5) % columns :][:, :5] *= 10  # another five columns in every window
        weight.grad = grad.to(dtype)
        optimizer.step()
    stats = optimizer.history(wait=True)
    optimizer.close()
    moved = [round(5 * (s.churn or 0.0)) for s in stats]
    assert sum(moved) >= 10
    for s, count in zip(stats, moved, strict=True):
        expected = 2 * count * (3 * rows + 1) * 4  # both ways: master, two moments and a count
        assert s.migrated_bytes == (expected if s.step > 1 else 15 * rows * element), s.step
        assert s.d2h_bytes == 15 * rows * element
    # What moved crosses with its state and not as an updated weight.
    returned = sum(s.h2d_bytes for s in stats)
    windows = 4 if not overlap else 3
    assert returned == (windows * 15 - sum(moved[: windows * interval])) * rows * element


KNOBS: list[dict[str, Any]] = [
    {"update_interval": 1, "select_interval": 1, "topk_ratio": 0.3, "overlap_step": False},
    {"update_interval": 3, "select_interval": 2, "topk_ratio": 0.3, "max_grad_norm": 0.5},
    {"update_interval": 4, "select_interval": 1, "topk_ratio": 0.1, "offload_ratio": 0.6, "skip_nonfinite": True},
    {"update_interval": 2, "topk_ratio": 0.0, "pipeline": "none", "overlap_step": False},
    {"update_interval": 5, "topk_ratio": 0.5, "full_warm_up_rounds": 3, "deferred_update": "mean"},
]


@pytest.mark.parametrize(
    ("knobs", "dtype"),
    fast(
        [(knobs, (torch.float32, torch.bfloat16)[number % 2]) for number, knobs in enumerate(KNOBS)],
        all_of=list(product(KNOBS, (torch.float32, torch.bfloat16))),
    ),
)
def test_no_byte_is_uncounted(knobs: dict[str, Any], dtype: torch.dtype) -> None:
    """Indices that go to the device are not copied by a `CpuDevice`, nor counted there; everything else is both."""
    device = CountingDevice()
    stats, _ = train(ZenFlowConfig(bucket_bytes=100, **knobs), dtype, 13, device)
    counted = sum(s.d2h_bytes + s.h2d_bytes + s.index_bytes + s.migrated_bytes for s in stats)
    assert counted == device.down_bytes + device.up_bytes
    assert sum(s.d2h_bytes for s in stats) <= device.down_bytes
    assert sum(s.h2d_bytes for s in stats) <= device.up_bytes


@pytest.mark.parametrize("seed", range(repeated(40)))
def test_no_byte_is_uncounted_in_random_cases(seed: int) -> None:
    """Skips, absent gradients, tied weights, flushes."""
    device = CountingDevice()
    last: list[ZenFlowAdamW] = []

    def make(groups: Any, **arguments: Any) -> ZenFlowAdamW:
        last.append(ZenFlowAdamW(groups, device=device, **arguments))
        return last[-1]

    def flush_last(optimizer: ZenFlowAdamW, weights: list[nn.Parameter], step: int) -> None:
        if step == case.steps:
            optimizer.flush()
            for weight in weights:
                weight.grad = None
            optimizer.step()

    case = case_of(seed)
    run(case, make, on_step=flush_last)
    stats = last[0].history(wait=True)
    assert len(stats) == case.steps + 1
    counted = sum(s.d2h_bytes + s.h2d_bytes + s.index_bytes + s.migrated_bytes for s in stats)
    assert counted == device.down_bytes + device.up_bytes
