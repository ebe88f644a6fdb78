"""I4: no gradient is lost or applied twice, by an account that is exact; and one that was lost shows."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import event, given, note
from torch import nn

from tests.support.tiers import repeated
from tests.support.zenflow.cases import Case, Session, Trace, assert_same, case_of, run
from tests.support.zenflow.checkpoint_cases import by_dict, by_file, draw_eventful, draw_stops, eventful, run_with_stops
from tests.support.zenflow.family_cases import OURS
from tests.support.zenflow.rule_cases import NAMES
from tests.unit.zenflow.test_invariants import RANDOMS, thorough
from zenflow import ZenFlowAdamW, ZenFlowConfig

WORDS = {torch.float32: torch.int32, torch.bfloat16: torch.int16, torch.float16: torch.int16}


def with_ledger(case: Case) -> Case:
    return replace(case, config=replace(case.config, ledger=True))


def assert_balanced(optimizer: Any) -> None:
    off = {name: balance for name, balance in optimizer.ledger().items() if not balance.balanced}
    assert off == {}


def run_balanced(case: Case, stops: list[Any]) -> Trace:
    """The trace of a run whose account is right after every step and empty at its end."""
    last: list[Session] = []

    class Checked(Session):
        def record(self, event: str) -> None:
            super().record(event)
            last[:] = [self]
            assert_balanced(self.optimizer)
            if event == "last flush":
                balances = self.optimizer.ledger().values()
                assert all(balance.pending == 0 and balance.produced == balance.applied for balance in balances)

    trace = run_with_stops(case, stops, by_file, session=Checked)
    assert last
    return trace


@given(RANDOMS)
@thorough(25)
def test_i4_nothing_is_lost_whatever_happens(rng: random.Random) -> None:
    case = with_ledger(draw_eventful(rng))
    stops = draw_stops(rng, case) if rng.random() < 0.5 else []
    note(f"{case!r}\nstops {stops}")
    event(case.rule)
    run_balanced(case, stops)


@pytest.mark.parametrize("seed", range(repeated(16)))
def test_i4_keeping_the_account_changes_no_weight(seed: int) -> None:
    case = eventful(seed)
    assert_same(case, run_balanced(with_ledger(case), []), run(case, OURS[case.rule]))


def trained(
    steps: int, dtype: torch.dtype, rule: str = "adamw", **knobs: Any
) -> tuple[list[nn.Parameter], Any, list[int]]:
    """Weights, their optimizer, and the sums of the bit patterns of all gradients; these are positive."""
    config = {"topk_ratio": 0.3, "update_interval": 4, "bucket_bytes": 40, "ledger": True, **knobs}
    weights = [nn.Parameter(torch.ones(shape, dtype=dtype)) for shape in ((5, 8), (6,), (3, 10))]
    optimizer = OURS[rule](weights, lr=1e-3, config=ZenFlowConfig(**config))
    sums = [0] * len(weights)
    generator = torch.Generator().manual_seed(1)
    for _ in range(steps):
        for index, weight in enumerate(weights):
            weight.grad = torch.rand(weight.shape, generator=generator).to(dtype)
            sums[index] += int(weight.grad.view(WORDS[dtype]).sum(dtype=torch.int64))
        optimizer.step()
    return weights, optimizer, sums


@pytest.mark.parametrize("dtype", WORDS)
@pytest.mark.parametrize("rule", NAMES)
def test_produced_are_the_bits_of_every_gradient(rule: str, dtype: torch.dtype) -> None:
    _, optimizer, sums = trained(6, dtype, rule)
    balances = list(optimizer.ledger().values())
    assert [balance.produced for balance in balances] == sums
    assert [balance.pending > 0 for balance in balances] == [True, False, True]
    optimizer.flush()
    assert [balance.applied for balance in optimizer.ledger().values()] == sums
    optimizer.close()


def deferred(optimizer: Any, index: int) -> Any:
    return optimizer._training.model.weights[index].deferred


@pytest.mark.parametrize("which", [0, -1])
@pytest.mark.parametrize("index", [0, 2])
def test_an_entry_that_is_dropped_shows(index: int, which: int) -> None:
    _, optimizer, _ = trained(6, torch.float32)
    assert_balanced(optimizer)
    for part in deferred(optimizer, index).parts:
        del part.log[which]
    balances = list(optimizer.ledger().values())
    assert [balance.balanced for balance in balances] == [number != index for number in range(3)]
    optimizer.flush()
    assert [balance.balanced for balance in optimizer.ledger().values()] == [number != index for number in range(3)]
    optimizer.close()


def test_an_entry_that_is_applied_twice_or_damaged_shows() -> None:
    for damage in ("twice", "damaged"):
        _, optimizer, _ = trained(7, torch.float32)
        for part in deferred(optimizer, 0).parts:
            if damage == "twice":
                part.log[0] = part.log[1]
            else:
                part.log[0].gradient.pieces()[0].view(torch.int32)[0] ^= 1
        assert [balance.balanced for balance in optimizer.ledger().values()] == [False, True, True]
        optimizer.flush()
        assert [balance.balanced for balance in optimizer.ledger().values()] == [False, True, True]
        optimizer.close()


def test_an_account_that_begins_with_a_checkpoint_knows_what_is_pending() -> None:
    case = case_of(3, steps=11, update_interval=4, topk_ratio=0.3, offload_ratio=1.0)
    session = Session(case, ZenFlowAdamW)
    for _ in range(case.steps):
        session.make_step()
        if session.step == 6:
            session.renew(by_dict, replace(session.built, ledger=True))
        if session.step >= 6:
            assert_balanced(session.optimizer)
    session.end()
