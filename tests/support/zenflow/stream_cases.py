"""A model whose gradients are streamed, without an optimizer: real tiers, real log, and a count of what was done."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.support.zenflow.cases import same_bits
from tests.support.zenflow.small import Block, Stack, seeded, tokens_of
from zenflow import ZenFlowConfig
from zenflow.deferred import DeferredTier
from zenflow.device import CpuDevice, Device
from zenflow.groups import Groups
from zenflow.history import History
from zenflow.layout import WeightPlan, plan_model
from zenflow.rules import RULES
from zenflow.runtime import make_runtime
from zenflow.staging import ColumnStager, Dispatcher, Staged, void
from zenflow.standin import GradientPlaceholder
from zenflow.streaming import Streamer
from zftune.emulation import EmulatedAccelerator, Rig

ALL = 1 << 30
DEVICES = ("cpu", "emulated")


def device_of(kind: str, *, gbps: float = 1.0) -> Device:
    if kind == "cpu":
        return CpuDevice()
    rig = Rig("stream", "", 1.0, 1.0, link_d2h_gbps=gbps, link_h2d_gbps=gbps, host_gbps=10.0, device_gbps=None, scale=1)
    return EmulatedAccelerator(rig)


@dataclass
class Weight:
    """One parameter's split, with a selection drawn at random."""

    name: str
    parameter: nn.Parameter
    plan: WeightPlan
    deferred: DeferredTier | None
    selected_index: Tensor

    @property
    def selected_columns(self) -> Tensor:
        """On the CPU, as the index is here."""
        return self.selected_index


class CountingStager(ColumnStager[Any]):
    staged = restored = voided = 0

    def restore(self, staged: Staged) -> Tensor:
        self.restored += 1
        return super().restore(staged)

    def void(self, staged: Staged) -> None:
        self.voided += 1
        super().void(staged)


class Streams:
    """The gradients of a module's parameters, on their way to the log."""

    def __init__(
        self,
        module: nn.Module,
        *,
        device: str = "cpu",
        gbps: float = 1.0,
        room_bytes: int = ALL,
        least: int = 1,
        seed: int = 0,
        window: int = 2,
        streams: bool = True,
        bucket_bytes: int = 64,
    ) -> None:
        rng = random.Random(seed)
        config = ZenFlowConfig(
            topk_ratio=0.3,
            offload_ratio=0.9,
            update_interval=window,
            bucket_bytes=bucket_bytes,
            staging_bytes=room_bytes,
            host_threads=1,
        )
        self.device = device_of(device, gbps=gbps)
        self.history = History(self.device)
        self.runtime = make_runtime(self.device, RULES["adamw"], config, self.history)
        self.room = self.runtime.room
        self.dispatcher = Dispatcher(self.runtime, Groups(self.runtime))
        self.streamer = Streamer(least, self._dispatch, self.device.current_stream)
        named = [(name, parameter) for name, parameter in module.named_parameters() if parameter.requires_grad]
        self.parameters = [parameter for _, parameter in named]
        plans = plan_model(self.parameters, config, set()).weights
        self.streamer.watch(self.parameters)
        self.weights: dict[nn.Parameter, Weight] = {}
        self.stagers: dict[nn.Parameter, CountingStager] = {}
        for (name, parameter), plan in zip(named, plans, strict=True):
            weight = self.weights[parameter] = self._weight(rng, name, parameter, plan)
            self.stagers[parameter] = CountingStager(self.runtime, cast(Any, weight))
            if streams and weight.deferred is not None:
                self.streamer.stream(parameter, self.stagers[parameter])
        self.runtime.buckets.allocate()
        self.streamer.regroup()

    def _dispatch(self, gradients: Sequence[tuple[CountingStager, Tensor]]) -> list[Staged]:
        for stager, _ in gradients:
            stager.staged += 1
        return self.dispatcher([(stager.weight, gradient) for stager, gradient in gradients])

    def _weight(self, rng: random.Random, name: str, parameter: nn.Parameter, plan: WeightPlan) -> Weight:
        offloaded = list(range(plan.resident, plan.columns))
        selected = rng.sample(offloaded, plan.selected)
        tier = None
        if plan.deferred:
            columns = torch.tensor([column for column in offloaded if column not in selected])
            tier = DeferredTier(name, plan, parameter.dtype, columns, self.runtime, RULES["adamw"].initial({}))
        return Weight(name, parameter, plan, tier, torch.tensor(selected, dtype=torch.int64))

    @property
    def counts(self) -> tuple[int, int]:
        """Gradients that were staged, and that were restored, since the last call."""
        counted = [(stager.staged, stager.restored) for stager in self.stagers.values()]
        for stager in self.stagers.values():
            stager.staged = stager.restored = 0
        return sum(staged for staged, _ in counted), sum(restored for _, restored in counted)

    @property
    def deferring(self) -> int:
        """Weights that have deferred columns, and so are streamed."""
        return sum(weight.deferred is not None for weight in self.weights.values())

    def log_bytes(self) -> int:
        """Bytes of the log that are taken."""
        return self.runtime.log._pool.taken_bytes

    def take_step(self) -> list[Tensor | None]:
        """The gradients that a step gets, put together again from where they are."""
        left = self.streamer.staged()
        gradients = []
        for parameter in self.parameters:
            staged = left.get(id(parameter))
            gradient = parameter.grad
            if staged is not None:
                assert isinstance(gradient, GradientPlaceholder)
                gradient = self._logged(parameter, staged)
            assert not isinstance(gradient, GradientPlaceholder)
            gradients.append(None if gradient is None else gradient.detach().clone())
        self.streamer.hand_over()
        return gradients

    def _logged(self, parameter: nn.Parameter, staged: Staged) -> Tensor:
        """The gradient as the host and the device have it."""
        weight = self.weights[parameter]
        assert weight.deferred is not None
        whole = torch.full_like(parameter, float("nan"), requires_grad=False)
        matrix = weight.plan.view(whole)
        if staged.resident is not None:
            matrix[:, : weight.plan.resident] = staged.resident.t()
        if staged.selected is not None:
            matrix[:, weight.selected_index] = staged.selected.t()
        for part, sent in zip(weight.deferred.parts, staged.sent, strict=True):
            sent.gradient.transfer.wait()
            columns = weight.deferred.slot_columns[part.slots.start : part.slots.stop]
            matrix[:, columns] = torch.cat(sent.gradient.pieces()).view(len(columns), weight.plan.rows).t()
        void(self.runtime, staged.sent)
        return whole if staged.record.factor is None else whole * staged.record.factor

    def close(self) -> None:
        self.streamer.remove()
        self.runtime.engine.close()
        self.device.close()


