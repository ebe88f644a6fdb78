"""The loss beside the speed: trends that are there, noise that is none, and no more digits than are known."""

from __future__ import annotations

import random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from zenflow import StepStats, ZenFlowAdamW, ZenFlowConfig
from zftune.quality import (
    adopted_from,
    assumed_coverage,
    at_full_rate,
    coverage_advice,
    coverage_warning,
    expected_loss_percent,
    figure,
    late_percent,
    loss_bound,
    most_late_steps,
    movement_percent,
    rate_at_full,
    summary,
)


def test_no_losses_and_too_few() -> None:
    assert summary([]) is None
    few = summary([2.5, 2.0, 1.5])
    assert few is not None
    assert (few.first, few.last, few.error, few.trend) == (2.5, 1.5, None, "unknown")
    assert str(few) == "2.5 → 1.5"


@given(st.integers(0, 2**32))
def test_noise_alone_is_rarely_a_trend_and_a_fall_is_one(seed: int) -> None:
    draw = random.Random(seed)
    noise = [draw.gauss(0, 0.05) for _ in range(64)]
    falling = summary([3 - step / 64 + one for step, one in enumerate(noise)])
    assert falling is not None
    assert falling.trend == "falling"
    assert falling.error == pytest.approx(2 * 0.05 / 4, rel=0.5)  # a trend is no noise
    trends = [summary([draw.gauss(3, 0.5) for _ in range(64)]) for _ in range(40)]
    assert sum(one is not None and one.trend != "level" for one in trends) < 12


def test_digits_end_where_the_noise_begins() -> None:
    assert figure(2.34567, 0.03) == "2.35"
    assert figure(2.34567, 0.3) == "2.3"
    assert figure(234.567, 30.0) == "230"
    assert figure(2.34567, None) == "2.35"
    assert figure(2.34567, 0.0) == "2.35"
    level = summary([2.0, 2.5] * 8)
    assert str(level) == "2.2 → 2.2 ± 0.4, no trend beyond noise"


def test_a_coverage_far_below_what_is_assumed_names_what_to_turn() -> None:
    knobs = {"topk_ratio": 0.01, "update_interval": 8, "overlap_step": True}
    assert assumed_coverage(0.01) == pytest.approx(0.889)
    warning = coverage_warning(0.13, knobs)
    assert warning is not None
    assert "13% of the gradient energy, where 89% is assumed at topk_ratio 0.01" in warning
    assert "Raise topk_ratio, lower update_interval, or use quality exact" in warning
    searching = coverage_warning(0.13, knobs, tuned=True)
    assert searching is not None
    assert searching.endswith("may cost loss. The search tries only what the quality allows.")


def test_the_advice_does_not_contradict_what_a_search_adopted() -> None:
    start = {"topk_ratio": 0.05, "update_interval": 4, "apply_lag": 4, "offload_ratio": 1.0, "overlap_step": True}
    adopted = {**start, "topk_ratio": 0.1, "update_interval": 16, "apply_lag": 8}
    warning = coverage_warning(0.13, adopted, adopted_from(adopted, start, adopted))
    assert warning is not None
    assert "ower update_interval" not in warning
    assert warning.endswith(
        "The search adopted topk_ratio 0.1, update_interval 16, apply_lag 8, which its quality allows by what it "
        "measured: compare the losses with those of quality exact (update_interval 1 with overlap_step off)."
    )
    assert coverage_advice(adopted, start).startswith("topk_ratio 0.1, update_interval 16, apply_lag 8 was adopted")
    assert coverage_advice(start) == "raise topk_ratio, lower update_interval"
    assert coverage_advice({**start, "update_interval": 1}) == "raise topk_ratio"
    for knobs, best in ((start, start), (adopted, start), (start, adopted)):  # nothing adopted, or something on trial
        assert adopted_from(knobs, start, best) is None
    faster = {**start, "offload_ratio": 0.8}  # no later than at the start
    assert "Raise topk_ratio, lower update_interval" in (coverage_warning(0.13, faster, start) or "")


@pytest.mark.parametrize(
    ("measured", "knobs"),
    [
        (0.8, {"topk_ratio": 0.01, "update_interval": 8, "overlap_step": True}),
        (None, {"topk_ratio": 0.01, "update_interval": 8, "overlap_step": True}),
        (0.1, {"topk_ratio": 0.01, "update_interval": 1, "overlap_step": False}),  # nothing is late
        (0.0, {"topk_ratio": 0.0, "update_interval": 8, "overlap_step": True}),  # nothing is selected on purpose
        (0.1, {}),
    ],
)
def test_no_warning(measured: float | None, knobs: dict[str, object]) -> None:
    assert coverage_warning(measured, knobs) is None


def moved(change: float | None, weights: float | None) -> StepStats:
    known = dict.fromkeys(StepStats.__dataclass_fields__, 0)
    return StepStats(**{**known, "change_norm": change, "weight_norm": weights})  # type: ignore[arg-type]


