"""The reference's formulas on numbers worked out by hand; what windows, void steps and momentum 0 make of them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.support.oracle import ReferenceAdagrad, ReferenceLion, ReferenceOptimizer, ReferenceSGD
from tests.zenflow.family_cases import REFERENCE, TORCH_CLASS
from tests.zenflow.rule_cases import NAMES
from zenflow import ZenFlowConfig

SYNC = ZenFlowConfig(topk_ratio=0.0, update_interval=1, overlap_step=False)


def window(mode: Any) -> ZenFlowConfig:
    return ZenFlowConfig(topk_ratio=0.0, update_interval=2, overlap_step=False, deferred_update=mode)


def weights_after(optimizer: ReferenceOptimizer, *grads: float | None, changes: Any = None) -> list[float]:
    """A 1 x 1 weight of 1.0 after each step. changes: by step, what a schedule sets before it."""
    weight = optimizer.param_groups[0]["params"][0]
    seen = []
    for step, grad in enumerate(grads, start=1):
        optimizer.param_groups[0].update((changes or {}).get(step, {}))
        weight.grad = None if grad is None else torch.tensor([[grad]])
        optimizer.step()
        seen.append(weight.item())
    return seen


def made(cls: type[ReferenceOptimizer], config: ZenFlowConfig = SYNC, **hyper: Any) -> ReferenceOptimizer:
    return cls([nn.Parameter(torch.ones(1, 1))], config=config, **hyper)


def state_of(optimizer: ReferenceOptimizer) -> tuple[float, list[float], int]:
    master, moments, counts = optimizer.columns_state(optimizer.param_groups[0]["params"][0])
    return float(master), [float(moment) for moment in moments], counts[0]


def test_sgd_begins_its_momentum_with_the_whole_gradient() -> None:
    optimizer = made(ReferenceSGD, lr=0.125, momentum=0.5, dampening=0.25)
    # b: 2, then 2 * 0.5 + 4 * 0.75 = 4.
    assert weights_after(optimizer, 2.0, 4.0) == [0.75, 0.25]
    assert state_of(optimizer) == (0.25, [4.0], 2)


def test_sgd_nesterov_looks_ahead() -> None:
    # b: 2, then 2 * 0.5 + 4 = 5; d: 2 + 1, then 4 + 2.5.
    optimizer = made(ReferenceSGD, lr=0.125, momentum=0.5, nesterov=True)
    assert weights_after(optimizer, 2.0, 4.0) == [0.625, -0.1875]


def test_sgd_without_momentum_keeps_momentum_and_count_as_they_are() -> None:
    optimizer = made(ReferenceSGD, lr=0.125, momentum=0.0, dampening=0.5)
    changes = {2: {"momentum": 0.5}, 3: {"momentum": 0.0}, 4: {"momentum": 0.5}}
    # Only step 2 is a first update: b = 4; step 3 passes it over; step 4: 4 * 0.5 + 8 * 0.5 = 6.
    assert weights_after(optimizer, 2.0, 4.0, 8.0, 8.0, changes=changes) == [0.75, 0.25, -0.75, -1.5]
    assert state_of(optimizer) == (-1.5, [6.0], 2)


def test_sgds_penalty_is_part_of_the_gradient() -> None:
    assert weights_after(made(ReferenceSGD, lr=0.5, weight_decay=0.25), 0.75, 0.0) == [0.5, 0.4375]


def test_adagrad_starts_at_its_initial_value_and_lowers_its_rate() -> None:
    optimizer = made(ReferenceAdagrad, lr=1.0, lr_decay=1.0, initial_accumulator_value=16.0, eps=0.0)
    # sums: 16 + 9 = 25, then 25 + 144 = 169; rates 1, 1/2.
    expected = [1 - 3 / 5, 1 - 3 / 5 - 12 / 13 / 2]
    assert weights_after(optimizer, 3.0, 12.0) == pytest.approx(expected, rel=1e-6)
    assert state_of(optimizer)[1:] == ([169.0], 2)


def test_a_groups_own_initial_value_counts() -> None:
    first, second = nn.Parameter(torch.ones(1, 1)), nn.Parameter(torch.ones(1, 1))
    groups = [{"params": [first]}, {"params": [second], "initial_accumulator_value": 16.0}]
    optimizer = ReferenceAdagrad(groups, lr=1.0, initial_accumulator_value=7.0, config=SYNC)
    first.grad, second.grad = torch.tensor([[3.0]]), torch.tensor([[3.0]])
    optimizer.step()
    assert first.item() == pytest.approx(1 - 3 / 4)
    assert second.item() == pytest.approx(1 - 3 / 5)


def test_lion_steps_by_signs() -> None:
    optimizer = made(ReferenceLion, lr=0.125, betas=(0.5, 0.75), weight_decay=2.0)
    # Decay 0.75. Towards: 2; m = 1. Then 0.5 * 1 - 0.5 * 1 = 0: the weight only decays; m = 0.5. Then negative.
    assert weights_after(optimizer, 4.0, -1.0, -1.0) == [0.625, 0.46875, 0.4765625]


@pytest.mark.parametrize("rule", NAMES)
def test_a_void_entry_is_no_update(rule: str) -> None:
    """Without a gradient nothing changes, not even by weight decay."""
    optimizer = made(REFERENCE[rule], lr=0.125, weight_decay=0.5)
    first, second = weights_after(optimizer, 1.0, None)
    assert first == second != 1.0
    assert state_of(optimizer)[2] == (0 if rule == "sgd" else 1)  # whose momentum is 0


@pytest.mark.parametrize(("mode", "updates"), [("replay", 2), ("mean", 1)])
def test_the_mean_is_one_update(mode: str, updates: int) -> None:
    optimizer = made(ReferenceSGD, window(mode), lr=0.125, momentum=0.5)
    # Replayed: 1 - 0.25 - (1 + 4) / 8; the mean, 3, is one first gradient.
    assert weights_after(optimizer, 2.0, 4.0)[-1] == (0.125 if mode == "replay" else 0.625)
    assert state_of(optimizer)[2] == updates


def test_the_means_decay_is_a_product_where_it_is_decoupled() -> None:
    lion = made(ReferenceLion, window("mean"), lr=0.125, weight_decay=2.0)
    # Decay 0.75, then 0.5 by the schedule; one step of 0.25 by the closing learning rate.
    assert weights_after(lion, 1.0, 1.0, changes={2: {"lr": 0.25}})[-1] == 0.75 * 0.5 - 0.25
    sgd = made(ReferenceSGD, window("mean"), lr=0.125, weight_decay=2.0)
    # A penalty is added once, with the closing numbers, to the mean gradient.
    assert weights_after(sgd, 1.0, 1.0, changes={2: {"lr": 0.25}})[-1] == 1 - (1 + 2.0) * 0.25


@pytest.mark.parametrize("rule", TORCH_CLASS)
def test_defaults_are_torchs(rule: str) -> None:
    theirs = TORCH_CLASS[rule]([nn.Parameter(torch.ones(1))]).defaults
    ours = made(REFERENCE[rule]).defaults
    assert {name: theirs[name] for name in ours} == ours


def test_refuses_what_is_no_hyperparameter() -> None:
    with pytest.raises(TypeError, match=r"^there is no hyperparameter beta: there are lr, betas, weight_decay$"):
        made(ReferenceLion, beta=0.9)


def test_rules_agree_where_they_are_one_formula() -> None:
    """Adam and AdamW without decay; Adam with betas of 0 and Adagrad's first step: both are signs."""
    grads = torch.randn(12, generator=torch.Generator().manual_seed(2)).tolist()
    adam, adamw = (made(REFERENCE[rule], weight_decay=0.0, lr=0.1) for rule in ("adam", "adamw"))
    assert weights_after(adam, *grads) == weights_after(adamw, *grads)
    signs: Tensor = torch.tensor(weights_after(made(REFERENCE["adam"], betas=(0.0, 0.0), lr=0.5), grads[0]))
    once = torch.tensor(weights_after(made(ReferenceAdagrad, lr=0.5), grads[0]))
    torch.testing.assert_close(signs, once)