class Shared(nn.Module):
    """A layer used three times, checkpointed or not, and a head that is tied to the embedding."""

    def __init__(self, reentrant: bool | None) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 8)
        self.block = Block(8)
        self.reentrant = reentrant

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for _ in range(3):
            x = self.block(x) if self.reentrant is None else checkpoint(self.block, x, use_reentrant=self.reentrant)
        logits = x @ self.embedding.weight.t()
        return nn.functional.cross_entropy(logits.float().flatten(0, 1), tokens.roll(1, dims=1).flatten())


MODELS: dict[str, tuple[Callable[..., nn.Module], dict[str, Any]]] = {
    "stack": (Stack, {}),
    "stack, reentrant": (Stack, {"reentrant": True}),
    "stack, non-reentrant": (Stack, {"reentrant": False}),
    "shared": (Shared, {"reentrant": None}),
    "shared, reentrant": (Shared, {"reentrant": True}),
    "shared, non-reentrant": (Shared, {"reentrant": False}),
}


class Pair:
    """A model whose gradients are streamed, and its twin."""

    def __init__(self, model: str = "stack", dtype: torch.dtype = torch.float32, **arguments: Any) -> None:
        build, options = MODELS[model]
        self.ours: Any = seeded(build, dtype, **options)
        self.plain: Any = seeded(build, dtype, **options)
        self.streams = Streams(self.ours, **arguments)

    def each(self, action: Callable[[nn.Module], object]) -> None:
        for model in (self.plain, self.ours):
            action(model)

    def backward(self, batch: int, **options: Any) -> None:
        self.each(lambda model: model(tokens_of(batch)).backward(**options))

    def step(self) -> None:
        """Compare what a step gets, and begin the next."""
        expected = [parameter.grad for parameter in self.plain.parameters()]
        for ours, theirs in zip(self.streams.take_step(), expected, strict=True):
            assert (ours is None) == (theirs is None)
            if ours is not None and theirs is not None:
                assert bool(same_bits(ours, theirs).all())
        self.each(lambda model: model.zero_grad())
        assert self.streams.log_bytes() == 0
