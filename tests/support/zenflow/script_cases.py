"""What training scripts do to weights between two steps, beside an oracle in the same loop.

A script is a function of a `Run`; it trains, reads and writes, and hands every weight that it read to `run.note`. It is
run with the optimizer under test and with its oracle, and both have to read the same: `torch.optim.AdamW` where no
update is late, else `tests.support.oracle`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.support.oracle import ReferenceAdamW
from tests.support.tiers import everything, fast
from tests.support.zenflow.small import tokens_of
from zenflow import CpuDevice, ZenFlowAdamW, ZenFlowConfig
from zenflow.device import Arrived, HostSpan, Mark, Transfer

LR, WEIGHT_DECAY = 0.02, 0.05
BUCKET_BYTES = 256  # several buckets a weight, so that some are in flight and others not


@dataclass(frozen=True)
class Setting:
    """Knobs, and whether their updates are late."""

    name: str
    config: ZenFlowConfig
    late: bool

    def __str__(self) -> str:
        return self.name


def _setting(name: str, *, late: bool = False, **knobs: Any) -> Setting:
    return Setting(name, ZenFlowConfig(bucket_bytes=BUCKET_BYTES, **knobs), late)


SETTINGS = [
    _setting("exact", topk_ratio=0.25, update_interval=1, overlap_step=False, select_interval=3),
    _setting("zero_offload", topk_ratio=0.0, update_interval=1, overlap_step=False, pipeline="none"),
    _setting("zero_offload_pipelined", topk_ratio=0.0, update_interval=1, overlap_step=False),
    _setting("twin_flow", topk_ratio=0.0, update_interval=1, overlap_step=False, offload_ratio=0.5),
    _setting("resident", offload_ratio=0.0, update_interval=1, overlap_step=False),
    _setting("one_step_late", late=True, topk_ratio=0.25, update_interval=1, select_interval=3),
    _setting("windows", late=True, topk_ratio=0.25, update_interval=4, select_interval=4),
    _setting("coasting", late=True, topk_ratio=0.25, update_interval=4, select_interval=4, look_ahead="coast"),
    _setting(
        "staggered",
        late=True,
        topk_ratio=0.25,
        update_interval=4,
        select_interval=4,
        look_ahead="guess",
        window_phase="staggered",
    ),
    _setting("guessed", late=True, topk_ratio=0.0, update_interval=3, look_ahead="guess"),
    _setting(
        "windows_waited_for", late=True, topk_ratio=0.25, update_interval=4, overlap_step=False, select_interval=4
    ),
    _setting("auto", late=True, topk_ratio=0.25, update_interval="auto", select_interval="auto"),
]


_ALIKE = ("zero_offload_pipelined", "one_step_late", "windows_waited_for")
TRIED = fast([one for one in SETTINGS if one.name not in _ALIKE], all_of=SETTINGS)
"""By day without those whose code another one runs as well."""


@pytest.fixture(params=TRIED, ids=str)
def setting(request: pytest.FixtureRequest) -> Setting:
    """Each of them."""
    value: Setting = request.param
    return value


@pytest.fixture(params=[True, False] if everything() else [None])
def with_module(request: pytest.FixtureRequest, setting: Setting) -> bool:
    """Whether the optimizer knows the model: both before a release, by day one of them with each setting in turn."""
    if request.param is not None:
        return bool(request.param)
    return (SETTINGS.index(setting) + len(request.node.originalname)) % 2 == 0


class _OnItsWay(Arrived):
    def done(self) -> bool:
        return False


class LateLink(CpuDevice):
    """Plain CPU whose results are always still on their way when they are due, so that every wait is left to a use."""

    def h2d(self, source: Tensor, after: HostSpan, asked: Mark) -> tuple[Transfer, Tensor]:
        return _OnItsWay(self.mark(), source.nbytes), source.clone()


class Run:
    """One training: a model, its optimizer, and what the script read."""

    def __init__(self, model: nn.Module, make: Callable[[nn.Module], Any]) -> None:
        self.model = model
        self.optimizer = make(model)
        self.steps = 0
        self.read: list[tuple[int, Tensor]] = []

    def loss(self) -> Tensor:
        """Of the next batch."""
        loss: Tensor = self.model(tokens_of(self.steps + 1))
        return loss

    def take(self) -> None:
        """A step with the gradients that are there."""
        self.optimizer.step()
        self.steps += 1

    def step(self, penalty: Callable[[], Tensor] | None = None) -> None:
        """Forward, backward, step, and no gradients left."""
        loss = self.loss()
        (loss if penalty is None else loss + penalty()).backward()
        self.take()
        self.optimizer.zero_grad()

    def train(self, steps: int) -> None:
        for _ in range(steps):
            self.step()

    def note(self, tensors: Iterable[Tensor]) -> None:
        """Remember what was read."""
        self.read += [(self.steps, tensor.detach().clone()) for tensor in tensors]

    @property
    def weights(self) -> list[nn.Parameter]:
        return list(self.model.parameters())


Script = Callable[[Run], None]


def ours(setting: Setting, *, with_module: bool) -> Callable[[nn.Module], ZenFlowAdamW]:
    """Makes the optimizer under test."""
    return lambda model: ZenFlowAdamW(
        model.parameters(),
        lr=LR,
        weight_decay=WEIGHT_DECAY,
        config=setting.config,
        module=model if with_module else None,
        device=LateLink(),
    )


def oracle(setting: Setting, *, with_module: bool) -> Callable[[nn.Module], Any]:
    """Makes what it is compared with."""
    if not setting.late:
        return lambda model: torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=WEIGHT_DECAY)
    return lambda model: ReferenceAdamW(
        model.parameters(),
        lr=LR,
        weight_decay=WEIGHT_DECAY,
        config=setting.config,
        module=model if with_module else None,
    )


def assert_same_reads(found: Run, expected: Run, *, tolerance: float = 1e-5) -> None:
    assert len(found.read) == len(expected.read) > 0
    for (step, tensor), (_, other) in zip(found.read, expected.read, strict=True):
        assert tensor.shape == other.shape
        worst = float((tensor - other).abs().max()) if tensor.numel() else 0.0
        assert worst <= tolerance, f"after step {step}: off by {worst}"
