"""The measured ratios that alike pairs of model and machine have in common, and presets are looked up by."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import replace

from torch import nn

from zenflow import StepStats
from zftune.planner import Rates
from zftune.store import Ratios


def measured_ratios(steps: Sequence[StepStats], module: nn.Module, rates: Rates) -> Ratios | None:
    """Ratios of a training: as its steps show them, and where they do not, as its rates say. None: there are none.

    They are those of the whole model, whatever share of it the steps had on the host.

    Args:
        steps: of the warm-up.
        module: that trains.
        rates: of the planner; the link's are measured before the training.
    """
    elements = sum(one.numel() for one in module.parameters() if one.requires_grad and one.dim() >= 2)
    busy = [one.step_ms - sum(one.stall_ms.values()) for one in steps if one.step_ms and one.stall_ms is not None]
    compute_ms = statistics.median(busy) if busy else rates.compute_ms
    host_ms = _measured_host(steps, rates).host_ms(elements, 1)
    if not compute_ms > 0:
        return None
    found = (host_ms / compute_ms, rates.down_ms(elements) / compute_ms)
    return Ratios(*found) if all(math.isfinite(one) and one > 0 for one in found) else None


def _measured_host(steps: Sequence[StepStats], rates: Rates) -> Rates:
    """With the bandwidth that the host's updates had: whatever limited them is in it."""
    nbytes, ms = sum(one.host_bytes for one in steps), sum(one.host_ms for one in steps)
    return replace(rates, host_gbps=nbytes / ms / 1e6, update_gelements_s=None) if nbytes and ms > 0 else rates
