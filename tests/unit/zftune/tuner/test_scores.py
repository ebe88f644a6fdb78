from __future__ import annotations

import numpy as np
import pytest

from zftune.tuner.scores import (
    MOST_STEPS,
    ChangePoint,
    ExplorationCost,
    Gain,
    Sample,
    describe,
    error_of_mean,
    gain,
    score,
    spread,
    steps_for,
    steps_of,
    too_slow,
)
from zftune.tuner.states import Gains


def lognormal(seed: int, middle: float, noise: float, count: int) -> list[float]:
    return list(middle * np.exp(noise * np.random.default_rng(seed).standard_normal(count)))


@pytest.mark.parametrize(("interval", "steps"), [(1, 20), (3, 21), (4, 20), (16, 32), (32, 64)])
def test_a_measurement_is_at_least_20_steps_of_whole_windows_and_two_of_them(interval: int, steps: int) -> None:
    assert steps_of(interval) == steps


def test_with_windows_of_one_step_the_score_is_the_median_per_token() -> None:
    assert score([Sample.of([10.0, 30.0, 20.0], 1, 64)]) == pytest.approx(20_000 / 64)


def test_a_stall_in_one_step_of_each_window_counts() -> None:
    sample = Sample.of([100, 100, 100, 500] * 5, 4, 1000)  # the median of all steps would be 100
    assert score([sample]) == pytest.approx(200.0)


def test_one_slow_step_does_not() -> None:
    steps = [100.0, 100, 100, 500] * 5
    steps[5] = 5000.0
    assert score([Sample.of(steps, 4, 1000)]) == pytest.approx(200.0)


def test_windows_that_are_not_whole_are_left_out() -> None:
    assert Sample.of([1, 2, 3, 4, 5], 2, 1).token_us == (1000, 2000, 3000, 4000)


def test_spread_is_the_noise_of_steps_whatever_the_shape_of_a_window() -> None:
    noise = np.exp(0.05 * np.random.default_rng(0).standard_normal(400))
    steps = np.tile([100, 100, 100, 500], 100) * noise
    assert spread([Sample.of(list(steps), 4, 1)]) == pytest.approx(0.05, rel=0.15)


@pytest.mark.parametrize("noise", [0.03, 0.08])
@pytest.mark.parametrize("interval", [1, 4, 16])
def test_the_bootstrap_error_is_the_error(noise: float, interval: int) -> None:
    steps = 32 if interval == 16 else 20
    found = []
    for seed in range(150):
        before = [Sample.of(lognormal(3 * seed + i, 100, noise, steps), interval, 1) for i in range(2)]
        after = [Sample.of(lognormal(3 * seed + 2, 90, noise, steps), interval, 1)]
        found.append(gain(before, after, seed=seed))
    shares = np.array([one.share for one in found])
    assert shares.mean() == pytest.approx(0.1, abs=0.01)
    assert np.mean([one.error for one in found]) == pytest.approx(shares.std(), rel=0.35)


def alike(seed: int, noise: float, count: int, correlation: float) -> list[float]:
    """Step times of which each is like the one before: an AR(1) process."""
    drawn = np.random.default_rng(seed).standard_normal(count)
    for step in range(1, count):
        drawn[step] = correlation * drawn[step - 1] + (1 - correlation**2) ** 0.5 * drawn[step]
    return list(100 * np.exp(noise * drawn))


@pytest.mark.parametrize(("interval", "steps"), [(1, 20), (1, 60), (4, 60)])
@pytest.mark.parametrize("correlation", [0.0, 0.6])
def test_two_errors_hold_nineteen_differences_of_twenty(interval: int, steps: int, correlation: float) -> None:
    """Of runs that do not differ; errors of independent steps hold 15 of 20 at a correlation of 0.6 (study 022)."""
    runs = [alike(seed, 0.05, steps, correlation) for seed in range(300)]
    means = [(error_of_mean(one, interval) or 0.0, float(np.mean(one))) for one in runs]
    samples = [Sample.of(one, interval, 1) for one in runs]
    pairs = range(0, len(runs), 2)
    typical = np.mean([not gain([samples[n]], [samples[n + 1]], seed=n).beyond_noise for n in pairs])
    mean = np.mean([abs(means[n][1] - means[n + 1][1]) <= 2 * np.hypot(means[n][0], means[n + 1][0]) for n in pairs])
    assert min(typical, mean) >= 0.9
    assert max(typical, mean) < 1.0


def test_what_measurements_of_one_setting_differ_by_counts_once_for_each() -> None:
    def measured(middle: float, seed: int) -> Sample:
        return Sample.of(lognormal(seed, middle, 0.02, 60), 1, 1)

    apart, alike = [measured(100, 0), measured(109, 1)], [measured(100, 2), measured(100.2, 3)]
    after = [measured(90, 4)]
    quiet, busy = (gain(apart, after, seed=0, repeats=[one]) for one in (alike, apart))
    assert quiet == gain(apart, after, seed=0)
    between = np.log(1.09) / 2**0.5 * (1 / 2 + 1) ** 0.5  # of each measurement; two against one
    assert busy.error == pytest.approx((1 - busy.share) * between, rel=0.15)
    pooled = gain(apart, after, seed=0, repeats=[apart, alike, after])
    assert quiet.error < pooled.error < busy.error


def test_the_error_of_a_mean() -> None:
    values = np.random.default_rng(1).normal(100.0, 8.0, size=200).tolist()
    assert error_of_mean(values, 1) == pytest.approx(8.0 / 200**0.5, rel=0.15)
    assert error_of_mean([1.0], 1) is None
    assert error_of_mean([3.0, 3.0, 3.0], 1) == 0.0


