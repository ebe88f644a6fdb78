"""torch.optim.AdamW on fp32 masters behind the interface that `cases.run` drives, and how near it we must be."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from tests.zenflow.cases import Case, Trace
from zenflow.config import ZenFlowConfig

EPS32 = 2.0**-23


class TorchOracle:
    """Masters in fp32, torch's AdamW and torch's clipping; weights are the masters rounded."""

    def __init__(self, groups: list[dict[str, Any]], *, config: ZenFlowConfig, module: nn.Module | None = None) -> None:
        self.config = config
        self.grad_scale: torch.Tensor | None = None
        self.found_inf: torch.Tensor | None = None
        self.master_of = {p: nn.Parameter(p.detach().float().clone()) for group in groups for p in group["params"]}
        own = [{**group, "params": [self.master_of[p] for p in group["params"]]} for group in groups]
        self.inner = torch.optim.AdamW(own, foreach=False)

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return self.inner.param_groups

    def step(self) -> None:
        scale = getattr(self, "grad_scale", None)
        for param, master in self.master_of.items():
            grad = None if param.grad is None else param.grad.float().clone()
            master.grad = grad if grad is None or scale is None else grad / scale
        masters = [master for master in self.master_of.values() if master.grad is not None]
        norm = torch.nn.utils.get_total_norm([m.grad for m in masters if m.grad is not None])
        found_inf = getattr(self, "found_inf", None)
        if (found_inf is not None and bool(found_inf)) or (self.config.skip_nonfinite and not bool(norm.isfinite())):
            return
        if self.config.max_grad_norm is not None and masters:
            torch.nn.utils.clip_grad_norm_(masters, self.config.max_grad_norm)
        self.inner.step()
        for param, master in self.master_of.items():
            param.detach().copy_(master.detach())

    def flush(self) -> None:
        """Nothing is ever pending."""


def assert_close_to_torch(case: Case, ours: Trace, theirs: Trace, steps: int | None = None) -> None:
    """Every step within the stated growth: 4 fp32 ulp a step of the largest number involved, and one bf16 rounding.

    The largest number is the weight or the update; an AdamW update is at most lr / sqrt(1 - beta2), 32 lr for 0.999.
    The first steps divide by a small 1 - beta2**c, which eight times the learning rate covers amply.
    steps: how many steps lie behind each entry at most, where the traces hold only some of them.
    """
    largest_lr = max(group.lr for group in case.groups)
    largest = [torch.stack([w[i].float().abs() for _, w in theirs]).amax(0) for i in range(len(case.params))]
    for step, ((event, got), (_, want)) in enumerate(zip(ours, theirs, strict=True), start=1):
        for index, (a, b) in enumerate(zip(got, want, strict=True)):
            bound = 4 * EPS32 * (steps or step) * (largest[index] + 8 * largest_lr)
            if a.dtype == torch.bfloat16:
                bound = bound + 2.0**-7 * torch.maximum(a.abs(), b.abs()).float()
            off = (a.float() - b.float()).abs() - bound
            assert not bool((off > 0).any()), (
                f"after {event}, parameter {index} {case.params[index]}: beyond by {float(off.max())}"
            )
            assert bool((a.isnan() == b.isnan()).all())
