"""What a training's steps show of the machine: the work there is for device and host, and the pace of both."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace

from torch import nn

from zenflow import StepStats
from zftune.planner.rates import Rates
from zftune.store.types import Ratios

_CHANGED = 0.25
"""Of a logarithm: what is counted of a resource scatters by less."""
_BUSY_LINK = 0.05
"""Of a step: where it waits so long for gradients on their way, the link was busy all the time."""


@dataclass(frozen=True, slots=True)
class Load:
    """What steps showed of the work that a training has for the device and the host."""

    elements: int
    busy_ms: float | None
    """Of a step without its stall; None where there was none that tells."""
    host_bytes: int
    host_ms: float

    @classmethod
    def of(cls, steps: Sequence[StepStats], module: nn.Module) -> Load:
        busy = [busy_ms(one) for one in steps if one.step_ms and one.stall_ms is not None]
        return cls(
            elements=sum(one.numel() for one in module.parameters() if one.requires_grad and one.dim() >= 2),
            busy_ms=statistics.median(busy) if busy else None,
            host_bytes=sum(one.host_bytes for one in steps),
            host_ms=sum(one.host_ms for one in steps),
        )


def busy_ms(step: StepStats) -> float:
    """Of a step without what it waited because of offloading; what ranks wait for each other is in it."""
    offloading = sum(ms for cause, ms in (step.stall_ms or {}).items() if cause != "comm")
    return (step.step_ms or 0.0) - offloading


def ratios_of(load: Load, rates: Rates) -> Ratios | None:
    """Ratios of a training: as its steps show them, and where they do not, as its rates say. None: there are none.

    They are those of the whole model, of ranks that share it of each one's rows, whatever share of it the steps had on
    the host.
    """
    compute_ms = rates.compute_ms if load.busy_ms is None else load.busy_ms
    elements = load.elements / rates.ranks
    host_ms = _measured_host(load, rates).host_ms(elements, 1)
    if not compute_ms > 0:
        return None
    found = (host_ms / compute_ms, rates.down_ms(elements) / compute_ms)
    return Ratios(*found) if all(math.isfinite(one) and one > 0 for one in found) else None


def _measured_host(load: Load, rates: Rates) -> Rates:
    """With the bandwidth that the host's updates had: whatever limited them is in it."""
    if not load.host_bytes or not load.host_ms > 0:
        return rates
    return replace(rates, host_gbps=load.host_bytes / load.host_ms / 1e6, update_gelements_s=None)


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
        found: dict[str, float | None] = {}
        for name in ("busy_ms", "host_gbps", "link_gbps"):
            values = [getattr(one, name) for one in paces]
            found[name] = None if None in values else statistics.median(values)
        return cls(**found)


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
    compute = _factor(now.busy_ms, before.busy_ms)
    host = _factor(now.host_gbps, before.host_gbps)
    arithmetic = rates.update_gelements_s
    link = 1.0
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


def _factor(now: float | None, before: float | None) -> float:
    return now / before if now and before else 1.0
