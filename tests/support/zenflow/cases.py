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
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from tests.support.tiers import fast, repeated
from tests.support.zenflow.case_data import Bag, Case, Conv1D, Holder, Param, build, grad_of, group_of, groups_of, grow
from tests.support.zenflow.family_cases import changed, draw_group
from zenflow.config import ZenFlowConfig

__all__ = [
    "FIXED_CASES",
    "Bag",
    "Case",
    "Conv1D",
    "Holder",
    "Make",
    "Param",
    "Session",
    "Trace",
    "amp",
    "assert_same",
    "build",
    "case_of",
    "draw_case",
    "draw_param",
    "examples",
    "grad_of",
    "groups_of",
    "run",
    "same_bits",
]

_FACTOR = os.environ.get("ZENFLOW_EXAMPLES_FACTOR")  # times as many examples as before a release; `make soak` sets it
FIXED_CASES = fast(50, all_of=200)  # case_of(0) and so on are run by I2, and counted for what they exercise

Make = Callable[..., Any]  # (groups, lr=..., config=..., module=...) -> optimizer with step() and flush()
Transfer = Callable[[Any, Any], None]  # (old optimizer, new optimizer)
Trace = list[tuple[str, list[Tensor]]]  # (what happened, the weights after it)


def examples(count: int) -> int:
    """How many examples a property gets for which `count` are wanted before a release."""
    return repeated(count) if _FACTOR is None else count * int(_FACTOR)


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


class Session:
    """One run of a case, step by step. `trace` holds the weights after every step and happening."""

    def __init__(self, case: Case, make: Make, *, config: ZenFlowConfig | None = None) -> None:
        self.case = case
        self.make = make
        self.step = 0  # the last one that was made
        self.trace: Trace = []
        self.group_order = [index for index in range(len(case.groups)) if index not in case.joining]
        self.module, self.weights = build(case)
        self.built = self.config = (config or case.config).resolved()  # `config` is as it was told last
        self.optimizer = self._optimizer(groups_of(case, self.weights), self.built)

    def _optimizer(self, groups: list[dict[str, Any]], config: ZenFlowConfig) -> Any:
        return self.make(groups, config=config, module=self.module if self.case.with_module else None)

    def renew(self, transfer: Transfer, config: ZenFlowConfig | None = None, *, weights_last: bool = False) -> None:
        """Go on with another model of the same weights and another optimizer, as in a fresh process.

        Args:
            transfer: called as (old optimizer, new optimizer); carries the state over.
            config: knobs that the new optimizer is built with; None means those that the old one was built with.
            weights_last: whether the model is loaded after the optimizer.
        """
        shown, old = [weight.detach().clone() for weight in self.weights], self.optimizer
        thawed = [weight.requires_grad for weight in self.weights]
        self.module, self.weights = build(self.case, [g for g in self.group_order if g in self.case.joining])
        for weight, requires_grad in zip(self.weights, thawed, strict=True):
            weight.requires_grad_(requires_grad)
        groups = [group_of(self.case, self.weights, index) for index in self.group_order]
        for last in (False, True):
            if last == weights_last:
                for weight, data in zip(self.weights, shown, strict=True):
                    weight.detach().copy_(data)
            if not last:
                self.built = config or self.built
                self.optimizer = self._optimizer(groups, self.built)
                transfer(old, self.optimizer)
        old.close()  # what it makes of the old weights is nobody's business

    def record(self, event: str) -> None:
        if self.case.with_module:
            self.module()  # where a module is known, a due update may wait for the next forward
        self.trace.append((event, [weight.detach().clone() for weight in self.weights]))

    def make_step(self, on_step: Callable[..., None] | None = None) -> None:
        """The next step, as the case says."""
        self.step += 1
        for index, weight in enumerate(self.weights):
            weight.grad = grad_of(self.case, index, weight, self.step)
            if self.case.params[index].presence == "thawed":
                weight.requires_grad_(weight.grad is not None or weight.requires_grad)
        with amp(self.optimizer, self.case, self.step):
            self.optimizer.step()
        if on_step is not None:
            on_step(self.optimizer, self.weights, self.step)
        self.record(f"step {self.step}")
        if self.case.scheduled:
            for group, index in zip(self.optimizer.param_groups, self.group_order, strict=True):
                group.update(changed(self.case.groups[index], self.step + 1))

    def do(self, kind: str, what: Any = None) -> None:
        """Something between two steps: see `Happening`."""
        if kind == "flush":
            self.optimizer.flush()
        elif kind == "knobs":
            assert self.optimizer.set_knobs(**what) == self.step + 1
            self.config = self.config.changed(what)
        else:
            grow(self.case, self.module, self.weights, what)
            self.optimizer.add_param_group(group_of(self.case, self.weights, what))
            self.group_order.append(what)
        self.record(f"{kind} after step {self.step}")

    def do_what_is_due(self) -> None:
        """All that the case says about the time after the last step."""
        for _, kind, what in self.case.after(self.step):
            self.do(kind, what)

    def end(self) -> Trace:
        """A last flush, and the whole trace."""
        self.optimizer.flush()
        self.record("last flush")
        if hasattr(self.optimizer, "close"):
            self.optimizer.close()
        return self.trace


def run(
    case: Case, make: Make, *, config: ZenFlowConfig | None = None, on_step: Callable[..., None] | None = None
) -> Trace:
    """Train and record the weights after every step, every flush, and a last flush at the end.

    Args:
        make: builds the optimizer under test.
        config: knobs in place of the case's own.
        on_step: called as (optimizer, weights, step) after each step; may change hyperparameters or look inside.
    """
    session = Session(case, make, config=config)
    session.do_what_is_due()
    for _ in range(case.steps):
        session.make_step(on_step)
        session.do_what_is_due()
    return session.end()


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
        "bucket_bytes": rng.choice([1, 20, 40, 80, 200, 64_000_000]),
    }
    knobs.update({name: value for name, value in fixed.items() if name in ZenFlowConfig.__dataclass_fields__})
    if knobs["deferred_update"] == "replay":
        numbered = knobs["update_interval"] != "auto"
        ahead = ["none", "coast", "guess", "guess"] if numbered else ["none", "coast"]
        knobs["look_ahead"] = fixed.get("look_ahead", rng.choice(ahead))
        if numbered:
            knobs["window_phase"] = fixed.get("window_phase", rng.choice(["together", "staggered"]))
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
