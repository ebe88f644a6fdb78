"""DeepSpeed's own ZenFlow on one CPU rank, fed with given gradients."""

from __future__ import annotations

import contextlib
import copy
import os
import time
from collections.abc import Iterator, Sequence
from typing import Any

import deepspeedkit
import torch
from torch import Tensor, nn

SETTLE_S = 0.05  # many times what an overlapped update of these weights takes

Gradients = Sequence[Tensor]


class Given(nn.Module):
    """Parameters whose gradients are what the caller passes to forward, whatever the weights are."""

    def __init__(self, weights: Sequence[Tensor]) -> None:
        super().__init__()
        self.weights = nn.ParameterList([nn.Parameter(weight.clone()) for weight in weights])

    def forward(self, gradients: Sequence[Tensor | None]) -> Tensor:
        used = [(w, g) for w, g in zip(self.weights, gradients, strict=True) if g is not None]
        return torch.stack([(weight.float() * gradient.float()).sum() for weight, gradient in used]).sum()


def settings(zenflow: dict[str, Any] | None, *, lr: float, dtype: str = "fp32", **more: Any) -> dict[str, Any]:
    """A DeepSpeed configuration: the tutorial's layout, AdamW without weight decay unless `more` says otherwise.

    Args:
        zenflow: the section `zero_optimization.zenflow`; None leaves ZeRO-Offload.
        lr: learning rate.
        dtype: "fp32" (no precision section), "bf16" or "fp16".
        more: further top-level sections; `zero_optimization` and `optimizer` are merged into what is here.
    """
    document: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_clipping": 0.0,  # left out, DeepSpeed clips the norm to 1
        "optimizer": {"type": "AdamW", "params": {"lr": lr, "betas": [0.9, 0.999], "eps": 1e-8, "weight_decay": 0.0}},
        "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu", "pin_memory": False}},
    }
    if zenflow is not None:
        document["zero_optimization"]["zenflow"] = zenflow
    if dtype != "fp32":
        document[dtype] = {"enabled": True}
    document["zero_optimization"].update(more.pop("zero_optimization", {}))
    document["optimizer"].update(more.pop("optimizer", {}))
    return {**document, **more}


class Upstream:
    """An engine of DeepSpeed around given weights.

    Args:
        weights: initial values, in the dtype that the model is to have.
        document: the DeepSpeed configuration.
        groups: hyperparameters of each weight's own group; None puts all of them into one.
    """

    def __init__(
        self, weights: Sequence[Tensor], document: dict[str, Any], groups: Sequence[dict[str, Any]] | None = None
    ) -> None:
        import deepspeed

        model = Given(weights)
        parameters: Any = list(model.parameters())
        if groups is not None:
            parameters = [{"params": [p], **group} for p, group in zip(parameters, groups, strict=True)]
        self.engine, self.optimizer, _, self.scheduler = deepspeed.initialize(
            model=model, model_parameters=parameters, config=copy.deepcopy(document)
        )

    def step(self, gradients: Sequence[Tensor | None]) -> None:
        """One forward, backward and step, as in DeepSpeed's tutorial."""
        self.engine.backward(self.engine(gradients))
        self.engine.step()

    def weights(self) -> list[Tensor]:
        """The weights that the next forward would see, in fp32, copied."""
        return [weight.detach().float().clone() for weight in self.engine.module.weights]

    def run(self, steps: Sequence[Gradients]) -> list[list[Tensor]]:
        """Every step in turn; the weights after each."""
        seen = []
        for gradients in steps:
            self.step(gradients)
            if self.overlapped:
                self.settle()
            seen.append(self.weights())
        return seen

    @property
    def overlapped(self) -> bool:
        """Whether the host update runs in a process of its own."""
        return hasattr(self.optimizer, "process_optimizer_established")

    def masters(self) -> list[Tensor]:
        """The fp32 masters on the host, of weights in one group; matrices lie there by columns."""
        flat, seen = self.optimizer.optimizer.param_groups[0]["params"][0].detach(), []
        for weight in self.engine.module.weights:
            part, flat = flat[: weight.numel()].clone(), flat[weight.numel() :]
            seen.append(part.view(weight.shape[1], weight.shape[0]).t() if weight.dim() == 2 else part)
        return seen

    def settle(self) -> None:
        """Let a submitted overlapped update end, without taking it over."""
        time.sleep(SETTLE_S)

    def selected(self, number: int = 0) -> list[int]:
        """Columns of a weight that are selected now."""
        return [int(column) for column in self.engine.module.weights[number].selected_indices]

    def end(self) -> None:
        """End the overlapped worker, which DeepSpeed leaves behind, and give this process its cores back."""
        worker = getattr(self.optimizer, "process", None)
        if worker is not None and worker.is_alive():
            worker.terminate()
            worker.join(10)


@contextlib.contextmanager
def two_devices() -> Iterator[None]:
    """Let Twin-Flow tell its device from the host: the same CPU under another name."""
    from deepspeed.accelerator import get_accelerator

    accelerator = get_accelerator()
    name, accelerator._name = accelerator._name, "cpu:0"
    try:
        yield
    finally:
        accelerator._name = name


@contextlib.contextmanager
def prepared() -> Iterator[None]:
    """What DeepSpeed needs around it: one rank of gloo, and a folder for what it compiles."""
    cores = os.sched_getaffinity(0)
    deepspeedkit.prepare()
    try:
        yield
    finally:
        os.sched_setaffinity(0, cores)
        torch.distributed.destroy_process_group()
