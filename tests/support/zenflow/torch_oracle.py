"""torch's own optimizers on fp32 masters behind the interface that `cases.run` drives, and how near them we must be."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from tests.support.zenflow.cases import Case, Trace, run
from tests.support.zenflow.family_cases import TORCH_CLASS
from tests.support.zenflow.rounding import ULP, Near, update
from tests.support.zenflow.rule_cases import MOMENTS
from zenflow.config import ZenFlowConfig

FACTOR = 8 * ULP  # what a gradient's factor may be apart: it comes of a norm, whose sum has no order


class BookLion(torch.optim.Optimizer):
    """Lion as its authors publish it, for torch has none."""

    def __init__(self, params: Any, foreach: bool = False, **hyper: Any) -> None:
        super().__init__(params, {"lr": 1e-4, "betas": (0.9, 0.99), "weight_decay": 0.0, **hyper})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                m = self.state[p].setdefault("exp_avg", torch.zeros_like(p))
                p.mul_(1 - group["lr"] * group["weight_decay"])
                p.add_((m * beta1 + p.grad * (1 - beta1)).sign_(), alpha=-group["lr"])
                m.mul_(beta2).add_(p.grad, alpha=1 - beta2)


class TorchOracle:
    """Masters in fp32, torch's optimizer of that name and torch's clipping; weights are the masters rounded.

    `errors` says how far a master and its moments may be from ours, [parameter's shape] fp64 each.
    """

    def __init__(
        self,
        groups: list[dict[str, Any]],
        *,
        config: ZenFlowConfig,
        module: nn.Module | None = None,
        rule: str = "adamw",
    ) -> None:
        self.config = config
        self.rule = rule
        self.grad_scale: torch.Tensor | None = None
        self.found_inf: torch.Tensor | None = None
        self.master_of = {p: nn.Parameter(p.detach().float().clone()) for group in groups for p in group["params"]}
        own = [{**group, "params": [self.master_of[p] for p in group["params"]]} for group in groups]
        self.inner = TORCH_CLASS.get(rule, BookLion)(own, foreach=False)
        self.counts = dict.fromkeys(self.master_of, 0)
        self.errors = {
            p: [torch.zeros(p.shape, dtype=torch.float64) for _ in ("master", *self._keys)] for p in self.master_of
        }
        for group in self.inner.param_groups:
            for master in group["params"]:
                if rule == "adagrad":  # torch starts every group with the value of the defaults
                    self.inner.state[master]["sum"].fill_(group["initial_accumulator_value"])

    @property
    def _keys(self) -> tuple[str, ...]:
        return MOMENTS.get(self.rule, ("exp_avg",))

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        groups: list[dict[str, Any]] = self.inner.param_groups
        return groups

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
        before = {param: self._streams(param) for param, master in self.master_of.items() if master.grad is not None}
        self.inner.step()
        group_of = {id(master): group for group in self.inner.param_groups for master in group["params"]}
        for param, streams in before.items():
            self._widen(param, streams, group_of[id(self.master_of[param])])
        for param, master in self.master_of.items():
            param.detach().copy_(master.detach())

    def _streams(self, param: Tensor) -> list[Tensor]:
        """Master and moments, fp64 copies; zeros where torch has no moment yet."""
        master = self.master_of[param]
        moments = [self.inner.state[master].get(key) for key in self._keys]
        streams = [master.detach(), *(torch.zeros_like(master) if moment is None else moment for moment in moments)]
        return [stream.detach().double() for stream in streams]

    def _widen(self, param: Tensor, before: list[Tensor], group: dict[str, Any]) -> None:
        grad = self.master_of[param].grad
        assert grad is not None
        self.counts[param] += group.get("momentum") != 0
        w, *moments = (Near(value, error) for value, error in zip(before, self.errors[param], strict=True))
        exact = self.config.max_grad_norm is None and getattr(self, "grad_scale", None) is None
        g = Near(grad.double(), grad.double().abs() * (0.0 if exact else FACTOR))
        w, moments = update(self.rule, w, moments, g, self.counts[param], group)
        self.errors[param] = [stream.error for stream in (w, *moments)]
        for near, torchs in zip((w, *moments), self._streams(param), strict=True):
            inside = ((near.value - torchs).abs() <= near.error) & near.error.isfinite()
            assert bool(inside.all()), "the bound allows anything, or torch itself is beyond it"

    def flush(self) -> None:
        """Nothing is ever pending."""


def torch_run(case: Case) -> dict[str, list[tuple[Tensor, Tensor]]]:
    """For each event the oracle's weights, each with its bound."""
    bounds: list[list[Tensor]] = []

    def look(oracle: TorchOracle, weights: list[nn.Parameter], step: int) -> None:
        bounds.append([oracle.errors[weight][0] for weight in weights])

    found = {}
    done = 0
    for event, weights in run(case, partial(TorchOracle, rule=case.rule), on_step=look):
        done += event.startswith("step")
        found[event] = list(zip(weights, bounds[done - 1], strict=True))
    return found


def assert_close_to_torch(case: Case, ours: Trace) -> None:
    """Every weight within its bound, and one bf16 rounding."""
    theirs = torch_run(case)
    for event, weights in ours:
        for index, (a, (b, bound)) in enumerate(zip(weights, theirs[event], strict=True)):
            if a.dtype == torch.bfloat16:
                bound = bound + 2.0**-7 * torch.maximum(a.abs(), b.abs()).double()
            off = (a.double() - b.double()).abs() - bound
            assert bool((off <= 0).all()), (
                f"after {event}, parameter {index} {case.params[index]}: beyond by {float(off.max())}"
            )
