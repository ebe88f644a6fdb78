"""The bound that comparisons with torch allow: that it holds, and that it is worth something."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.support.tiers import fast
from tests.support.zenflow.cases import Trace, case_of, run
from tests.support.zenflow.family_cases import REFERENCE
from tests.support.zenflow.rule_cases import NAMES
from tests.support.zenflow.torch_oracle import assert_close_to_torch, torch_run

SYNC: dict[str, Any] = {"update_interval": 1, "overlap_step": False, "grads_depend_on_weights": False}


@pytest.mark.parametrize("rule", fast(["adamw"], all_of=NAMES))
def test_the_bound_is_small(rule: str) -> None:
    """Of what whole runs end with, nine in ten weights have to be right in four digits, half of them in five."""
    relative = []
    for seed in range(fast(8, all_of=20)):
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
