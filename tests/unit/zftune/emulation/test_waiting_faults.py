"""Faults of waiting, planted into the runtime on a rig: in simulated time each of them shows, every time.

tests/system/zenflow/test_missing_wait.py has the one that may end its process.
"""

from __future__ import annotations

from typing import Any

import pytest
from torch import Tensor

from tests.support.zenflow.cases import same_bits
from tests.support.zenflow.small import Stack, assert_same_run, seeded, train
from zenflow import ZenFlowConfig
from zenflow.buckets import Bucket
from zenflow.host.gradient_log import GradientLog
from zenflow.windows import Windows
from zftune.emulation import EmulatedAccelerator, Rig
from zftune.emulation.clock import DeadlockError

CONFIG = ZenFlowConfig(topk_ratio=0.25, update_interval=2, select_interval=1000, bucket_bytes=200)
TIMES = 3
FAST_GBPS = 1e6


def trained(**rates: float) -> list[Tensor]:
    values = dict.fromkeys(("link_d2h_gbps", "link_h2d_gbps", "host_gbps"), FAST_GBPS) | rates
    rig = Rig("faulty", "", forward_ms=2.0, backward_ms=4.0, device_gbps=None, scale=1.0, **values)
    device = EmulatedAccelerator(rig)
    model = seeded(Stack)
    try:
        device.attach(model)
        return train(model, CONFIG, steps=9, device=device)
    finally:
        device.close()


def differs(ours: list[Tensor], theirs: list[Tensor]) -> bool:
    return not all(bool(same_bits(*pair).all()) for pair in zip(ours, theirs, strict=True))


@pytest.fixture(scope="module")
def right() -> list[Tensor]:
    return train(seeded(Stack), CONFIG, steps=9)


@pytest.mark.parametrize("slow", ["link_d2h_gbps", "link_h2d_gbps", "host_gbps"])
def test_without_a_fault_the_weights_are_right(slow: str, right: list[Tensor]) -> None:
    for _ in range(TIMES):
        assert_same_run(trained(**{slow: 5e-4}), right)


def test_a_source_that_is_overwritten_too_early(monkeypatch: pytest.MonkeyPatch, right: list[Tensor]) -> None:
    """Places in the log are given back when the host is asked to read them, not when it has."""
    submit = Windows._submit

    def hasty(windows: Windows, bucket: Bucket, *arguments: Any, **options: Any) -> None:
        places, bucket.places = bucket.places, []
        windows._runtime.log.give_back(places)
        submit(windows, bucket, *arguments, **options)

    monkeypatch.setattr(Windows, "_submit", hasty)
    for _ in range(TIMES):
        assert differs(trained(host_gbps=5e-4), right)


def test_a_lost_wake_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Room in the gradient log is given back without a word to whoever waits for it."""
    init = GradientLog.__init__

    def mute(self: GradientLog, *arguments: Any) -> None:
        init(self, *arguments)
        monkeypatch.setattr(self._pool._changed, "notify_all", lambda: None)

    monkeypatch.setattr(GradientLog, "__init__", mute)
    for _ in range(TIMES):
        with pytest.raises(DeadlockError, match="MainThread for room in the gradient log"):
            trained(host_gbps=5e-4)
