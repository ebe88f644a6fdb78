"""What a random training run is made of: parameters of odd shapes, their modules, and gradients that depend on them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from zenflow.config import ZenFlowConfig

Kind = Literal["linear", "conv1d", "3d", "strided3d", "vector", "scalar", "tied"]
Presence = Literal["always", "sometimes", "late", "never", "frozen", "thawed"]
Happening = tuple[int, Literal["flush", "knobs", "join"], Any]
"""(after which step, what, with what): nothing, the knobs by name, or the index of the group that is added."""


@dataclass(frozen=True)
class Param:
    kind: Kind
    rows: int
    columns: int
    group: int
    presence: Presence
    bf16: bool


@dataclass(frozen=True)
class Case:
    params: tuple[Param, ...]
    groups: tuple[dict[str, Any], ...]  # their hyperparameters
    config: ZenFlowConfig
    steps: int
    seed: int
    rule: str = "adamw"
    with_module: bool = True
    scheduled: bool = False
    flush_after: frozenset[int] = frozenset()
    grad_scale: float | None = None
    found_inf_at: frozenset[int] = frozenset()
    nonfinite_at: frozenset[int] = frozenset()
    grads_depend_on_weights: bool = True
    rounded_grads: bool = False  # to -1, 0 or 1: columns tie in importance, and some are all zero
    between: tuple[Happening, ...] = ()  # what is done between the steps, in this order
    grows: bool = False  # the modules of a group that joins are not there before

    def after(self, step: int) -> list[Happening]:
        """What is done between this step and the next; a flush of `flush_after` comes first."""
        flush: list[Happening] = [(step, "flush", None)] if step in self.flush_after else []
        return flush + [happening for happening in self.between if happening[0] == step]

    @property
    def joining(self) -> set[int]:
        """Indices of the groups that the optimizer is not built with."""
        return {what for _, kind, what in self.between if kind == "join"}


class Conv1D(nn.Module):
    """Stands for transformers' class of this name: its weight is [in, out]."""

    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__()
        self.weight = weight

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight.to(x.dtype)


class Holder(nn.Module):
    """Any other module that owns one parameter."""

    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__()
        self.weight = weight

    def forward(self, x: Tensor) -> Tensor:
        return x + self.weight.sum().to(x.dtype)


class Bag(nn.Module):
    """Modules side by side; a forward passes through all of them, so that forward hooks run."""

    def __init__(self, parts: list[nn.Module]) -> None:
        super().__init__()
        self.parts = nn.ModuleList(parts)

    def add(self, param: Param, weight: nn.Parameter, front: bool = False) -> None:
        """A module for this weight; two where it is tied."""
        self.parts.append(Conv1D(weight) if param.kind == "conv1d" else Holder(weight))
        if param.kind == "tied":
            self.parts.insert(0 if front else len(self.parts), Holder(weight))

    def forward(self) -> Tensor:
        total = torch.zeros(())
        for part in self.parts:
            rows = part.weight.shape[0] if isinstance(part, Conv1D) else 1
            total = total + part(torch.zeros(1, rows)).sum()
        return total


def build(case: Case, joined: Sequence[int] = ()) -> tuple[Bag, list[nn.Parameter]]:
    """The module and its parameters, in the order of `case.params`. joined: groups that have been added."""
    generator = torch.Generator().manual_seed(case.seed)
    weights = [
        nn.Parameter(_tensor(param, generator), requires_grad=param.presence not in ("frozen", "thawed"))
        for param in case.params
    ]
    bag = Bag([])
    for param, weight in zip(case.params, weights, strict=True):
        if not (case.grows and param.group in case.joining):
            bag.add(param, weight, front=param.kind == "tied")  # also moves it to the front of module.parameters()
    for index in joined:
        grow(case, bag, weights, index)
    return bag, weights


def grow(case: Case, bag: Bag, weights: list[nn.Parameter], index: int) -> None:
    """Put the modules of a joining group where they were missing."""
    for param, weight in zip(case.params, weights, strict=True):
        if case.grows and param.group == index:
            bag.add(param, weight)


def _tensor(param: Param, generator: torch.Generator) -> Tensor:
    rows, columns = param.rows, param.columns
    shape = {
        "conv1d": (columns, rows),
        "3d": (2, rows, columns),
        "strided3d": (columns, rows, 2),
        "vector": (columns,),
        "scalar": (),
    }.get(param.kind, (rows, columns))
    data = torch.randn(shape, generator=generator).to(torch.bfloat16 if param.bf16 else torch.float32)
    return data.permute(2, 1, 0) if param.kind == "strided3d" else data


def grad_of(case: Case, index: int, weight: Tensor, step: int) -> Tensor | None:
    """The gradient of parameter `index` in `step` (from 1): a function of the case, the step and the weight alone."""
    param = case.params[index]
    generator = torch.Generator().manual_seed(case.seed * 1000 + step * 20 + index)
    draw = float(torch.rand((), generator=generator))
    begins = 2 + case.seed % 4
    late = step < begins
    absent = {"always": False, "sometimes": draw < 0.4, "late": late, "thawed": late}.get(param.presence, True)
    if absent:
        return None
    noise = torch.randn(weight.shape, generator=generator)
    # Whole columns are louder or quieter from step to step, in either layout, so that the selection changes.
    for axis in range(weight.dim()):
        size = [1] * weight.dim()
        size[axis] = weight.shape[axis]
        noise = noise * torch.randn(size, generator=generator).exp()
    if case.grads_depend_on_weights:
        noise = noise + torch.randn(weight.shape, generator=generator) * weight.detach().float()
    if case.rounded_grads:
        noise = noise.clamp(-1, 1).round()
    if step in case.nonfinite_at and index == step % len(case.params):
        noise.view(-1)[int(draw * noise.numel())] = float("inf") if draw < 0.5 else float("nan")
    grad = (noise * (case.grad_scale or 1.0)).to(weight.dtype)
    return torch.empty_like(weight).copy_(grad)  # with the weight's own strides, as autograd gives it


def group_of(case: Case, weights: list[nn.Parameter], index: int) -> dict[str, Any]:
    """A parameter group as an optimizer takes it."""
    members = [w for w, param in zip(weights, case.params, strict=True) if param.group == index]
    return {"params": members, **case.groups[index]}


def groups_of(case: Case, weights: list[nn.Parameter]) -> list[dict[str, Any]]:
    """The groups that the optimizer is built with."""
    return [group_of(case, weights, index) for index in range(len(case.groups)) if index not in case.joining]
