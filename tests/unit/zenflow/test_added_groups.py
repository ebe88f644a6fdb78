"""Groups that are added in mid-run: the weights are the reference's, whatever joins and whenever it does."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch
from hypothesis import event, given, note
from torch import nn

from tests.support.oracle import ReferenceAdamW
from tests.support.tiers import combinations, fast, repeated
from tests.support.zenflow.case_data import Param
from tests.support.zenflow.cases import Case, case_of, draw_case, same_bits
from tests.support.zenflow.change_cases import closing_steps, compare
from tests.support.zenflow.family_cases import OURS, REFERENCE, draw_rule
from tests.support.zenflow.knob_cases import merged, with_changes, with_joins
from tests.support.zenflow.rule_cases import NAMES
from tests.support.zenflow.small import Stack, seeded, tokens_of
from tests.unit.zenflow.test_invariants import RANDOMS, thorough
from zenflow import ZenFlowAdamW, ZenFlowConfig


@given(RANDOMS)
@thorough(35)
def test_i2_with_added_groups(rng: random.Random) -> None:
    case = with_joins(rng, draw_case(rng, rule=draw_rule(rng)))
    case = with_changes(rng, case, share=0.15) if rng.random() < 0.5 else case
    note(repr(case))
    event(f"module: {case.with_module}, grows: {case.grows}")
    compare(case)


@pytest.mark.parametrize("seed", range(repeated(20)))
def test_i2_with_added_groups_on_fixed_cases(seed: int) -> None:
    compare(with_joins(random.Random(seed), case_of(seed, steps=14)))


KINDS: dict[str, Param] = {
    "linear": Param("linear", 5, 9, 1, "always", bf16=True),
    "conv1d": Param("conv1d", 5, 9, 1, "always", bf16=False),
    "tied": Param("tied", 5, 9, 1, "always", bf16=True),
    "3d": Param("3d", 3, 7, 1, "always", bf16=False),
    "strided3d": Param("strided3d", 3, 7, 1, "always", bf16=False),
    "vector": Param("vector", 1, 9, 1, "always", bf16=True),
    "scalar": Param("scalar", 1, 1, 1, "always", bf16=False),
    "frozen": Param("linear", 5, 9, 1, "frozen", bf16=False),
    "thawed": Param("linear", 5, 9, 1, "thawed", bf16=False),
    "never": Param("linear", 5, 9, 1, "never", bf16=False),
    "sometimes": Param("conv1d", 5, 9, 1, "sometimes", bf16=True),
}


def joining(kind: str, after: int, **fixed: Any) -> Case:
    """Two weights train, and one of this kind joins after that step."""
    knobs: dict[str, Any] = {"topk_ratio": 0.25, "update_interval": 3, "apply_lag": None, "overlap_step": True}
    case = case_of(31, **{**knobs, "offload_ratio": 0.8, "steps": 12, "full_warm_up_rounds": 0, **fixed})
    first = Param("linear", 6, 8, 0, "always", bf16=False)
    second = Param("conv1d", 4, 7, 2, "always", bf16=True)
    params = (first, KINDS[kind], second)
    return merged(replace(case, params=params), [(after, "join", 1)])


@pytest.mark.parametrize(
    ("kind", "grows", "with_module"), combinations(kind=KINDS, grows=[True, False], with_module=[True, False])
)
def test_i2_every_kind_of_parameter_joins(kind: str, grows: bool, with_module: bool) -> None:
    compare(replace(joining(kind, 4), grows=grows, with_module=with_module))


@pytest.mark.parametrize(
    ("after", "rule"),
    fast([(after, NAMES[after % len(NAMES)]) for after in range(8)], all_of=list(product(range(8), NAMES))),
)
def test_i2_a_group_joins_after_each_step(after: int, rule: str) -> None:
    """Before the first step, inside a window, at its end, with a window in flight."""
    compare(joining("linear", after, rule=rule, bucket_bytes=20))


def test_i2_a_pending_change_of_knobs_outlives_an_added_group() -> None:
    knobs: dict[str, Any] = {"topk_ratio": 0.5, "update_interval": 2}
    case = joining("linear", 4)
    before, after = merged(case, [(4, "knobs", knobs)]), replace(case, between=((4, "knobs", knobs), *case.between))
    assert before.between != after.between
    steps = compare(before)
    assert 5 in steps
    assert compare(after) == steps


def test_a_layer_that_is_unfrozen_in_mid_run_with_real_backward_passes() -> None:
    config = ZenFlowConfig(topk_ratio=0.3, update_interval=3, select_interval=2, bucket_bytes=40, offload_ratio=0.9)
    results = []
    for make in (ZenFlowAdamW, ReferenceAdamW):
        model = seeded(Stack)
        last = model.get_submodule("layers.1")
        last.requires_grad_(False)
        first = [p for p in model.parameters() if p.requires_grad]
        optimizer: Any = make(first, lr=0.02, config=config, module=model)
        for step in range(1, 13):
            if step == 6:
                last.requires_grad_(True)
                optimizer.add_param_group({"params": list(last.parameters()), "lr": 0.05})
            model(tokens_of(step)).backward()
            optimizer.step()
            optimizer.zero_grad()
        optimizer.flush()
        results.append([p.detach().clone() for p in model.parameters()])
        assert [step for step in closing_steps(optimizer) if step != 6] == [3, 8, 11]
        if isinstance(optimizer, ZenFlowAdamW):
            optimizer.close()
    assert all(bool(same_bits(a, b).all()) for a, b in zip(*results, strict=True))


@pytest.mark.parametrize("rule", NAMES)
@pytest.mark.parametrize("family", [OURS, REFERENCE])
def test_a_group_that_torch_refuses_changes_nothing(family: dict[str, Any], rule: str) -> None:
    weight = nn.Parameter(torch.ones(3, 8))
    optimizer = family[rule]([weight], lr=0.1, config=ZenFlowConfig(update_interval=2))
    for step in range(4):
        weight.grad = torch.ones(3, 8)
        optimizer.step()
        if step == 0:
            with pytest.raises(ValueError, match="more than one parameter group"):
                optimizer.add_param_group({"params": [weight]})
            assert len(optimizer.param_groups) == 1
    assert closing_steps(optimizer) == [2, 4]
    if hasattr(optimizer, "close"):
        optimizer.close()
