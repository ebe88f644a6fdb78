from __future__ import annotations

import pytest

from zenflow import ZenFlowConfig
from zenflow.config import LIVE_KNOBS
from zftune.errors import BadInputError
from zftune.tuner.space import TRAJECTORY_KNOBS, Setting


def test_a_setting_is_what_set_knobs_takes_and_the_store_keeps() -> None:
    setting = Setting(topk_ratio=0.05, update_interval=8, apply_lag=3, offload_ratio=0.9, host_threads=2)
    assert set(setting.knobs()) <= set(LIVE_KNOBS)
    assert set(TRAJECTORY_KNOBS) <= set(setting.knobs())
    assert Setting.from_knobs(setting.knobs()) == setting
    assert Setting.of(setting.config(ZenFlowConfig(bucket_bytes=4096))) == setting
    assert setting.config(ZenFlowConfig(bucket_bytes=4096)).bucket_bytes == 4096


def test_the_lag_is_resolved_so_that_equal_settings_are_equal() -> None:
    assert Setting.of(ZenFlowConfig(update_interval=4)) == Setting.of(ZenFlowConfig(update_interval=4, apply_lag=4))
    assert len({Setting.of(ZenFlowConfig(update_interval=4)), Setting.of(ZenFlowConfig(apply_lag=4))}) == 1


@pytest.mark.parametrize(
    ("knobs", "staleness"),
    [
        ({"update_interval": 4, "apply_lag": 4}, 4.0),  # 1.5 in the window, 2.5 after it
        ({"update_interval": 4, "apply_lag": 1}, 2.5),
        ({"update_interval": 4, "apply_lag": 4, "overlap_step": False}, 1.5),
        ({"update_interval": 1, "apply_lag": 1, "overlap_step": False}, 0.0),
        ({"update_interval": 1, "apply_lag": 1}, 1.0),
        ({"offload_ratio": 0.0}, 0.0),
        ({"topk_ratio": 1.0}, 0.0),
    ],
)
def test_mean_staleness(knobs: dict[str, float], staleness: float) -> None:
    setting = Setting(**knobs)  # type: ignore[arg-type]
    assert setting.mean_staleness_steps == staleness
    assert setting.synchronous == (staleness == 0)


def test_what_differs_is_said_in_words() -> None:
    setting = Setting(topk_ratio=0.2, update_interval=8, apply_lag=4)
    assert setting.differences(Setting()) == "topk_ratio 0.2, update_interval 8"
    assert setting.differences(setting) == ""
    assert str(setting) == "topk_ratio 0.2, update_interval 8, apply_lag 4"


def test_bad_knobs_are_refused() -> None:
    with pytest.raises(BadInputError, match="apply_lag is 5; it must be an integer from 1 to 4"):
        Setting(apply_lag=5)
    with pytest.raises(BadInputError, match="update_interval is 'auto'"):
        Setting.of(ZenFlowConfig(update_interval="auto"))
    with pytest.raises(BadInputError, match="knobs are topk_ratio; they must be"):
        Setting.from_knobs({"topk_ratio": 0.1})
