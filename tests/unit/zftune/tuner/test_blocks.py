"""Values of blocks, and the noise of such values."""

from __future__ import annotations

import math

import numpy as np
import pytest

from zftune.report.compare import error_of_mean
from zftune.tuner.evidence import BlockNoise, block_steps, block_value, block_values


def test_a_rare_hiccup_counts_for_no_more_than_the_cap() -> None:
    steps = [100.0] * 15 + [900.0]
    assert block_value(steps) == pytest.approx(math.log((15 * 100 + 250) / 16))


def test_a_step_that_exchanges_columns_counts_in_full() -> None:
    steps = [100.0] * 15 + [900.0]
    assert block_value(steps, [False] * 15 + [True]) == pytest.approx(math.log(150))


def test_what_each_window_waits_counts_in_full_and_a_hiccup_does_not() -> None:
    windows = [30.0, 30.0, 30.0, 140.0] * 4
    assert block_value(windows, (), 4) == pytest.approx(math.log(57.5))
    assert block_value([*windows[:-1], 900.0], (), 4) == pytest.approx(math.log((12 * 30 + 3 * 140 + 350) / 16))
    assert block_value(windows[:4], (), 16) == pytest.approx(math.log(57.5))


@pytest.mark.parametrize(
    ("interval", "wanted", "steps"), [(4, 16, 16), (16, 0, 16), (12, 16, 24), (4, 33, 36), (3, 999, 66)]
)
def test_a_block_has_whole_windows_within_its_bounds(interval: int, wanted: int, steps: int) -> None:
    assert block_steps(interval, wanted) == steps


def test_steps_that_fill_no_block_join_the_last_one() -> None:
    values = block_values([100.0] * 16 + [200.0] * 16 + [300.0] * 8, (), 16)
    assert values == [pytest.approx(math.log(100)), pytest.approx(math.log((16 * 200 + 8 * 300) / 24))]
    assert len(block_values([100.0] * 8, (), 16)) == 1


def test_noise_is_pooled_over_differences_of_different_width() -> None:
    draw, noise = np.random.default_rng(0), BlockNoise()
    for factor in (2.0, 1.5, 0.7) * 400:
        noise.add(float(draw.normal(0, 0.05 * math.sqrt(factor))), factor)
    assert math.sqrt(noise.variance) == pytest.approx(0.05, rel=0.05)
    assert noise.cautious == pytest.approx(noise.variance * (1 + 8 / 1200))
    assert BlockNoise(1e-3, 2).cautious == pytest.approx(5 * 5e-4)


def test_the_error_of_a_mean_grows_where_neighbours_are_alike() -> None:
    draw = np.random.default_rng(0)
    alike = [0.0]
    for _ in range(399):
        alike.append(0.8 * alike[-1] + 0.6 * float(draw.standard_normal()))
    found = error_of_mean([100 + one for one in alike], 1)
    independent = error_of_mean([100 + float(one) for one in draw.standard_normal(400)], 1)
    assert found is not None
    assert independent == pytest.approx(1 / math.sqrt(400), rel=0.15)
    assert found == pytest.approx(3 / math.sqrt(400), rel=0.3)
    assert error_of_mean([1.0], 1) is None
