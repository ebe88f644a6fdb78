"""`zftune.attach` where the runtime chooses how long windows are, which no search can measure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from tests.support.zftune.tuner.loop import Attach, Loop, attach
from zenflow import ZenFlowConfig
from zenflow.errors import HostMemoryError
from zftune.tuner import drivers
from zftune.tuner.drivers import SearchDriver
from zftune.tuner.space import Setting
from zftune.tuner.tuner import Tuner

__all__ = ["attach"]

AUTO = ZenFlowConfig(topk_ratio=0.1, update_interval="auto", host_threads=1)


def test_zen_auto_stays_until_there_is_a_search(attach: Attach) -> None:
    loop, changes = Loop(AUTO), list[tuple[int, Mapping[str, Any]]]()
    tuner = attach(loop, on_change=lambda step, knobs: changes.append((step, knobs)))
    for _ in range(8):
        loop.step()
        assert loop.optimizer.config.update_interval == "auto"
    assert changes == []
    assert tuner.incumbent == Setting(topk_ratio=0.1, update_interval=4, apply_lag=4, host_threads=1)
    loop.run(tuner, until=lambda: tuner.live is not None)
    loop.run(tuner, until=lambda: bool(changes))
    step, knobs = changes[0]
    assert 8 < step <= loop.optimizer.steps + 1
    assert knobs == tuner.incumbent.knobs()
    loop.run(tuner, until=lambda: loop.optimizer.config.update_interval != "auto")  # with the next window
    assert loop.knobs == tuner.incumbent
    tuner.close()
    assert tuner.search is not None
    assert tuner.search.book.trials[0].setting == loop.knobs


@pytest.mark.parametrize("failure", ["refused", "no search"])
def test_zen_auto_stays_where_nothing_can_be_searched(
    attach: Attach, monkeypatch: pytest.MonkeyPatch, failure: str
) -> None:
    loop = Loop(AUTO)
    tuner = attach(loop)

    def refuse(*_: Any, **__: Any) -> None:
        raise HostMemoryError("the host has 3 bytes")

    if failure == "refused":
        monkeypatch.setattr(loop.optimizer, "set_knobs", refuse)
    else:
        monkeypatch.setattr(drivers, "prepare", refuse)
    loop.run(tuner)
    if failure == "refused":
        tuner.close()
        assert tuner.search is not None
        crash = next(note for note in tuner.search.notes if note.kind == "crash")
        assert crash.details["why"] == "the host has 3 bytes"
    else:
        assert any(one.startswith("Tuning ended: ") and "3 bytes" in one for one in tuner.notices)
    loop.step()
    assert loop.optimizer.config == AUTO.resolved()


def test_zen_auto_stays_where_nobody_searches() -> None:
    loop = Loop(AUTO)
    tuner = Tuner(loop.optimizer, SearchDriver(), tokens=1)
    tuner.close()
    loop.step()
    assert loop.optimizer.config.update_interval == "auto"
    assert tuner.incumbent.update_interval == 4
    loop.optimizer.close()
