"""The bound that comparisons with torch allow: that it holds, and that it is worth something."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.zenflow.cases import Trace, case_of, run
from tests.zenflow.family_cases import REFERENCE
from tests.zenflow.rounding import Near, near
from tests.zenflow.rule_cases import NAMES
from tests.zenflow.torch_oracle import assert_close_to_torch, torch_run

SYNC: dict[str, Any] = {"update_interval": 1, "overlap_step": False, "grads_depend_on_weights": False}


@pytest.mark.parametrize("rule", NAMES)
def test_the_bound_is_small(rule: str) -> None:
    """Of what 20 whole runs end with, nine in ten weights have to be right in four digits, half of them in five."""
    relative = []
    for seed in range(20):
        for weight, bound in torch_run(case_of(seed, rule=rule, **SYNC))["last flush"]:
            relative.append((bound / (weight.double().abs() + 1e-3)).flatten())
    found = torch.cat(relative)
    assert len(found) > 1000
    assert float(found.median()) < 4e-6
    assert float(found.quantile(0.9)) < 1e-4


@pytest.mark.parametrize("rule", NAMES)
def test_a_learning_rate_that_is_off_by_a_thousandth_is_seen(rule: str) -> None:
    case = case_of(3, rule=rule, steps=9, scheduled=False, **SYNC)
    case = replace(
        case,
        params=tuple(replace(param, bf16=False, presence="always") for param in case.params),
        groups=tuple({**group, "lr": 0.1} for group in case.groups),
    )

    def off(optimizer: Any, weights: list[Tensor], step: int) -> None:
        if step == 8:
            for group in optimizer.param_groups:
                group["lr"] *= 1.001

    trace: Trace = run(case, REFERENCE[rule])
    assert_close_to_torch(case, trace)
    with pytest.raises(AssertionError, match="after step 9"):
        assert_close_to_torch(case, run(case, REFERENCE[rule], on_step=off))


OPERATIONS: list[tuple[str, Callable[[Any, Any], Any]]] = [
    ("add", lambda a, b: a + b),
    ("subtract", lambda a, b: a - b),
    ("multiply", lambda a, b: a * b),
    ("divide", lambda a, b: a / b),
    ("towards", lambda a, b: a.towards(b, 0.1) if isinstance(a, Near) else a + (b - a) * 0.1),
    ("root", lambda a, b: (a * a).sqrt()),
]


@pytest.mark.parametrize(("name", "operation"), OPERATIONS)
def test_operations_pass_on_what_their_operands_may_be_apart(name: str, operation: Callable[[Any, Any], Any]) -> None:
    generator = torch.Generator().manual_seed(1)
    a, b = (torch.randn(5000, generator=generator, dtype=torch.float64) for _ in range(2))
    apart = [x.abs() * 10 ** (-7 * torch.rand(5000, generator=generator, dtype=torch.float64)) for x in (a, b)]
    ours = operation(Near(a, apart[0]), Near(b, apart[1]))
    for signs in ((1, 1), (1, -1), (-1, 1), (-0.5, 0.2)):
        theirs = operation(a + signs[0] * apart[0], b + signs[1] * apart[1])
        inside = (theirs - ours.value).abs() <= ours.error
        if name == "divide":
            inside |= b.abs() <= apart[1]  # whose divisor may be 0
        assert bool(inside.all())


def test_signs_are_open_only_within_the_error() -> None:
    error = torch.tensor([0.0, 0.1, 0.1, 0.1], dtype=torch.float64)
    found = Near(torch.tensor([0.0, 0.1, -0.2, 0.0], dtype=torch.float64), error).sign()
    assert found.value.tolist() == [0, 1, -1, 0]
    assert found.error.tolist() == [0, 2, 0, 2]


def test_numbers_of_fp32_are_exact() -> None:
    assert float(near(0.5).error) == 0
    assert 0 < float(near(0.1).error) < 2e-8
