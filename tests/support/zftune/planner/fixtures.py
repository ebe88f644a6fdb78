"""Toys whose numbers can be worked out by hand: times in whole milliseconds."""

from __future__ import annotations

from typing import Any

from zftune.planner.model import Machine
from zftune.planner.rates import Rates
from zftune.planner.split import Piece, Split

MEGA = 1_000_000


def toy_rates(*, d2h: float, h2d: float, host: float, forward: float = 10.0, backward: float = 20.0) -> Rates:
    """Of a million elements and windows of one step: what each takes, in ms."""
    return Rates(
        forward_ms=forward,
        backward_ms=backward,
        d2h_gbps=2 / d2h,
        h2d_gbps=2 / h2d,
        host_gbps=28 / host,
        link_in_host=False,
    )


def toy_split(*elements: int, layers: int | None = None, due: int = 1) -> Split:
    """A piece for each layer, all deferred; a bucket's entry takes 2 bytes an element."""
    count = layers or len(elements)
    return Split(
        pieces=tuple(Piece(stage, size, due, 2 * size, scored=size) for stage, size in enumerate(elements)),
        layers=count,
        resident=0,
        selected=0,
        deferred=sum(elements),
        selecting=0,
        scored=sum(elements),
        kept=0,
        buckets=len(elements),
        largest_log_bytes=2 * max(elements),
        largest_bucket=max(elements),
    )


def toy_machine(**figures: Any) -> Machine:
    known: dict[str, Any] = {
        "name": "toy",
        "source": {},
        "gpu": "toy",
        "gpus": 4,
        "device_memory_bytes": 24 << 30,
        "device_gbps": 1000.0,
        "compute_tflops": 100.0,
        "compute_share": 0.5,
        "link_d2h_gbps": 25.0,
        "link_h2d_gbps": 25.0,
        "host_gbps": 100.0,
        "host_update_gelements_s": 50.0,
        "cores": 32,
        "host_memory_bytes": 256 << 30,
        "comm_gbps": 20.0,
    }
    return Machine(**(known | figures))
