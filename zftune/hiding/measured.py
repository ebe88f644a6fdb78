"""What the first steps of a run that waits for every update show: all that a plan for late ones is made from."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import nn

from zenflow import Device, EmulatedAccelerator, StepStats, ZenFlowConfig
from zenflow.host.limits import available_host_bytes
from zenflow.optimizer import ZenFlowOptimizer
from zenflow.timeline import Lane, Timeline
from zftune.errors import ZftuneError
from zftune.planner import ModelFacts, Rates
from zftune.planner.choosing import HEADROOM
from zftune.planner.here import device_gbps
from zftune.planner.rates import device_work_ms
from zftune.planner.split import totals_of
from zftune.tuner.facts import Seen, device_limit
from zftune.tuner.forecast import UNLIMITED

_COPY_BYTES = 1 << 26
_RANKS_HERE = ("LOCAL_WORLD_SIZE", "LOCAL_SIZE")  # of torchrun, of DeepSpeed's launcher


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """A run, by value: the planner works in another process."""

    model: ModelFacts
    config: ZenFlowConfig
    step_ms: float
    busy_ms: float
    """Of it the device's own work, the runtime's kernels included."""
    rates: Rates
    """As they were, of a host that other ranks use too."""
    device_bytes: int
    """Device memory that other knobs may take beyond what these need."""
    host_bytes: int
    """Host memory that the optimizer has or may still take."""

    @property
    def share(self) -> float:
        """Of a step that the device waits for host and link."""
        return max(0.0, 1 - self.busy_ms / self.step_ms)


def waits_for_all(config: ZenFlowConfig) -> bool:
    """Whether a step waits for every update that the host makes for it, and there are some."""
    return config.update_interval == 1 and not config.overlap_step and config.offload_ratio > 0


def measured(optimizer: ZenFlowOptimizer, steps: Sequence[StepStats], timeline: Timeline | None) -> Measured:
    """Read it; on a GPU the device is waited for, once.

    Args:
        optimizer: that trains.
        steps: of it, alike.
        timeline: of some of its steps.

    Raises:
        ZftuneError: they show too little to plan by.
    """
    parameters = [one for group in optimizer.param_groups for one in group["params"]]
    module = optimizer.module or nn.ParameterList(parameters)
    model = ModelFacts.from_module(type(module).__name__, module)
    seen = Seen(optimizer.config, tuple(steps), has_loss=False)
    if timeline is None or not seen.compute_ms > 0:
        raise ZftuneError("no step shows what it waits for")
    config = optimizer.config
    rates = Rates(
        forward_ms=0.0,
        backward_ms=0.0,
        d2h_gbps=_link_gbps(timeline, "d2h"),
        h2d_gbps=_link_gbps(timeline, "h2d"),
        host_gbps=1.0,
        device_gbps=_device_gbps(optimizer.device),
        element_bytes=model.element_bytes,
        link_in_host=False,
    )
    kernels_ms = device_work_ms(rates, totals_of(model, config), config.longest_window, stream=config.stream)
    compute_ms = max(0.0, seen.compute_ms - kernels_ms)
    return Measured(
        model=model,
        config=config,
        step_ms=seen.step_ms,
        busy_ms=seen.compute_ms,
        rates=replace(
            rates,
            forward_ms=compute_ms / 3,  # backward does twice the arithmetic
            backward_ms=compute_ms * 2 / 3,
            host_gbps=_host_gbps(steps, rates),
        ),
        device_bytes=_device_bytes(optimizer),
        host_bytes=_host_bytes(optimizer),
    )


def _device_gbps(device: Device) -> float | None:
    """None: the runtime's kernels count as compute that no knob changes."""
    if isinstance(device, EmulatedAccelerator):
        return device.rig.device_gbps
    try:
        with torch.cuda.device(device.torch_device):
            return device_gbps(_COPY_BYTES)
    except RuntimeError:  # there is no room for the copies
        return None


def _device_bytes(optimizer: ZenFlowOptimizer) -> int:
    limit, peak = device_limit(optimizer), optimizer.device.peak_bytes()
    return UNLIMITED if limit is None or peak is None else max(0, limit - peak)


def _host_bytes(optimizer: ZenFlowOptimizer) -> int:
    own, free = optimizer.host_bytes(), available_host_bytes()
    if free is None:
        return UNLIMITED
    ranks = next((int(os.environ[name]) for name in _RANKS_HERE if os.environ.get(name, "").isdigit()), 1)
    return own["state"] + own["log"] + own["staging"] + round((1 - HEADROOM) * free / max(1, ranks))


def _link_gbps(timeline: Timeline, lane: Lane) -> float:
    """Of the copies that began while it was recorded."""
    spans = [span for span in timeline.lanes.get(lane, ()) if span.begin_ms > 0 and span.nbytes]
    busy_ms = sum(span.end_ms - span.begin_ms for span in spans)
    if not busy_ms > 0:
        raise ZftuneError(f"no copy ({lane}) was seen")
    return sum(span.nbytes or 0 for span in spans) / busy_ms / 1e6


def _host_gbps(steps: Sequence[StepStats], at_one: Rates) -> float:
    """With which the planner finds the time that updates took, whatever limited them and whatever the rule is.

    Args:
        steps: each of whose updates is of one gradient.
        at_one: rates with 1 GB/s.
    """
    elements, taken_ms = sum(one.host_elements for one in steps), sum(one.host_ms for one in steps)
    if not elements or not taken_ms > 0:
        raise ZftuneError("the host updated nothing")
    return at_one.host_ms(elements, 1) / taken_ms
