"""Stall by cause on rigs where one thing is slow, against what the rig's rates imply."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.zenflow.small import Flat, seeded, tokens_of
from zenflow import StepStats, ZenFlowAdamW, ZenFlowConfig
from zftune.emulation import EmulatedAccelerator, Rig

FAST_GBPS = 1e6
FORWARD_MS, BACKWARD_MS = 2.0, 4.0
# Gradients leave in step(), so that nothing of their transfer is hidden by backward.
A_WEIGHT: dict[str, Any] = {"bucket_bytes": 4 * 11 * 8}
SYNC: dict[str, Any] = {"topk_ratio": 0.0, "update_interval": 1, "overlap_step": False, "stream": False, **A_WEIGHT}
# Two weights of [11, 8] in fp32; the bias is resident.
ELEMENTS = 2 * 11 * 8
WEIGHT_BYTES = 4 * ELEMENTS
UPDATE_BYTES = 32 * ELEMENTS  # state read and written, one fp32 gradient, an fp32 result


def measure(config: ZenFlowConfig, steps: int, **rates: float) -> list[StepStats]:
    """Stats of every step."""
    model = seeded(Flat)
    values = {"link_d2h_gbps": FAST_GBPS, "link_h2d_gbps": FAST_GBPS, "host_gbps": FAST_GBPS, **rates}
    device = EmulatedAccelerator(
        Rig("stall", "", forward_ms=FORWARD_MS, backward_ms=BACKWARD_MS, device_gbps=None, scale=1.0, **values)
    )
    device.attach(model)
    optimizer = ZenFlowAdamW(model.parameters(), config=config, device=device)
    for step in range(steps):
        model(tokens_of(step)).backward()
        optimizer.step()
        optimizer.zero_grad()
    stats = optimizer.history(wait=True)
    optimizer.abandon()
    device.close()
    assert [s.step for s in stats] == list(range(1, steps + 1))
    return stats


def stall(stats: list[StepStats], cause: str) -> float:
    """Milliseconds over all these steps."""
    total = 0.0
    for one in stats:
        assert one.stall_ms is not None
        total += {str(key): value for key, value in one.stall_ms.items()}[cause]
    return total


def gbps(nbytes: int, milliseconds: float) -> float:
    """The rate at which so many bytes take so long."""
    return nbytes / milliseconds / 1e6


@pytest.mark.parametrize("pipeline", ["none", "bucket"])
def test_only_d2h_is_slow(pipeline: Any) -> None:
    stats = measure(ZenFlowConfig(pipeline=pipeline, **SYNC), 6, link_d2h_gbps=gbps(WEIGHT_BYTES, 8.0))
    assert stall(stats[1:], "d2h") == pytest.approx(5 * 8.0)
    assert stall(stats[1:], "h2d") == pytest.approx(0, abs=1e-4)
    assert stall(stats[1:], "host") == pytest.approx(0, abs=1e-4)


@pytest.mark.parametrize("pipeline", ["none", "bucket"])
def test_only_h2d_is_slow(pipeline: Any) -> None:
    stats = measure(ZenFlowConfig(pipeline=pipeline, **SYNC), 6, link_h2d_gbps=gbps(WEIGHT_BYTES, 8.0))
    assert stall(stats, "h2d") == pytest.approx(6 * 8.0)
    assert stall(stats, "d2h") == pytest.approx(0, abs=1e-4)
    assert stall(stats, "host") == pytest.approx(0, abs=1e-4)


@pytest.mark.parametrize("pipeline", ["none", "bucket"])
def test_only_the_host_is_slow(pipeline: Any) -> None:
    stats = measure(ZenFlowConfig(pipeline=pipeline, **SYNC), 6, host_gbps=gbps(UPDATE_BYTES, 10.0))
    assert stall(stats[1:], "host") == pytest.approx(5 * 10.0)
    assert stall(stats[1:], "d2h") == pytest.approx(0, abs=1e-4)
    assert stall(stats[1:], "h2d") == pytest.approx(0, abs=1e-4)
    assert sum(s.host_ms for s in stats[1:]) == pytest.approx(5 * 10.0)
    assert [s.host_bytes for s in stats] == [UPDATE_BYTES] * 6


def test_deepspeeds_order_is_the_sum_of_three() -> None:
    rates = {
        "link_d2h_gbps": gbps(WEIGHT_BYTES, 4.0),
        "link_h2d_gbps": gbps(WEIGHT_BYTES, 3.0),
        "host_gbps": gbps(UPDATE_BYTES, 6.0),
    }
    stats = measure(ZenFlowConfig(pipeline="none", **SYNC), 6, **rates)
    later = stats[1:]
    assert stall(later, "d2h") == pytest.approx(5 * 4.0)
    assert stall(later, "h2d") == pytest.approx(5 * 3.0)
    assert stall(later, "host") == pytest.approx(5 * 6.0)
    # The passes and stalls are all there is.
    step_ms = sum(s.step_ms or 0.0 for s in later)
    stalls = sum(stall(later, cause) for cause in ("d2h", "host", "h2d", "select"))
    assert step_ms == pytest.approx(5 * (FORWARD_MS + BACKWARD_MS) + stalls)


def test_the_pipeline_overlaps_what_deepspeeds_order_does_not() -> None:
    rates = {
        "link_d2h_gbps": gbps(WEIGHT_BYTES, 8.0),
        "link_h2d_gbps": gbps(WEIGHT_BYTES, 8.0),
        "host_gbps": gbps(UPDATE_BYTES, 8.0),
    }
    stats = measure(ZenFlowConfig(pipeline="bucket", **SYNC), 6, **rates)
    total = sum(stall(stats[1:], cause) for cause in ("d2h", "host", "h2d"))
    # Two equal buckets: D2H of both, then host and H2D of the second; in turn it would be 24 a step.
    assert total == pytest.approx(5 * 16.0)
    assert stall(stats[1:], "d2h") == pytest.approx(5 * 4.0)


OVERLAPPED = ZenFlowConfig(topk_ratio=0.25, update_interval=4, select_interval=4, **A_WEIGHT)


def test_an_overlapped_run_waits_for_what_its_window_cannot_hide() -> None:
    interval = 4
    host_bytes = (24 + 4 * interval + 4) * ELEMENTS
    config = ZenFlowConfig(topk_ratio=0.0, update_interval=interval, apply_lag=interval, **A_WEIGHT)
    stats = measure(config, 5 * interval, host_gbps=gbps(host_bytes, 36.0))
    steady = stats[2 * interval :]  # three windows; each is applied at latest at the next close
    # Of two buckets that take 18 ms each, the first is due after a step of 6 ms: 12 to wait. The second is due two
    # steps later, at 18 + 12 = 30, and comes at 36.
    assert stall(steady, "host") == pytest.approx(3 * 18.0, rel=1e-4)
    assert [s.host_elements for s in steady] == [ELEMENTS // 2, 0, ELEMENTS // 2, 0] * 3
    assert stall(steady, "h2d") + stall(steady, "d2h") == pytest.approx(0, abs=1e-3)


def test_a_selection_that_moves_columns_waits_for_them_alone() -> None:
    """Causes of a close: the state of what leaves the deferred tier, in D2H, host and H2D, is `select`."""
    stats = measure(OVERLAPPED, 8, link_h2d_gbps=gbps(WEIGHT_BYTES, 2.0))
    moving = [s for s in stats if s.churn]
    still = [s for s in stats[1:] if not s.churn]
    assert moving
    assert all(stall([s], "select") > 0.1 for s in moving)
    assert sum(stall([s], "select") for s in still) == pytest.approx(0, abs=0.01)
