"""A small model with real backward passes, and training loops over it, for tests of devices and waits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.support.zenflow.cases import same_bits
from zenflow import ZenFlowAdamW, ZenFlowConfig
from zenflow.device import Device

VOCABULARY = 11


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.inner = nn.Linear(width, 2 * width)
        self.outer = nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.outer(torch.tanh(self.inner(x)))
        return out


class Stack(nn.Module):
    """Embedding, layers, head. `reentrant`: how layers are checkpointed; None: not at all."""

    def __init__(self, width: int = 8, depth: int = 2, reentrant: bool | None = None) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.layers = nn.ModuleList(Block(width) for _ in range(depth))
        self.head = nn.Linear(width, VOCABULARY)
        self.reentrant = reentrant

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x) if self.reentrant is None else checkpoint(layer, x, use_reentrant=self.reentrant)
        logits: Tensor = self.head(x)
        return nn.functional.cross_entropy(logits.float().flatten(0, 1), tokens.roll(1, dims=1).flatten())


class Flat(nn.Module):
    """A model without a list of layers."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.head = nn.Linear(width, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        logits: Tensor = self.head(torch.tanh(self.embedding(tokens)))
        return nn.functional.cross_entropy(logits.float().flatten(0, 1), tokens.roll(1, dims=1).flatten())


def tokens_of(step: int) -> Tensor:
    return torch.randint(0, VOCABULARY, (2, 5), generator=torch.Generator().manual_seed(step))


def seeded(build: Callable[..., nn.Module], dtype: torch.dtype = torch.float32, **arguments: Any) -> nn.Module:
    torch.manual_seed(7)
    return build(**arguments).to(dtype)


def train(
    model: nn.Module,
    config: ZenFlowConfig,
    *,
    steps: int,
    device: Device | None = None,
    with_module: bool = True,
    after_step: Callable[[ZenFlowAdamW, int], None] | None = None,
) -> list[Tensor]:
    """The losses that training saw, then the weights after a last flush."""
    optimizer = ZenFlowAdamW(
        model.parameters(), lr=0.02, config=config, module=model if with_module else None, device=device
    )
    seen = []
    for step in range(1, steps + 1):
        loss = model(tokens_of(step))
        seen.append(loss.detach().clone())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if after_step is not None:
            after_step(optimizer, step)
    optimizer.close()
    return [*seen, *(parameter.detach().clone() for parameter in model.parameters())]


def assert_same_run(ours: list[Tensor], theirs: list[Tensor]) -> None:
    """Bitwise equality of what two calls of `train` returned."""
    assert len(ours) == len(theirs)
    different = [
        index for index, (a, b) in enumerate(zip(ours, theirs, strict=True)) if not bool(same_bits(a, b).all())
    ]
    assert different == [], "places in the losses, then the parameters, that differ"
