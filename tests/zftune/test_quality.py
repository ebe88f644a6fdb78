"""The loss beside the speed: trends that are there, noise that is none, and no more digits than are known."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zftune.quality import assumed_coverage, coverage_warning, figure, summary


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
