"""Zen-auto: windows that close when the deferred columns have gathered enough, and selections that change when needed.

All gradients here are one row of small integers, so every figure is exact. A window's sums are over its steps before
the one that decides: of the root mean squares of the deferred columns, and of the selected ones.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, note
from torch import nn

from tests.support.oracle import ReferenceAdamW
from tests.support.tiers import repeated
from tests.support.zenflow.cases import case_of, draw_case
from tests.support.zenflow.change_cases import closing_steps, compare
from tests.support.zenflow.family_cases import draw_rule
from tests.support.zenflow.knob_cases import with_auto, with_changes
from tests.unit.zenflow.test_invariants import RANDOMS, thorough
from zenflow import ZenFlowAdamW, ZenFlowConfig

Grad = Sequence[float] | None  # of one step, of one weight of one row; None: the weight has none

both = pytest.mark.parametrize("make", [ReferenceAdamW, ZenFlowAdamW])


def closes(make: Any, *weights: Sequence[Grad], amp: Sequence[tuple[float, bool]] = (), **knobs: Any) -> list[int]:
    """The steps in which windows close, for the gradients of each weight step by step.

    amp: of each step the factor on its gradients, as GradScaler tells it, and whether the step is skipped.
    """
    knobs = {"update_interval": "auto", "topk_ratio": 0.25, "select_interval": 1000, **knobs}
    columns = [next(len(grad) for grad in grads if grad is not None) for grads in weights]
    parameters = [nn.Parameter(torch.ones(1, width)) for width in columns]
    optimizer = make(parameters, lr=1e-3, config=ZenFlowConfig(**knobs))
    for step, grads in enumerate(zip(*weights, strict=True)):
        scale, skipped = amp[step] if amp else (1.0, False)
        for parameter, grad in zip(parameters, grads, strict=True):
            parameter.grad = None if grad is None else torch.tensor([grad], dtype=torch.float32) * scale
        if amp:
            optimizer.grad_scale, optimizer.found_inf = torch.tensor(scale), torch.tensor(float(skipped))
        optimizer.step()
    seen = closing_steps(optimizer)
    if hasattr(optimizer, "close"):
        optimizer.close()
    return seen


@both
@pytest.mark.parametrize(
    ("topk_ratio", "grad", "expected"),
    [
        # 1 of 20 columns is selected, its RMS 6; of the others 2: they reach 6 with three steps, the next one closes.
        (0.05, [6, *[2] * 19], [4, 8, 12]),
        # 1 of 10: 5 against 1, five steps.
        (0.1, [5, *[1] * 9], [6, 12]),
        # 2 of 4: sqrt((1 + 49) / 2) = 5 against sqrt((1 + 1) / 2) = 1. That the columns differ makes no difference.
        (0.5, [1, 7, 1, 1], [6, 12]),
        (0.5, [5, 5, -2, 2], [4, 8, 12]),  # 5 against 2: 6 is more than 5
        (0.5, [3, 3, 3, 3], [2, 4, 6, 8, 10, 12]),  # 3 against 3, but a window has at least two steps
        # No weight has both: four steps.
        (0.0, [9, 1, 1, 1], [4, 8, 12]),
        (1.0, [9, 1, 1, 1], [4, 8, 12]),
    ],
)
def test_a_steady_gradient_gives_steady_windows(
    make: Any, topk_ratio: float, grad: list[float], expected: list[int]
) -> None:
    assert closes(make, [grad] * 13, topk_ratio=topk_ratio) == expected


@both
def test_it_is_the_mean_of_the_selected_and_the_sum_of_the_deferred(make: Any) -> None:
    # Selected 8, 2, 2, 2: means 8, 5, 4, 3.5; deferred sums 1, 2, 3, 4. Step 5 decides on the fourth.
    grads = [[8, 1, 1, 1], *[[2, 1, 1, 1]] * 8]
    # From step 6 on: means 2, 2; sums 1, 2; step 8 decides.
    assert closes(make, grads) == [5, 8]


QUICK, SLOW = [1, 1, 1, 1], [4, 1, 1, 1]  # agree after one step and after four


@both
@pytest.mark.parametrize(
    ("auto_ratio", "expected"),
    [
        (0.0, [2, 4, 6, 8, 10]),
        (0.5, [2, 4, 6, 8, 10]),
        (0.51, [5, 10]),
        (0.99, [5, 10]),
        (1.0, [5, 10]),
    ],
)
def test_the_share_of_weights_that_must_agree(make: Any, auto_ratio: float, expected: list[int]) -> None:
    assert closes(make, [QUICK] * 11, [SLOW] * 11, auto_ratio=auto_ratio) == expected


@both
def test_a_weight_without_gradients_has_no_say(make: Any) -> None:
    late: list[Grad] = [None, *[QUICK] * 4, *[None] * 6]
    # The second weight agrees as soon as it has a step; without the first one nothing is decided by it alone.
    assert closes(make, [SLOW] * 11, late, auto_ratio=0.5) == [3, 5, 10]
    # Where no weight had a gradient, a window has four steps.
    assert closes(make, [QUICK, QUICK, *[None] * 9]) == [2, 6, 10]


@both
@pytest.mark.parametrize(("longest", "expected"), [(1, [1, 2, 3, 4, 5, 6, 7]), (2, [2, 4, 6]), (3, [3, 6]), (5, [5])])
def test_no_window_is_longer_than_allowed(make: Any, longest: int, expected: list[int]) -> None:
    assert closes(make, [[99, 1, 1, 1]] * 7, max_update_interval=longest) == expected


@both
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_counts_as_zero(make: Any, bad: float) -> None:
    assert closes(make, [SLOW, [bad, 1, 1, 1], SLOW, SLOW]) == [3]  # means 4, 2; sums 1, 2
    assert closes(make, [[bad, bad, bad, bad]] * 7) == [2, 4, 6]
    # One of three deferred columns counts as zero in step 2: sums 1, 1.8, 2.8, 3.8, 4.8 against 4.
    assert closes(make, [SLOW, [4, 1, bad, 1], *[SLOW] * 5]) == [6]


@both
def test_a_skipped_step_does_not_count(make: Any) -> None:
    # As in the test of means and sums, but step 2 is skipped, so everything is a step later.
    grads = [[8, 1, 1, 1], [100, 1, 1, 1], *[[2, 1, 1, 1]] * 6]
    amp = [(1.0, step == 1) for step in range(len(grads))]
    assert closes(make, grads, amp=amp) == [6]
    # Nothing but skipped steps: four.
    assert closes(make, [SLOW] * 9, amp=[(1.0, True)] * 9) == [4, 8]


@both
def test_the_loss_scale_is_taken_out_and_the_clipping_is_not_put_in(make: Any) -> None:
    grads = [[8, 1, 1, 1], *[[2, 1, 1, 1]] * 5]
    amp = [(1024.0 if step == 0 else 1.0, False) for step in range(len(grads))]
    assert closes(make, grads, amp=amp) == [5]
    assert closes(make, grads, max_grad_norm=0.5) == [5]


@both
def test_a_flush_and_the_warm_up_begin_anew(make: Any) -> None:
    assert closes(make, [SLOW] * 12, full_warm_up_rounds=2) == [1, 2, 7, 12]
    weight = nn.Parameter(torch.ones(1, 4))
    config = ZenFlowConfig(update_interval="auto", topk_ratio=0.25, select_interval=1000)
    optimizer = make([weight], config=config)
    for step in range(1, 9):
        weight.grad = torch.tensor([SLOW], dtype=torch.float32)
        optimizer.step()
        if step == 2:
            optimizer.flush()
    assert [step for step in closing_steps(optimizer) if step > 3] == [7]


@both
def test_to_auto_and_back(make: Any) -> None:
    weight = nn.Parameter(torch.ones(1, 4))
    optimizer = make([weight], config=ZenFlowConfig(update_interval=3, topk_ratio=0.25, select_interval=1000))
    for step in range(1, 17):
        weight.grad = torch.tensor([SLOW], dtype=torch.float32)
        optimizer.step()
        if step == 4:
            optimizer.set_knobs(update_interval="auto")  # closes at 5, then five steps each
        if step == 11:
            optimizer.set_knobs(update_interval=2)
    assert closing_steps(optimizer) == [3, 5, 10, 12, 14, 16]


def selections(make: Any, *weights: Sequence[Sequence[float]], **knobs: Any) -> list[list[list[int]]]:
    """For every step, of every weight the columns that move although nothing but the selected ones may."""
    parameters = [nn.Parameter(torch.ones(1, len(grads[0]))) for grads in weights]
    knobs = {"select_interval": "auto", "topk_ratio": 0.5, "update_interval": 5, "overlap_step": False, **knobs}
    optimizer = make(parameters, lr=0.1, config=ZenFlowConfig(**knobs))
    seen = []
    for grads in zip(*weights, strict=True):
        before = [parameter.detach().clone() for parameter in parameters]
        for parameter, grad in zip(parameters, grads, strict=True):
            parameter.grad = torch.tensor([grad], dtype=torch.float32)
        optimizer.step()
        moved = zip(parameters, before, strict=True)
        seen.append([(parameter.detach() != old).nonzero()[:, 1].tolist() for parameter, old in moved])
    if hasattr(optimizer, "close"):
        optimizer.close()
    return seen


def loud(*columns: int) -> list[float]:
    return [9.0 if column in columns else 1.0 for column in range(10)]


FIRST = loud(0, 1, 2, 3, 4)


@both
@pytest.mark.parametrize(
    ("proposed", "taken"), [((5, 6, 7, 8, 9), True), ((0, 1, 2, 8, 9), True), ((0, 1, 2, 3, 9), False)]
)
def test_a_selection_that_is_still_right_stays(make: Any, proposed: tuple[int, ...], taken: bool) -> None:
    # Looked at in step 9, of effect at the close in step 10, and seen in step 11. At 0.8 of five columns it stays.
    seen = selections(make, [*[FIRST] * 8, loud(*proposed), *[FIRST] * 2])
    assert [step[0] for step in seen[:5]] == [[0, 1, 2, 3, 4]] * 4 + [list(range(10))]
    assert seen[10] == [list(proposed if taken else (0, 1, 2, 3, 4))]


@both
def test_all_weights_change_together_or_none(make: Any) -> None:
    news = (FIRST, loud(0, 1, 2, 3, 9), loud(0, 1, 2, 8, 9))
    stays, one_off, two_off = ([*[FIRST] * 8, new, FIRST, FIRST] for new in news)
    # (5 + 3) of 10 columns stay: that is enough, and two weights keep all of theirs.
    assert selections(make, stays, two_off)[10] == [[0, 1, 2, 3, 4]] * 2
    # (4 + 3) of 10 are too few, and the weight that lost one follows.
    assert selections(make, one_off, two_off)[10] == [[0, 1, 2, 3, 9], [0, 1, 2, 8, 9]]


@given(RANDOMS)
@thorough(40)
def test_windows_and_selections_equal_the_references(rng: random.Random) -> None:
    case = with_auto(rng, draw_case(rng, rule=draw_rule(rng)))
    if rng.random() < 0.3:
        case = with_changes(rng, case, share=0.15, fixed=("update_interval", "select_interval", "apply_lag"))
    note(repr(case))
    compare(case)


@pytest.mark.parametrize("seed", range(repeated(30)))
def test_windows_and_selections_equal_the_references_on_fixed_cases(seed: int) -> None:
    compare(with_auto(random.Random(seed), case_of(seed, steps=20, rounded_grads=False)))
