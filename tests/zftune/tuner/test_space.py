from __future__ import annotations

import pytest

from tests.zftune.tuner.surfaces import START, coverage
from zftune.tuner.space import PUBLISHED, Setting, space_for


def test_published_is_no_further_from_the_plain_optimizer_than_the_base() -> None:
    space = space_for(START, "published", coverage=coverage)
    budget = (1 - coverage(0.1)) * 4
    settings = list(space.settings())
    assert space.budget == pytest.approx(budget)
    assert START in settings
    assert len(settings) == len(set(settings)) > 50
    for setting in settings:
        assert (1 - coverage(setting.topk_ratio)) * setting.mean_staleness_steps <= budget * (1 + 1e-6)


def test_loose_is_twice_that_and_allows_more() -> None:
    published, loose = (space_for(START, quality, coverage=coverage) for quality in ("published", "loose"))
    assert loose.budget == pytest.approx(2 * published.budget)
    assert set(published.settings()) < set(loose.settings())


def test_without_a_zenflow_section_the_published_setting_is_the_budget() -> None:
    base = Setting(topk_ratio=0.0, update_interval=1, apply_lag=1, overlap_step=False)
    space = space_for(base, "published", coverage=coverage, zenflow_section=False)
    assert space.budget == pytest.approx(space.cost(PUBLISHED))


def test_exact_changes_speed_only() -> None:
    space = space_for(START, "exact", coverage=coverage, threads=(1, 2), offload_ratios=(0.5, 1.0))
    settings = list(space.settings())
    assert len({setting.host_threads for setting in settings}) == 2
    assert all(setting.synchronous and not setting.overlap_step for setting in settings)
    assert space.violation(START) is not None
    assert space.violation(space.base) is None


def test_without_a_loss_trajectory_knobs_stay() -> None:
    space = space_for(START, "published", coverage=coverage, has_loss=False, offload_ratios=(0.5, 1.0))
    assert {(s.topk_ratio, s.update_interval, s.apply_lag) for s in space.settings()} == {(0.1, 4, 4)}
    assert "no loss is known" in space.fixed_because
    loose = space_for(START, "loose", coverage=coverage, has_loss=False)
    assert loose.budget == pytest.approx(space.budget)


def test_a_violation_names_its_figures() -> None:
    space = space_for(START, "published", coverage=coverage)
    violation = space.violation(Setting(topk_ratio=0.0, update_interval=16, apply_lag=16))
    assert violation is not None
    assert violation.excess > 0
    assert violation.reason == f"updates would come 16.00 steps late on average, the quality allows {space.budget:.2f}"


def test_indices_and_settings_are_inverse() -> None:
    space = space_for(START, "loose", coverage=coverage, threads=(2, 4), offload_ratios=(0.5, 1.0))
    for setting in space.settings():
        assert space.setting(space.indices(setting)) == setting
