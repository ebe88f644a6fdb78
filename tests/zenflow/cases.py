"""Random training runs without a model: parameters of odd shapes, gradients that depend on them, all the knobs.

A `Case` is plain data and prints as such. `run(case, make)` builds its parameters, trains them with the optimizer
that `make` returns, and hands back the weights after every step, so two optimizers are compared by running them one
after the other, never side by side.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor, nn

from tests.zenflow.family_cases import changed, draw_group
from zenflow.config import ZenFlowConfig

EXAMPLES_FACTOR = int(os.environ.get("ZENFLOW_EXAMPLES_FACTOR", "1"))  # times as many examples; `make soak` sets it
FIXED_CASES = 200  # case_of(0) to case_of(199) are run by I2, and counted for what they exercise

Kind = Literal["linear", "conv1d", "3d", "strided3d", "vector", "scalar", "tied"]
Presence = Literal["always", "sometimes", "late", "never", "frozen", "thawed"]
Make = Callable[..., Any]  # (groups, lr=..., config=..., module=...) -> optimizer with step() and flush()
Trace = list[tuple[str, list[Tensor]]]  # (what happened, the weights after it)


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

    def forward(self) -> Tensor:
        total = torch.zeros(())
        for part in self.parts:
            rows = part.weight.shape[0] if isinstance(part, Conv1D) else 1
            total = total + part(torch.zeros(1, rows)).sum()
        return total


def build(case: Case) -> tuple[Bag, list[nn.Parameter]]:
    """The module and its parameters, in the order of `case.params`."""
    generator = torch.Generator().manual_seed(case.seed)
    parts: list[nn.Module] = []
    weights: list[nn.Parameter] = []
    for param in case.params:
        weight = nn.Parameter(_tensor(param, generator), requires_grad=param.presence not in ("frozen", "thawed"))
        weights.append(weight)
        parts.append(Conv1D(weight) if param.kind == "conv1d" else Holder(weight))
        if param.kind == "tied":
            parts.insert(0, Holder(weight))  # also moves it to the front of module.parameters()
    return Bag(parts), weights


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


@contextmanager
def amp(optimizer: Any, case: Case, step: int) -> Iterator[None]:
    """GradScaler's protocol around one step."""
    if case.grad_scale is None and not case.found_inf_at:
        yield
        return
    optimizer.grad_scale = None if case.grad_scale is None else torch.tensor(case.grad_scale)
    optimizer.found_inf = torch.tensor(1.0 if step in case.found_inf_at else 0.0)
    yield
    del optimizer.grad_scale, optimizer.found_inf


def groups_of(case: Case, weights: list[nn.Parameter]) -> list[dict[str, Any]]:
    return [
        {"params": [w for w, param in zip(weights, case.params, strict=True) if param.group == index], **group}
        for index, group in enumerate(case.groups)
    ]


def run(
    case: Case, make: Make, *, config: ZenFlowConfig | None = None, on_step: Callable[..., None] | None = None
) -> Trace:
    """Train and record the weights after every step, every flush, and a last flush at the end.

    Args:
        make: builds the optimizer under test.
        config: knobs in place of the case's own.
        on_step: called as (optimizer, weights, step) after each step; may change hyperparameters or look inside.
    """
    module, weights = build(case)
    optimizer = make(
        groups_of(case, weights), config=config or case.config, module=module if case.with_module else None
    )
    trace: Trace = []

    def record(event: str) -> None:
        if case.with_module:
            module()  # where a module is known, a due update may wait for the next forward
        trace.append((event, [weight.detach().clone() for weight in weights]))

    for step in range(1, case.steps + 1):
        for index, weight in enumerate(weights):
            weight.grad = grad_of(case, index, weight, step)
            if case.params[index].presence == "thawed":
                weight.requires_grad_(weight.grad is not None or weight.requires_grad)
        with amp(optimizer, case, step):
            optimizer.step()
        if on_step is not None:
            on_step(optimizer, weights, step)
        record(f"step {step}")
        if case.scheduled:
            for group, start in zip(optimizer.param_groups, case.groups, strict=True):
                group.update(changed(start, step + 1))
        if step in case.flush_after:
            optimizer.flush()
            record(f"flush after step {step}")
    optimizer.flush()
    record("last flush")
    if hasattr(optimizer, "close"):
        optimizer.close()
    return trace


