"""Upstream's knobs as settings."""

from __future__ import annotations

from typing import Any

import pytest

from tests.zftune.restarts.training import ZENFLOW, ds_config
from zftune.errors import BadInputError
from zftune.restarts.upstream import Upstream, seeds, space_for
from zftune.tuner.space import Setting, Space, upstream_staleness_steps


def upstream(**zero: Any) -> Upstream:
    config = ds_config(None)
    config["zero_optimization"] |= zero
    return Upstream(config, "0.19.6")


def space(of: Upstream, quality: str | None = None, **facts: Any) -> Space:
    return space_for(of, quality, **{"has_loss": True, "has_scheduler": False, "sub_groups": 0, **facts})


def setting(**knobs: Any) -> Setting:
    interval = knobs.get("update_interval", 4)
    return Setting(**{"apply_lag": interval, "deferred_update": "mean", **knobs})


def test_the_start_is_what_the_ds_config_says() -> None:
    start = upstream(zenflow=ZENFLOW).start()
    assert start == setting(topk_ratio=0.1, update_interval=2, select_interval=8, overlap_step=False)
    plain = upstream().start()
    assert (plain.topk_ratio, plain.update_interval, plain.overlap_step) == (0.0, 1, False)


@pytest.mark.parametrize("section", [{}, {**ZENFLOW, "update_interval": "auto"}])
def test_an_automatic_interval_is_refused(section: dict[str, Any]) -> None:
    with pytest.raises(BadInputError, match=r"update_interval is 'auto'.*NaN"):
        upstream(zenflow=section).start()


def test_a_window_is_applied_when_the_next_one_closes() -> None:
    """Of steps 0 to 3 the gradients are 4 to 7 steps old then; without overlap 0 to 3."""
    assert upstream_staleness_steps(setting(update_interval=4, overlap_step=True)) == (4 + 5 + 6 + 7) / 4
    assert upstream_staleness_steps(setting(update_interval=4, overlap_step=False)) == (0 + 1 + 2 + 3) / 4
    assert upstream_staleness_steps(setting(topk_ratio=0.0, update_interval=1, overlap_step=False)) == 0


def test_what_is_searched_is_no_staler_than_the_users_own() -> None:
    of = upstream(zenflow=ZENFLOW)
    allowed = space(of)
    assert [one.name for one in allowed.dimensions] == ["topk_ratio", "update_interval", "overlap_step"]
    assert allowed.budget == pytest.approx((1 - allowed.coverage(0.1)) * 0.5)
    assert space(of, "loose").budget == pytest.approx(2 * allowed.budget)
    found = list(allowed.settings())
    assert all(
        (1 - allowed.coverage(one.topk_ratio)) * upstream_staleness_steps(one) <= allowed.budget * 1.001
        for one in found
    )
    assert len(found) > 5
    assert all(one.apply_lag == one.update_interval and one.select_interval == 8 for one in found)
    first = seeds(allowed)[0]
    assert first in found
    assert first.update_interval == max(one.update_interval for one in found if one.overlap_step)


def test_a_trial_keeps_what_is_not_searched() -> None:
    of = upstream(zenflow={**ZENFLOW, "pt_reserved_cores_perc": 0.25, "full_warm_up_rounds": 3})
    config, _ = of.applied(setting(topk_ratio=0.2, update_interval=4, select_interval=8, overlap_step=True))
    section = config["zero_optimization"]["zenflow"]
    assert section["pt_reserved_cores_perc"] == 0.25
    assert (section["topk_ratio"], section["update_interval"], section["overlap_step"]) == (0.2, 4, True)
    assert section["full_warm_up_rounds"] == 4  # whole windows
    assert of.config["zero_optimization"]["zenflow"]["full_warm_up_rounds"] == 3


def test_without_a_zenflow_section_nothing_may_get_stale() -> None:
    with pytest.raises(BadInputError, match=r"--quality 'exact' \(the default.*stage 2.*published or loose"):
        space(upstream())
    assert space(upstream(), "published").budget > 0
    found = space(upstream(stage=3), has_scheduler=False, sub_groups=4)
    assert [one.name for one in found.dimensions] == ["offload_ratio"]
    with pytest.raises(BadInputError, match="stage 3"):  # a scheduler does not reach the share on the GPU
        space(upstream(stage=3), has_scheduler=True, sub_groups=4)


def test_what_upstream_cannot_train_is_refused() -> None:
    of = upstream()
    config = {**of.config, "gradient_accumulation_steps": 4}
    with pytest.raises(BadInputError, match="gradient_accumulation_steps is 4"):
        space(Upstream(config, "0.19.6"), "published")
    with pytest.raises(BadInputError, match="loss"):
        space(of, "published", has_loss=False)
    with pytest.raises(BadInputError, match="--quality is 'best'"):
        space(of, "best")