def test_what_repeats_with_every_window_is_no_noise() -> None:
    values = [40.0, 1.0, 1.0, 1.0] * 10
    assert error_of_mean(values, 4) == 0.0
    alone = error_of_mean(values, 1)
    assert alone is not None
    assert alone > 2.0
    assert error_of_mean(values[:7], 4) == error_of_mean(values[:7], 1)  # not two whole windows


def test_a_gain_has_to_exceed_two_percent_and_two_errors() -> None:
    assert Gain(0.03, 0.001).holds
    assert not Gain(0.019, 0.001).holds
    assert not Gain(0.03, 0.02).holds
    assert str(Gain(0.31, 0.01)) == "31.0 +/- 2.0%"


def test_noise_asks_for_more_steps() -> None:
    assert steps_for(0.0, 4) == 20
    assert 20 < steps_for(0.03, 4) < steps_for(0.08, 4) == 60


def test_windows_beyond_one_and_a_half_times_the_incumbent_are_too_slow() -> None:
    assert too_slow([100, 100, 100, 290] * 2, 4, 100) is None  # a mean of 147.5
    assert too_slow([100, 100, 100, 310] * 2, 4, 100) == pytest.approx(1.525)
    assert too_slow([900] * 7, 4, 100) is None  # the second is not whole yet
    assert too_slow([160] * 16, 16, 100) == pytest.approx(1.6)


@pytest.mark.parametrize("interval", [1, 2, 4])
@pytest.mark.parametrize("slow", range(8))
def test_one_slow_step_aborts_nothing(interval: int, slow: int) -> None:
    steps = [100.0] * 8
    steps[slow] = 500.0
    assert all(too_slow(steps[:count], interval, 100) is None for count in range(9))


def test_one_window_has_no_noise_to_tell() -> None:
    sample = Sample.of([90.0, 110.0], 2, 1)
    assert spread([sample]) is None
    assert describe(Sample.of([90.0], 1, 1)) == (90e3, None)
    assert spread([sample, sample]) is None
    assert steps_for(None, 4) == MOST_STEPS


def test_exploring_costs_what_it_takes_beyond_the_incumbent() -> None:
    cost = ExplorationCost(share=0.03, grant_s=6.0, grant_steps=40)
    cost.add(100.0, 1000, None)
    cost.add(3.0, 20, 0.1)
    cost.add(1.0, 20, 0.1)  # faster: nothing is earned
    assert cost.spent_s == pytest.approx(1.0)
    assert cost.elapsed_s == pytest.approx(104.0)
    assert cost.allowed_s == pytest.approx(0.03 * 104 + 6)
    assert cost.left_s == pytest.approx(cost.allowed_s - 1.0)


def test_the_grant_is_of_steps_as_they_were_in_the_beginning() -> None:
    cost = ExplorationCost(share=0.03, grant_s=6.0, grant_steps=40)
    cost.begin(1.0)
    cost.begin(2.0)
    assert cost.allowed_s == pytest.approx(40)


def test_what_a_change_may_cost_is_the_most_of_the_last_few() -> None:
    cost = ExplorationCost()
    assert cost.change_s == 0.0
    for seconds in (9.0, 0.3, 0.5, 0.2, 0.1, 0.3):
        cost.changed(seconds, 2, 0.1)
    assert cost.change_s == pytest.approx(0.3)


@pytest.mark.parametrize("noise", [0.0, 0.015, 0.04])
def test_steady_times_are_no_change(noise: float) -> None:
    for seed in range(5):
        test = ChangePoint()
        assert not any(test.add(value) for value in lognormal(seed, 100, noise, 2000))


@pytest.mark.parametrize("factor", [0.85, 1.15])
def test_a_shift_is_found_soon_and_then_learnt(factor: float) -> None:
    test = ChangePoint()
    assert not any(test.add(value) for value in lognormal(1, 100, 0.015, 60))
    found = [test.add(value) for value in lognormal(2, 100 * factor, 0.015, 200)]
    assert found.index(True) < 4
    assert sum(found) == 1


def test_a_gain_follows_from_what_the_start_gains_over_the_best() -> None:
    gains = Gains("start")
    gains.adopt("first", Gain(0.5, 0.1))
    gains.begin_again()
    gains.compare_again(Gain(-0.25, 0.05))  # 100 ms against 80
    found = gains.gain
    assert found is not None
    assert (found.share, found.error, found.saves, gains.age) == pytest.approx((0.2, 0.032, 0.2, 0))
    gains.adopt("second", Gain(0.5, 0.0))
    assert gains.gain is not None
    assert gains.gain.share == pytest.approx(0.6)
    assert (gains.age, gains.reference) == (0, "start")


def test_what_was_gained_before_times_changed_does_not_count_as_saved_now() -> None:
    gains = Gains("start")
    gains.adopt("first", Gain(0.5, 0.1))
    assert gains.gain == Gain(0.5, 0.1)
    assert gains.gain.saves == 0.5
    gains.begin_again()
    assert gains.gain == Gain(0.5, 0.1, 0.0)
    gains.adopt("second", Gain(0.2, 0.1))
    found = gains.gain
    assert (found.share, found.saves) == pytest.approx((0.6, 0.2))
    gains.move_to("first")
    assert gains.gain.saves == 0.0
    gains.move_to("start")
    assert gains.gain is None
