"""Real backward passes with something in between: before a forward, behind it, and behind the backward pass."""

from __future__ import annotations

import random
from typing import Any, Literal

import pytest
import torch
from hypothesis import given, note
from torch import Tensor, nn

from tests.support.oracle import ReferenceAdamW
from tests.support.tiers import fast
from tests.support.zenflow.knob_cases import draw_knobs
from tests.support.zenflow.small import Stack, assert_same_run, seeded, tokens_of
from tests.unit.zenflow.test_invariants import RANDOMS, thorough
from zenflow import ZenFlowAdamW, ZenFlowConfig

Where = Literal["before forward", "before backward", "before step"]
Plan = dict[tuple[int, Where], list[tuple[str, Any]]]  # (step, where) -> what is done there, with what

STEPS = 12
START: dict[str, Any] = {"topk_ratio": 0.3, "update_interval": 3, "select_interval": 2, "bucket_bytes": 60}
WHERE: tuple[Where, ...] = ("before forward", "before backward", "before step")


def do(optimizer: Any, model: nn.Module, kind: str, what: Any) -> None:
    """One thing; what only ours can do changes nothing."""
    if kind == "knobs":
        optimizer.set_knobs(**what)
    elif kind == "flush":
        optimizer.flush()
    elif kind == "join":
        layer = model.get_submodule("layers.1")
        optimizer.add_param_group({"params": list(layer.parameters()), "lr": 0.05})
    elif isinstance(optimizer, ZenFlowAdamW):
        optimizer.state_dict()


def train(make: Any, plan: Plan, passes: int, dtype: torch.dtype, with_module: bool) -> list[Tensor]:
    """Losses, then weights."""
    model, seen = seeded(Stack, dtype=dtype), []
    joins = any(kind == "join" for doings in plan.values() for kind, _ in doings)
    later = {id(p) for p in model.get_submodule("layers.1").parameters()} if joins else set()
    first = [p for p in model.parameters() if id(p) not in later]
    optimizer = make(first, lr=0.02, config=ZenFlowConfig(**START), module=model if with_module else None)
    step = 0

    def do_all(where: Where) -> None:
        for kind, what in plan.get((step, where), []):
            do(optimizer, model, kind, what)

    for step in range(1, STEPS + 1):
        for number in range(passes):
            if number == 0:
                do_all("before forward")
            loss = model(tokens_of(10 * step + number))
            seen.append(loss.detach().clone())
            if number == 0:
                do_all("before backward")
            loss.backward()
        do_all("before step")
        optimizer.step()
        optimizer.zero_grad()
    optimizer.flush()
    if isinstance(optimizer, ZenFlowAdamW):
        optimizer.close()
    return [*seen, *(parameter.detach().clone() for parameter in model.parameters())]


def draw_plan(rng: random.Random) -> Plan:
    """Things to do over the whole run; behind a forward only those that change no weight."""
    plan: Plan = {}
    config, joined = ZenFlowConfig(**START), rng.random() < 0.5
    for step in range(1, STEPS + 1):
        for where in WHERE:
            kinds = ["knobs", "state_dict"] if where == "before backward" else ["knobs", "flush", "state_dict", "join"]
            for kind in rng.sample(kinds, rng.choice([0, 0, 0, 0, 0, 1, 1, 2])):
                what = None
                if kind == "join" and joined:
                    continue
                joined = joined or kind == "join"
                if kind == "knobs":
                    what = draw_knobs(
                        rng, config, ["topk_ratio", "offload_ratio", "update_interval", "select_interval"]
                    )
                    config = config.changed(what)
                plan.setdefault((step, where), []).append((kind, what))
    return plan


def compare(plan: Plan, passes: int, dtype: torch.dtype, with_module: bool) -> None:
    ours, theirs = (train(make, plan, passes, dtype, with_module) for make in (ZenFlowAdamW, ReferenceAdamW))
    assert_same_run(ours, theirs)


@given(RANDOMS)
@thorough(12)
def test_i2_with_things_done_between_the_passes(rng: random.Random) -> None:
    plan = draw_plan(rng)
    passes, dtype = rng.choice([1, 1, 2]), rng.choice([torch.float32, torch.bfloat16])
    note(f"{plan}\n{passes} passes, {dtype}")
    compare(plan, passes, dtype, with_module=rng.random() < 0.7)


# Behind a forward nothing may change the weights that autograd holds on to, with any optimizer.
PLACES = [
    (kind, where)
    for kind in ("knobs", "flush", "join", "state_dict")
    for where in WHERE
    if where != "before backward" or kind in ("knobs", "state_dict")
]


@pytest.mark.parametrize(("kind", "where"), PLACES)
@pytest.mark.parametrize("passes", fast([2], all_of=[1, 2]))
def test_i2_each_thing_at_each_place(passes: int, kind: str, where: Where) -> None:
    what = {"topk_ratio": 0.6, "offload_ratio": 0.7} if kind == "knobs" else None
    for step in fast((5,), all_of=(5, 6)):
        compare({(step, where): [(kind, what)]}, passes, torch.float32, with_module=True)
