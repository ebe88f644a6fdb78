"""Windows of a known length, where the runtime chooses until there is a search."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
from torch import nn

from zenflow import ZenFlowAdamW, ZenFlowConfig
from zftune.errors import ZftuneError
from zftune.tuner.executor import Changes, Verdict
from zftune.tuner.space import Setting
from zftune.tuner.warm_up import KnownWindow, counted, warm_up_steps

AUTO = ZenFlowConfig(topk_ratio=0.1, update_interval="auto", host_threads=1)
KNOWN = Setting(topk_ratio=0.1, update_interval=4, apply_lag=4, host_threads=1)


class Scripted(Changes):
    def __init__(self, *verdicts: Verdict | None) -> None:
        self.asked: list[Mapping[str, Any]] = []
        self._verdicts = list(verdicts)

    def ask(self, knobs: Mapping[str, Any]) -> None:
        self.asked.append(knobs)

    def verdict(self) -> Verdict | None:
        return self._verdicts.pop(0)


@pytest.mark.parametrize("select_interval", ["auto", 3, 16, 500])
def test_a_warm_up_is_as_long_as_that_of_the_windows_to_come(select_interval: Any) -> None:
    known = ZenFlowConfig(update_interval=4, select_interval=select_interval)
    auto = ZenFlowConfig(update_interval="auto", select_interval=select_interval)
    assert warm_up_steps(auto) == warm_up_steps(known) == {"auto": 8, 3: 8, 16: 17, 500: 32}[select_interval]


def test_what_has_windows_of_a_known_length_stays() -> None:
    config = ZenFlowConfig(update_interval=7, apply_lag=3)
    assert counted(config) is config
    assert Setting.of(counted(AUTO)) == KNOWN


def test_a_change_that_was_void_is_asked_for_again() -> None:
    optimizer = ZenFlowAdamW(nn.Linear(9, 5).parameters(), lr=1e-3, config=AUTO)
    changes = Scripted(None, Verdict(void="rank 1 did not acknowledge"), None, Verdict(step=12))
    told: list[tuple[int, Mapping[str, Any]]] = []
    window = KnownWindow(optimizer, changes, lambda step, knobs: told.append((step, knobs)))
    for asked in (1, 1, 2, 2):
        assert told == []
        window.ask()
        assert len(changes.asked) == asked
    assert changes.asked == [KNOWN.knobs()] * 2
    assert told == [(12, KNOWN.knobs())]
    assert not window.there  # until a step has been taken
    optimizer.close()


def test_ranks_that_never_agree_are_given_up() -> None:
    optimizer = ZenFlowAdamW(nn.Linear(9, 5).parameters(), lr=1e-3, config=AUTO)
    void = Verdict(void="rank 1 did not acknowledge the change")
    window = KnownWindow(optimizer, Scripted(*[void] * 8), None)
    for _ in range(7):
        window.ask()
    with pytest.raises(ZftuneError, match=r"4 instead of auto is not agreed on \(rank 1 did not acknowledge"):
        window.ask()
    optimizer.close()


def test_a_change_that_is_refused_says_why() -> None:
    optimizer = ZenFlowAdamW(nn.Linear(9, 5).parameters(), lr=1e-3, config=AUTO)
    window = KnownWindow(optimizer, Scripted(Verdict(refused="the host has 3 bytes")), None)
    with pytest.raises(ZftuneError, match=r"update_interval 4 instead of auto is refused \(the host has 3 bytes\)"):
        window.ask()
    optimizer.close()