def same_bits(a: Tensor, b: Tensor) -> Tensor:
    """Elementwise: the same bits, or both NaN."""
    integer = {2: torch.int16, 4: torch.int32}[a.element_size()]
    bits = [x.contiguous().view(integer) if x.dim() else x.reshape(1).view(integer).reshape(()) for x in (a, b)]
    return (bits[0] == bits[1]) | (a.isnan() & b.isnan())


def assert_same(case: Case, actual: Trace, expected: Trace) -> None:
    """Bitwise equality of two traces; names the first difference."""
    assert [event for event, _ in actual] == [event for event, _ in expected]
    for (event, ours), (_, theirs) in zip(actual, expected, strict=True):
        for index, (a, b) in enumerate(zip(ours, theirs, strict=True)):
            same = same_bits(a, b)
            if not bool(same.all()):
                where = (~same).nonzero()[:5].tolist()
                raise AssertionError(
                    f"after {event}, parameter {index} {case.params[index]} differs at {where}: "
                    f"{a[~same][:5].tolist()} against {b[~same][:5].tolist()}"
                )


def draw_case(rng: random.Random, **fixed: Any) -> Case:
    """A case over the whole knob space. fixed: fields of the case or of its config that are not drawn.

    The rule is AdamW where it is not fixed; `draw_rule` draws one.
    """
    steps = rng.choice([1, 2, 5, 9, 14, 20, 27])
    interval = rng.randint(1, 7)
    knobs: dict[str, Any] = {
        "topk_ratio": rng.choice([0.0, 0.1, 0.1, 0.25, 0.25, 0.4, 0.4, 0.6, 1.0]),
        "offload_ratio": rng.choice([1.0, 1.0, 1.0, 0.9, 0.75, 0.5, 0.2, 0.0]),
        "update_interval": interval,
        "select_interval": rng.choice([1, 1, 2, 3, interval, interval + 2, 2 * interval, 50]),
        "full_warm_up_rounds": rng.choice([0, 0, 1, 2, 3]),
        "overlap_step": rng.random() < 0.75,
        "pipeline": rng.choice(["bucket", "none"]),
        "deferred_update": rng.choice(["replay", "mean"]),
        "max_grad_norm": rng.choice([None, None, 0.7, 30.0]),
        "skip_nonfinite": rng.random() < 0.3,
        "bucket_bytes": rng.choice([1, 20, 40, 80, 64_000_000]),
    }
    knobs.update({name: value for name, value in fixed.items() if name in ZenFlowConfig.__dataclass_fields__})
    lag = fixed.get("apply_lag", rng.choice([None, *range(1, knobs["update_interval"] + 1)]))
    config = ZenFlowConfig(**{**knobs, "apply_lag": lag})
    all_steps = range(1, steps + 1)
    case = Case(
        params=tuple(draw_param(rng) for _ in range(rng.randint(1, 7))),
        groups=tuple(draw_group(fixed.get("rule", "adamw"), rng) for _ in range(3)),
        config=config,
        steps=steps,
        seed=rng.randint(0, 2**31 - 1),
        with_module=rng.random() < 0.7,
        scheduled=rng.random() < 0.5,
        flush_after=frozenset(t for t in all_steps if rng.random() < 0.1),
        rounded_grads=rng.random() < 0.2,
        grad_scale=rng.choice([None, None, None, 1024.0, 300.0]),
        found_inf_at=frozenset(t for t in all_steps if rng.random() < 0.2) if rng.random() < 0.3 else frozenset(),
        nonfinite_at=frozenset(t for t in all_steps if rng.random() < 0.2) if config.skip_nonfinite else frozenset(),
    )
    return replace(case, **{name: value for name, value in fixed.items() if name in Case.__dataclass_fields__})


def draw_param(rng: random.Random) -> Param:
    return Param(
        kind=rng.choice(
            ["linear", "linear", "linear", "conv1d", "conv1d", "3d", "strided3d", "vector", "scalar", "tied"]
        ),
        rows=rng.randint(1, 9),
        columns=rng.randint(1, 13),
        group=rng.randint(0, 2),
        presence=rng.choice(
            ["always", "always", "always", "always", "sometimes", "sometimes", "late", "never", "frozen", "thawed"]
        ),
        bf16=rng.random() < 0.5,
    )


def case_of(seed: int, **fixed: Any) -> Case:
    """The same case for the same number, today and tomorrow."""
    return draw_case(random.Random(seed), **fixed)
