from __future__ import annotations

from dataclasses import replace

import pytest

from tests.support.zenflow.small import Stack, assert_same_run, seeded, train
from tests.support.zftune.tuner.surfaces import START, Surface, coverage
from zenflow import ZenFlowConfig
from zftune.quality import MOST_LATE_STEPS, expected_loss_percent, late_percent
from zftune.store.types import Quality
from zftune.tuner.search import Search
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


def test_staggered_windows_are_all_visible_as_late_as_their_lag() -> None:
    base = Setting.of(ZenFlowConfig(update_interval=4, window_phase="staggered"))
    assert base.apply_lag == 1
    space = space_for(base, "loose", coverage=coverage, staggered=True)
    assert len({setting.apply_lag for setting in space.settings()}) > 2
    whole = replace(space, coverage=lambda _: 0.0)
    assert [whole.cost(replace(base, apply_lag=lag)) for lag in (1, 2, 4)] == [2.5, 3.5, 5.5]
    assert whole.cost(replace(base, update_interval=1, overlap_step=False)) == 0


@pytest.mark.parametrize(
    ("quality", "movement", "longest"),
    [("published", None, 8), ("published", 0.5, 8), ("loose", 0.5, 16), ("loose", 1.0, 8), ("published", 2.0, 4)],
)
def test_guessed_weights_may_be_later(quality: Quality, movement: float | None, longest: int) -> None:
    base = Setting.of(ZenFlowConfig(window_phase="staggered"))
    space = space_for(base, quality, coverage=coverage, movement_percent=movement, staggered=True, guesses=True)
    found = {one.update_interval for one in space.settings() if one.topk_ratio == 0}
    assert max(found) == longest
    assert {one.apply_lag for one in space.settings()} == {1}
    violation = space.violation(Setting(topk_ratio=0.0, update_interval=20, apply_lag=1))
    assert violation is not None
    assert violation.reason == (f"updates would come 10.50 steps late, and quality {quality} allows {space.budget:.2f}")


def test_a_violation_names_its_figures() -> None:
    space = space_for(START, "published", coverage=coverage)
    violation = space.violation(Setting(topk_ratio=0.0, update_interval=16, apply_lag=16))
    assert violation is not None
    assert violation.excess > 0
    assert violation.reason == (
        "its weighted staleness would be 16.00 steps (a mean of 16.0 times 100%, the share of the gradient that is "
        f"deferred), and quality published allows {space.budget:.2f}"
    )
    half = replace(space, coverage=lambda share: 0.5 if share else 0.0)
    violation = half.violation(Setting(topk_ratio=0.1, update_interval=16, apply_lag=16))
    assert violation is not None
    assert "would be 8.00 steps (a mean of 16.0 times 50%," in violation.reason


def test_indices_and_settings_are_inverse() -> None:
    space = space_for(START, "loose", coverage=coverage, threads=(2, 4), offload_ratios=(0.5, 1.0))
    for setting in space.settings():
        assert space.setting(space.indices(setting)) == setting


@pytest.mark.parametrize(("quality", "most_percent"), [("published", 0.3), ("loose", 1.2)])
def test_what_is_allowed_follows_from_the_loss_that_it_may_cost(quality: Quality, most_percent: float) -> None:
    movement = 0.06
    space = space_for(START, quality, coverage=coverage, movement_percent=movement)
    free = space_for(replace(START, update_interval=16, apply_lag=16), "loose", coverage=coverage)

    def loss(setting: Setting) -> float:
        return expected_loss_percent(late_percent(movement, setting.topk_ratio, setting.mean_staleness_steps))

    allowed, others = set(space.settings()), set(free.settings()) - set(space.settings())
    assert max(map(loss, allowed)) <= most_percent * (1 + 1e-6)
    assert min(map(loss, others)) > most_percent
    assert max(map(loss, allowed)) > 0.8 * most_percent  # it is the loss that ends them


def test_a_setting_that_moves_too_much_is_refused_and_the_same_one_where_weights_move_less_is_not() -> None:
    late = Setting(topk_ratio=0.1, update_interval=4, apply_lag=4)
    far, near = (space_for(START, "published", coverage=coverage, movement_percent=one) for one in (0.08, 0.04))
    assert near.violation(late) is None
    violation = far.violation(late)
    assert violation is not None
    assert violation.reason == (
        "weights would move 0.288% before late updates arrive, the quality allows 0.171% (up to about 0.3% of loss "
        "in a long fine-tuning)"
    )
    assert violation.excess == pytest.approx(0.288 / 0.1715 - 1, rel=1e-3)


