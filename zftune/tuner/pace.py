"""What a training's steps show of the machine: the work there is for device and host, and the pace of both."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace

from zenflow import StepStats
from zftune.planner.model import ModelFacts
from zftune.planner.rates import Rates
from zftune.store.types import Ratios

_CHANGED = 0.25
"""Of a logarithm: what is counted of a resource scatters by less."""
_BUSY_LINK = 0.05
"""Of a step: where it waits so long for gradients on their way, the link was busy all the time."""


def busy_ms(step: StepStats) -> float:
    """Of a step without what it waited because of offloading; what ranks wait for each other is in it."""
    offloading = sum(ms for cause, ms in (step.stall_ms or {}).items() if cause != "comm")
    return (step.step_ms or 0.0) - offloading


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """What the steps of a measurement showed of the resources; None: nothing."""

    busy_ms: float | None = None
    """Of a step without its stall; what ranks wait for each other is in it."""
    host_gbps: float | None = None
    link_gbps: float | None = None
    """Of the gradients' way, known only where steps waited for it."""

    @classmethod
    def of(cls, steps: Sequence[StepStats]) -> Pace | None:
        known = [(one, one.step_ms, one.stall_ms) for one in steps if one.step_ms and one.stall_ms is not None]
        if not known:
            return None
        total_ms = math.fsum(ms for _, ms, _ in known)
        waited_ms = math.fsum(stall.get("d2h", 0.0) for _, _, stall in known)
        sent = sum(one.d2h_bytes for one, _, _ in known)
        host_ms, host_bytes = math.fsum(one.host_ms for one, _, _ in known), sum(one.host_bytes for one, _, _ in known)
        return cls(
            busy_ms=math.fsum(busy_ms(one) for one, _, _ in known) / len(known),
            host_gbps=host_bytes / host_ms / 1e6 if host_bytes and host_ms > 0 else None,
            link_gbps=sent / total_ms / 1e6 if sent and waited_ms > _BUSY_LINK * total_ms else None,
        )

    @classmethod
    def median(cls, paces: Sequence[Pace]) -> Pace:
        """Each figure's median of several measurements; None where one of them does not know it."""
        columns = {name: [getattr(one, name) for one in paces] for name in ("busy_ms", "host_gbps", "link_gbps")}
        return cls(**{name: None if None in them else statistics.median(them) for name, them in columns.items()})


def ratios_of(model: ModelFacts, pace: Pace | None, rates: Rates) -> Ratios | None:
    """Ratios of a training of the whole model, of ranks that share it of each one's rows: by its pace, and where that
    is not known, by its rates. None: there are none.
    """
    pace = pace or Pace()
    compute_ms = rates.compute_ms if pace.busy_ms is None else pace.busy_ms
    elements = sum(math.prod(shape) for shape in model.weights if len(shape) >= 2) / rates.ranks
    if pace.host_gbps is not None:  # whatever limited the host's updates is in it
        rates = replace(rates, host_gbps=pace.host_gbps, update_gelements_s=None)
    if not compute_ms > 0:
        return None
    found = (rates.host_ms(elements, 1) / compute_ms, rates.down_ms(elements) / compute_ms)
    return Ratios(*found) if all(math.isfinite(one) and one > 0 for one in found) else None


def differs(before: Pace, now: Pace) -> str | None:
    """Which resource has changed by more than noise does, in words with its figures; None: none has."""
    for name, what in (
        ("link_gbps", "the link's {:.3g} GB/s to {:.3g}"),
        ("host_gbps", "the host updates' {:.3g} GB/s to {:.3g}"),
        ("busy_ms", "the device's {:.3g} ms a step to {:.3g}"),
    ):
        old, new = getattr(before, name), getattr(now, name)
        if old and new and abs(math.log(new / old)) > _CHANGED:
            return what.format(old, new)
    return None


def changed(rates: Rates, before: Pace | None, now: Pace) -> Rates:
    """The rates of a machine, and the compute of a step, after a change that moved a setting's pace from `before` to
    `now`.
    """
    if before is None:
        return rates
    compute = now.busy_ms / before.busy_ms if now.busy_ms and before.busy_ms else 1.0
    host = now.host_gbps / before.host_gbps if now.host_gbps and before.host_gbps else 1.0
    arithmetic, link = rates.update_gelements_s, 1.0
    if now.link_gbps is not None:  # both directions change together, as a bus does that is shifted down
        link = now.link_gbps / (before.link_gbps or rates.d2h_gbps)
    return replace(
        rates,
        forward_ms=rates.forward_ms * compute,
        backward_ms=rates.backward_ms * compute,
        host_gbps=rates.host_gbps * host,
        update_gelements_s=None if arithmetic is None else arithmetic * host,
        d2h_gbps=rates.d2h_gbps * link,
        h2d_gbps=rates.h2d_gbps * link,
    )
