"""A language model of odd sizes with everything that a checkpoint must keep apart, and how it is trained."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

WORDS, WIDTH, WIDE = 19, 7, 13
LR, BETAS, EPS = 1e-2, (0.9, 0.98), 1e-8


class Tiny(nn.Module):
    """Tied weights, a frozen layer, a buffer, matrices and vectors, in an order that is not that of their use."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.frozen = nn.Linear(WIDTH, WIDTH)
        self.frozen.requires_grad_(False)
        self.words = nn.Embedding(WORDS, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, WIDE)
        self.down = nn.Linear(WIDE, WIDTH, bias=False)
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.words.weight
        self.register_buffer("shift", torch.randn(WIDTH))

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.norm(self.words(tokens) + self.shift.to(self.words.weight.dtype))
        hidden = hidden + self.down(torch.tanh(self.up(hidden)))
        logits: Tensor = self.head(self.frozen(hidden))
        return logits


def groups_of(model: nn.Module, *, named: bool = False) -> list[dict[str, Any]]:
    trained = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    matrices, vectors = ([pair for pair in trained if (pair[1].dim() > 1) is wanted] for wanted in (True, False))
    return [
        {"params": pairs if named else [p for _, p in pairs], "weight_decay": decay}
        for pairs, decay in ((matrices, 0.1), (vectors, 0.0))
    ]


def loss_of(model: Any, step: int, rank: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(100 * step + rank)
    tokens, targets = (torch.randint(0, WORDS, (24,), generator=generator) for _ in range(2))
    return functional.cross_entropy(model(tokens).float(), targets)


def train(model: nn.Module, optimizer: Any, steps: range) -> Iterator[dict[str, Tensor]]:
    for step in steps:
        optimizer.zero_grad()
        loss_of(model, step).backward()
        optimizer.step()
        yield weights_of(model)


def weights_of(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in model.named_parameters() if p.requires_grad}
