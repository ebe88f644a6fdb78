"""The measured ratios that alike pairs of model and machine have in common, and presets are looked up by."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace

from torch import nn

from zenflow import StepStats
from zftune.planner import Rates
from zftune.store import Ratios


@dataclass(frozen=True, slots=True)
class Load:
    """What steps showed of the work that a training has for the device and the host."""

    elements: int
    """Of the weights that could be offloaded."""
    busy_ms: float | None
    """Of a step without its stall; None where there was none that tells."""
    host_bytes: int
    """Memory traffic of all host updates."""
    host_ms: float
    """Their time."""

    @classmethod
    def of(cls, steps: Sequence[StepStats], module: nn.Module) -> Load:
        """From a warm-up.

        Args:
            steps: of it.
            module: that trains.
        """
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


def measured_ratios(steps: Sequence[StepStats], module: nn.Module, rates: Rates) -> Ratios | None:
    """Ratios of a training: as its steps show them, and where they do not, as its rates say. None: there are none.

    They are those of the whole model, of ranks that share it of each one's rows, whatever share of it the steps had on
    the host.

    Args:
        steps: of the warm-up.
        module: that trains.
        rates: of the planner; the link's are measured before the training.
    """
    return ratios_of(Load.of(steps, module), rates)


def ratios_of(load: Load, rates: Rates) -> Ratios | None:
    """As `measured_ratios`, from what was read of the steps."""
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
