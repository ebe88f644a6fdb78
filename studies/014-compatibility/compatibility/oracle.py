"""What a cell must come to: torch's AdamW on fp32 masters, with DeepSpeed's rule for the loss scale."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR

from compatibility.cells import DECAY, LR, WARMUP, Cell
from compatibility.training import (
    ROWS,
    TORCH_DTYPES,
    Weights,
    decay,
    groups_of,
    loss_of,
    make_model,
    spike,
    weights_of,
)

LAST = 4
"""Steps over which a fall of the loss is taken."""


class Scale:
    """DeepSpeed's rule: halved where a gradient overflows, doubled after a window without."""

    def __init__(self, section: dict[str, Any] | None) -> None:
        self.value = 1.0 if section is None else 2.0 ** section["initial_scale_power"]
        self._window = 0 if section is None else section.get("loss_scale_window", 1000)
        self._good = 0
        self.skipped = 0

    def overflowed(self, gradients: list[Tensor]) -> bool:
        """Whether a step has to be skipped; moves the scale."""
        if not self._window:
            return False
        if all(bool(gradient.isfinite().all()) for gradient in gradients):
            self._good += 1
            if self._good > 1 and (self._good - 1) % self._window == 0:  # DeepSpeed does not count the first
                self.value *= 2
            return False
        self.value, self._good = max(self.value / 2, 1.0), 0
        self.skipped += 1
        return True


def _scheduler_of(cell: Cell, optimizer: torch.optim.Optimizer) -> Any:
    if cell.scheduler == "json":
        from deepspeed.runtime.lr_schedules import WarmupLR

        return WarmupLR(optimizer, **WARMUP)
    return None if cell.scheduler == "none" else LambdaLR(optimizer, decay)


def _clip(cell: Cell, gradients: list[Tensor]) -> None:
    limit = cell.config["gradient_clipping"]
    norm = math.sqrt(sum(float(gradient.double().square().sum()) for gradient in gradients))
    if limit and norm > limit:
        for gradient in gradients:
            gradient.mul_(limit / norm)


def expected(cell: Cell) -> dict[str, Any]:
    """Losses, weights and skipped steps of one rank with whole batches.

    Args:
        cell: what to train.
    """
    dtype = TORCH_DTYPES[cell.dtype]
    model = make_model(cell.model)
    masters = {p: nn.Parameter(p.detach().clone(), requires_grad=p.requires_grad) for p in model.parameters()}
    groups = [{**group, "params": [masters[p] for p in group["params"]]} for group in groups_of(cell, model)]
    optimizer = torch.optim.AdamW(groups, lr=LR, weight_decay=DECAY)
    scheduler, scale = _scheduler_of(cell, optimizer), Scale(cell.config.get("fp16"))
    model.to(dtype)
    losses = []
    for step in range(cell.steps):
        total = 0.0
        for number in range(cell.passes):
            loss = loss_of(model, cell.passes * step + number, slice(0, ROWS), dtype)
            (loss * (spike(cell, step) * scale.value / cell.passes)).backward()
            total += loss.item() / cell.passes
        losses.append(total)
        _step(cell, model, masters, optimizer, scale, scheduler)
    weights = weights_of(model)
    if cell.weights != "module":  # the script takes the masters
        weights |= {name: masters[parameter].detach().clone() for name, parameter in model.named_parameters()}
    return {"losses": losses, "weights": weights, "skipped": scale.skipped}


def _step(
    cell: Cell,
    model: nn.Module,
    masters: dict[nn.Parameter, nn.Parameter],
    optimizer: torch.optim.Optimizer,
    scale: Scale,
    scheduler: Any,
) -> None:
    gradients, factor = {}, 1.0 / scale.value
    for parameter in model.parameters():
        if parameter.grad is not None:
            gradients[parameter] = parameter.grad.float() * factor
            parameter.grad = None
    if scale.overflowed(list(gradients.values())):
        return
    _clip(cell, list(gradients.values()))
    for parameter, master in masters.items():
        master.grad = gradients.get(parameter)
    optimizer.step()
    for parameter, master in masters.items():
        parameter.data.copy_(master.detach())
    if scheduler is not None:
        scheduler.step()


def compared(cell: Cell, seen: dict[str, Any]) -> dict[str, Any]:
    """What was seen beside what is expected, in figures; None where there is no finite one.

    Args:
        cell: that was trained.
        seen: losses (the mean over ranks), weights, skipped steps, and so on.

    Returns:
        "off" and "first_off": how far the losses, and the first, are from AdamW's, relative; "apart": how far a weight
        is, as a share of how far AdamW moved it; "fall": how far the loss falls, as a share of AdamW's fall;
        "held": the share of the weights that the rank has.
    """
    oracle, losses = expected(cell), seen["losses"]
    start = weights_of(make_model(cell.model).to(TORCH_DTYPES[cell.dtype]))
    off = [abs(loss - right) / abs(right) for loss, right in zip(losses, oracle["losses"], strict=True)]
    untrained = _untrained(cell)
    best = sum(untrained) - sum(oracle["losses"][-LAST:])
    return {
        "not_finite_from": next((step for step, loss in enumerate(losses, 1) if not math.isfinite(loss)), None),
        "off": _figure(max(off)),
        "first_off": _figure(off[0]),
        "apart": _figure(_apart(start, oracle["weights"], seen["weights"])),
        "fall": _figure((sum(untrained) - sum(losses[-LAST:])) / best),
        "skipped": seen["skipped"],
        "expected_skipped": oracle["skipped"],
        "bitwise": seen["bitwise"],
        "held": seen["held"],
        "unused_moved": any(
            not torch.equal(value, seen["weights"][name]) for name, value in start.items() if name.startswith("unused")
        ),
    }


def _untrained(cell: Cell) -> list[float]:
    """The loss of the model as it was, on the last batches."""
    model, dtype = make_model(cell.model).to(TORCH_DTYPES[cell.dtype]), TORCH_DTYPES[cell.dtype]
    return [
        sum(loss_of(model, cell.passes * step + number, slice(0, ROWS), dtype).item() for number in range(cell.passes))
        / cell.passes
        for step in range(cell.steps - LAST, cell.steps)
    ]


def _figure(value: float) -> float | None:
    return float(f"{value:.4g}") if math.isfinite(value) else None


def _apart(start: Weights, oracle: Weights, seen: Weights) -> float:
    """The largest distance from the oracle of a weight, as a share of how far the oracle moved it."""
    shares = [0.0]
    for name, value in oracle.items():
        moved = float((value - start[name]).norm())
        if moved > 0:
            shares.append(float((seen[name] - value).norm()) / moved)
    return max(shares) if all(math.isfinite(share) for share in shares) else math.inf
