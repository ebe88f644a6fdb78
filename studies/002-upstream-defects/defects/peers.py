"""What the same gradients give elsewhere: torch's AdamW on fp32 masters, and this project's runtime."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

import zenflow


def hyperparameters(document: dict[str, Any]) -> dict[str, Any]:
    """torch's arguments for what a DeepSpeed configuration says of its optimizer."""
    values = dict(document["optimizer"]["params"])
    if "betas" in values:
        values["betas"] = tuple(values["betas"])
    return values


def adamw(
    weights: Sequence[Tensor],
    document: dict[str, Any],
    steps: Sequence[Sequence[Tensor | None]],
    groups: Sequence[dict[str, Any]] | None = None,
) -> list[list[Tensor]]:
    """`torch.optim.AdamW` on fp32 masters, clipped where the configuration says so; the masters after each step."""
    masters = [nn.Parameter(weight.detach().float().clone()) for weight in weights]
    own = groups or [{} for _ in masters]
    optimizer = torch.optim.AdamW(
        [{"params": [master], **group} for master, group in zip(masters, own, strict=True)],
        **hyperparameters(document),
    )
    seen = []
    for gradients in steps:
        for master, gradient in zip(masters, gradients, strict=True):
            master.grad = None if gradient is None else gradient.float().clone()
        if clip := document.get("gradient_clipping"):
            torch.nn.utils.clip_grad_norm_(masters, clip)
        optimizer.step()
        seen.append([master.detach().clone() for master in masters])
    return seen


class Ours:
    """`zenflow.ZenFlowAdamW` from the very configuration that DeepSpeed gets; `knobs` are set on top of it."""

    def __init__(
        self,
        weights: Sequence[Tensor],
        document: dict[str, Any],
        groups: Sequence[dict[str, Any]] | None = None,
        **knobs: Any,
    ) -> None:
        self.parameters = [nn.Parameter(weight.clone()) for weight in weights]
        own = groups or [{} for _ in self.parameters]
        self.optimizer = zenflow.ZenFlowAdamW(
            [{"params": [p], **group} for p, group in zip(self.parameters, own, strict=True)],
            **hyperparameters(document),
            config=replace(zenflow.ZenFlowConfig.from_ds_config(document), **knobs),
        )

    def step(self, gradients: Sequence[Tensor | None]) -> None:
        for parameter, gradient in zip(self.parameters, gradients, strict=True):
            parameter.grad = None if gradient is None else gradient.to(parameter.dtype)
        self.optimizer.step()

    def weights(self) -> list[Tensor]:
        return [parameter.detach().float().clone() for parameter in self.parameters]

    def run(self, steps: Sequence[Sequence[Tensor | None]]) -> list[list[Tensor]]:
        """Every step in turn, with everything pending applied at the end.

        Returns:
            The weights after each step; the last after the flush.
        """
        seen = []
        for gradients in steps:
            self.step(gradients)
            seen.append(self.weights())
        self.optimizer.flush()
        if seen:
            seen[-1] = self.weights()
        return seen

    def end(self) -> None:
        self.optimizer.close()
