"""Windows of a known length, where the runtime chooses until there is a search."""

from __future__ import annotations

from typing import Any

import pytest

from zenflow import ZenFlowConfig
from zftune.tuner.executor import counted
from zftune.tuner.space import Setting
from zftune.tuner.tuner import warm_up_steps

AUTO = ZenFlowConfig(topk_ratio=0.1, update_interval="auto", host_threads=1)
KNOWN = Setting(topk_ratio=0.1, update_interval=4, apply_lag=4, host_threads=1)


@pytest.mark.parametrize("select_interval", ["auto", 3, 16, 500])
def test_a_warm_up_is_as_long_as_that_of_the_windows_to_come(select_interval: Any) -> None:
    known = ZenFlowConfig(update_interval=4, select_interval=select_interval)
    auto = ZenFlowConfig(update_interval="auto", select_interval=select_interval)
    assert warm_up_steps(auto) == warm_up_steps(known) == {"auto": 8, 3: 8, 16: 17, 500: 32}[select_interval]


def test_what_has_windows_of_a_known_length_stays() -> None:
    config = ZenFlowConfig(update_interval=7, apply_lag=3)
    assert counted(config) is config
    assert Setting.of(counted(AUTO)) == KNOWN
