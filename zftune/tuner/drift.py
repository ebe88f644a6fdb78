"""Times change while a training runs: how that is noticed, and what it says of the machine's rates.

A pace is what one measurement showed of each resource. Two paces of the same setting, before and after a change, say by
how much each resource has changed; what the planner does not know of the machine is in both and cancels.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from zenflow import StepStats
from zftune.planner import Rates
from zftune.tuner.ratios import busy_ms
from zftune.tuner.scores import Sample, gain
from zftune.tuner.settings import Setting
from zftune.tuner.space import Forecaster

OTHER_TIMES = 0.10
"""Of the incumbent's time: where a comparison's measurement of it differs by so much, times have changed."""
_BUSY_LINK = 0.05
"""Of a step: where it waits so long for gradients on their way, the link was busy all the time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """What the steps of a measurement showed of the resources; None: nothing."""

    busy_ms: float | None = None
    """Of a step without its stall; what ranks wait for each other is in it."""
    host_gbps: float | None = None
    """Of the host's updates."""
    link_gbps: float | None = None
    """Of the gradients' way, known only where steps waited for it."""

    @classmethod
    def of(cls, steps: Sequence[StepStats]) -> Pace | None:
        """From the steps that count; None: they have no stream that would tell."""
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


class Planning(Protocol):
    """The planner, who is asked again where times have changed."""

    @property
    def forecast(self) -> Forecaster:
        """Its prediction for a setting, by what it knows now."""

    def learn(self, before: Pace | None, now: Pace) -> None:
        """Take in what a setting showed before a change, and what it shows now."""

    def planned(self) -> Sequence[Setting]:
        """Its own choices, best first; may take seconds."""


def changed(rates: Rates, before: Pace | None, now: Pace) -> Rates:
    """The rates of a machine, and the compute of a step, after a change.

    Args:
        rates: before it.
        before: what a setting showed then; None: nothing is known.
        now: what the same setting shows.
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


def differs(before: Sequence[Sample], sample: Sample, *, seed: int, least: float = OTHER_TIMES) -> bool:
    """Whether a measurement of the incumbent belongs to other times than those before it.

    Args:
        before: its measurements so far.
        sample: the new one.
        seed: of the bootstrap.
        least: share of the time.
    """
    if not before:
        return False
    found = gain(before, [sample], seed=seed)
    return abs(found.share) > max(least, 2 * found.error)


def _factor(now: float | None, before: float | None) -> float:
    return now / before if now and before else 1.0