def test_updates_are_no_later_than_any_that_were_studied_however_little_weights_move() -> None:
    for movement in (0.0, 1e-9, 1e-4):
        space = space_for(START, "published", coverage=coverage, movement_percent=movement)
        most = max((1 - one.topk_ratio) * one.mean_staleness_steps for one in space.settings())
        assert 0.9 * MOST_LATE_STEPS < most <= MOST_LATE_STEPS
    violation = space.violation(Setting(topk_ratio=0.1, update_interval=16, apply_lag=16))
    assert violation is not None
    assert violation.reason == (
        "weights would move 0.00144% before late updates arrive, the quality allows 0.0008% (up to about 0.000007% of "
        "loss in a long fine-tuning; no study has looked at updates that are later than 8 steps)"
    )


@pytest.mark.parametrize(
    ("movement", "window"),
    [(0.01, (4, 4, True)), (0.05, (4, 3, True)), (0.06, (4, 2, True)), (0.15, (1, 1, True)), (0.5, (1, 1, False))],
)
def test_a_base_that_is_too_late_is_made_earlier(movement: float, window: tuple[int, int, bool]) -> None:
    base = Setting(topk_ratio=0.1, update_interval=4, apply_lag=4)
    found = space_for(base, "published", coverage=coverage, movement_percent=movement)
    assert (found.base.update_interval, found.base.apply_lag, found.base.overlap_step) == window
    assert found.violation(found.base) is None
    assert found.base.topk_ratio == base.topk_ratio


def test_movement_changes_nothing_where_nothing_may_be_late_or_nothing_is_free() -> None:
    cases: list[tuple[Quality, bool]] = [("exact", True), ("published", False)]
    for quality, has_loss in cases:
        spaces = [
            space_for(START, quality, coverage=coverage, has_loss=has_loss, movement_percent=movement)
            for movement in (None, 0.5)
        ]
        assert spaces[0] == spaces[1] == spaces[0].moving(0.5)


SYNCHRONOUS = replace(START, overlap_step=False)


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        (replace(SYNCHRONOUS, apply_lag=1), replace(SYNCHRONOUS, apply_lag=3), True),
        (replace(START, apply_lag=1), replace(START, apply_lag=3), False),
        (replace(START, topk_ratio=0.0), replace(START, topk_ratio=0.0, select_interval=4), True),
        (START, replace(START, select_interval=4), False),
        (replace(SYNCHRONOUS, offload_ratio=0.0), Setting(topk_ratio=0.3, apply_lag=1, offload_ratio=0.0), True),
        (replace(START, offload_ratio=0.4), replace(START, topk_ratio=0.3, offload_ratio=0.4), False),
    ],
)
def test_settings_are_equal_where_the_runtime_trains_alike(one: Setting, other: Setting, same: bool) -> None:
    assert one.knobs() != other.knobs()
    assert ((one == other), (len({one, other}) == 1), (one.differences(other) == "")) == (same, same, same)
    assert other.differences(one) == "" or not same
    several_buckets = ZenFlowConfig(bucket_bytes=300)
    runs = [train(seeded(Stack), setting.config(several_buckets), steps=13) for setting in (one, other)]
    if same:
        assert_same_run(*runs)
    else:
        with pytest.raises(AssertionError, match="that differ"):
            assert_same_run(*runs)


def test_what_differs_is_told_by_knobs_that_have_an_effect() -> None:
    assert replace(SYNCHRONOUS, apply_lag=1).differences(START) == "overlap_step off"
    assert START.differences(replace(SYNCHRONOUS, apply_lag=1)) == "apply_lag 4, overlap_step on"
    assert replace(START, topk_ratio=0.3, offload_ratio=0.0).differences(START) == "offload_ratio 0"


def test_a_lag_without_an_effect_is_no_choice() -> None:
    """What a search proposes where nothing may be late, and later on a little may."""
    space = space_for(START, "published", coverage=coverage, offload_ratios=(1.0,), movement_percent=0.5).moving(0.05)
    assert not space.base.overlap_step
    indices = {**space.indices(START), "update_interval": 1}
    least, *others = (space.setting({**indices, "lag_share": share}) for share in range(3))
    search = Search(space, least, Surface.random(0).forecast)
    assert all(search.may_run(other) and other.knobs() == least.knobs() for other in others)
    found = [(setting.topk_ratio, setting.update_interval) for setting in space.settings()]
    assert len(found) == len(set(found)) > 20
