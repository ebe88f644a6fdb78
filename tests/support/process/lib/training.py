"""A real training of a moment: what `before` and `at` hold runs before torch is imported, and after some steps."""

from __future__ import annotations

import os
import sys


def train(steps: int = 9, at: dict[int, object] | None = None) -> None:
    import torch

    torch.manual_seed(0)
    torch.set_num_threads(1)
    layer = torch.nn.Linear(8, 8)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    for step in range(steps):
        layer(torch.ones(4, 8)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        for number, action in (at or {}).items():
            if number == step:
                action()  # type: ignore[operator]
    sys.stdout.write(f"trained {steps}\n")
    sys.stdout.flush()


def kill(signum: int) -> None:
    os.kill(os.getpid(), signum)