def test_movement_is_that_of_all_weights_together() -> None:
    assert movement_percent([]) is None
    assert movement_percent([moved(None, None), moved(0.0, 0.0)]) is None
    assert movement_percent([moved(3.0, 600.0), moved(None, None), moved(4.0, 800.0)]) == pytest.approx(0.5)
    assert movement_percent([moved(1.0, 100.0), moved(0.0, 10_000.0)]) == pytest.approx(0.01, rel=1e-3)


@pytest.mark.parametrize(
    ("groups", "factor"),
    [
        ([{"lr": 1e-4}], 1.0),
        ([{"lr": 1e-5, "initial_lr": 1e-4}], 10.0),
        ([{"lr": 1e-4, "initial_lr": 1e-6}], 1.0),  # such as after OneCycleLR's first steps
        ([{"lr": 1e-5, "initial_lr": 4e-6, "max_lr": 1e-4}], 10.0),
        ([{"lr": 1e-4}, {"lr": 1e-5, "initial_lr": 2e-5}], 2.0),
        ([{"lr": 0.0, "initial_lr": 1e-4}], None),
    ],
)
def test_a_movement_of_a_warm_up_is_that_at_the_highest_rate(
    groups: list[dict[str, float]], factor: float | None
) -> None:
    found = at_full_rate(0.02, groups)
    assert found == (None if factor is None else pytest.approx(0.02 * factor))
    assert at_full_rate(None, groups) is None


def test_a_movement_is_as_measured_once_the_rate_falls() -> None:
    groups = [{"lr": 1e-5, "initial_lr": 1e-4}, {"lr": 1e-4}]
    assert at_full_rate(0.02, groups, (1.1e-5, 1e-4)) == 0.02  # after its highest
    assert at_full_rate(0.02, groups, (0.9e-5, 1e-4)) == pytest.approx(0.2)
    assert at_full_rate(0.02, groups, (1e-5, 1e-4)) == pytest.approx(0.2)


def test_a_movement_is_told_at_one_rate() -> None:
    falling = [{"lr": 1e-5, "initial_lr": 1e-4}] * 2
    assert rate_at_full(falling, (1.1e-5, 1.1e-5)) == 1e-5
    assert rate_at_full(falling, (0.9e-5, 0.9e-5)) == rate_at_full(falling) == 1e-4
    halves = [{"lr": 1e-5, "initial_lr": 1e-4}, {"lr": 5e-6, "initial_lr": 5e-5}]
    assert rate_at_full(halves) == 1e-4
    assert rate_at_full(halves, (1.1e-5, 5.5e-6)) == 1e-5  # a movement at the end of a schedule is not told without it
    assert rate_at_full([]) is None


def test_a_bound_on_lateness_is_one_on_the_loss() -> None:
    for movement in (0.05, 0.1, 2.0):
        for quality, most_percent in (("published", 0.3), ("loose", 1.2)):
            steps = most_late_steps(quality, movement)
            assert expected_loss_percent(late_percent(movement, 0.0, steps)) == pytest.approx(most_percent)
    assert most_late_steps("exact", 0.1) == 0


def test_guessed_weights_cost_what_their_quality_says_up_to_the_windows_that_were_studied() -> None:
    assert [most_late_steps(q, 0.5, guesses=True) for q in ("exact", "published", "loose")] == [0, 4.5, 8.5]
    assert most_late_steps("loose", 2.0, guesses=True) == 5 / 2
    assert [expected_loss_percent(5.0, steps, guesses=True) for steps in (4.5, 8.5)] == [0.3, 1.2]
    assert expected_loss_percent(5.0, 8.6, guesses=True) == expected_loss_percent(5.0)
    assert expected_loss_percent(5.1, 4.5, guesses=True) == expected_loss_percent(5.1)
    assert loss_bound(0.3, 4.5, guesses=True) == "up to about 0.3% of loss, since late weights are guessed"
    assert loss_bound(9.0, 9.0, guesses=True) == loss_bound(9.0, 9.0)


def test_what_was_never_measured_is_no_figure() -> None:
    assert loss_bound(34.0, 2.0).startswith("up to about 34% of loss in a long fine-tuning, 34.3% in one of 1000 steps")
    assert loss_bound(34.9, 2.0) == (
        "up to about 34.9% of loss in a long fine-tuning, possibly more than 35% in one of 1000 steps; more from "
        "scratch"
    )
    assert loss_bound(56.0, 2.0) == (
        "possibly more than 35% of loss, the most that was measured in fine-tuning; more from scratch"
    )


def test_a_tracker_gets_the_movement() -> None:
    import zftune

    module = nn.Linear(8, 8, bias=False)
    optimizer = ZenFlowAdamW(module.parameters(), lr=1e-3, config=ZenFlowConfig.zero_offload())
    for _ in range(6):
        module(torch.randn(4, 8)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    told = zftune.stats(optimizer)
    assert told["zenflow_movement_percent"] == pytest.approx(movement_percent(optimizer.history()))
    optimizer.close()
