"""The late knobs of a quality, and how fast a run would be under them."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from zenflow import ZenFlowConfig
from zenflow.config import AUTO_SELECT_INTERVAL, AUTO_SELECT_OVERLAP
from zftune.hiding.measured import Measured
from zftune.planner import Job, Machine, choose, predict
from zftune.planner.choosing import LEAST_HEADROOM_BYTES, budget_of
from zftune.planner.rates import MOMENTS
from zftune.planner.split import totals_of
from zftune.store.types import Quality
from zftune.tuner.forecast import machine_of
from zftune.tuner.space import PUBLISHED

_JOB = Job(seq=1)  # activations are in what was measured
_MOST = 3
"""Settings that are worth trying where memory is short."""
_SELECTING = 0.05
"""Share of a step that selecting other columns may cost, were all of them others; nobody knows how many will be."""
_LEAST_SELECT_INTERVAL = 16
_EXCHANGED = 0.5
"""Of them, in a prediction."""
_STATE_BYTES = 4 * (1 + MOMENTS)


@dataclass(frozen=True, slots=True)
class Planned:
    """A setting and the step time that is predicted for it."""

    config: ZenFlowConfig
    step_ms: float


def late_defaults(quality: Quality, own: ZenFlowConfig) -> ZenFlowConfig:
    """The published setting, for "loose" with windows of twice the length, where nothing can be planned.

    Args:
        quality: "published" or "loose".
        own: the knobs without it, of which the rest stay.
    """
    interval = PUBLISHED.update_interval * (2 if quality == "loose" else 1)
    return replace(
        own, topk_ratio=PUBLISHED.topk_ratio, update_interval=interval, apply_lag=None, overlap_step=True
    )  # fmt: skip


def plan(measured: Measured, quality: Quality) -> list[Planned]:
    """The planner's choices for a run, best first; none where nothing fits into memory.

    Args:
        measured: the run.
        quality: how late updates may be.
    """
    now = predict(measured.model, _machine(measured, 0), _JOB, measured.config, rates=measured.rates)
    machine = _machine(measured, now.memory.device_bytes)
    found = choose(
        measured.model,
        machine,
        _JOB,
        budget=budget_of(quality),
        memory_headroom=0.0,  # it is left out of what may be taken
        rates=measured.rates,
        base=measured.config,
    )
    return [_with_selections(measured, config, prediction.step_ms) for config, prediction in found[:_MOST]]


def forecast(measured: Measured, late: ZenFlowConfig) -> list[Planned]:
    """As `plan`, where the knobs are known.

    Args:
        measured: the run.
        late: the knobs.
    """
    found = predict(measured.model, _machine(measured, 0), _JOB, late, rates=measured.rates)
    if late.select_interval == "auto":
        often = AUTO_SELECT_INTERVAL / (1 - AUTO_SELECT_OVERLAP)
    else:
        often = late.select_interval / _EXCHANGED
    return [Planned(late, found.step_ms + _exchange_ms(measured, late) / often)]


def _with_selections(measured: Measured, config: ZenFlowConfig, step_ms: float) -> Planned:
    """Selecting so seldom that it hardly costs: early in a training, "auto" does it every eight steps."""
    whole = _exchange_ms(measured, config)
    interval, window = max(_LEAST_SELECT_INTERVAL, whole / (_SELECTING * step_ms)), config.longest_window
    config = replace(config, select_interval=window * math.ceil(interval / window), select_strategy="step")
    return Planned(config, step_ms + _EXCHANGED * whole / interval)


def _exchange_ms(measured: Measured, config: ZenFlowConfig) -> float:
    """What it costs to exchange all selected columns: their state crosses the link both ways, and the host, which
    reads and writes it, is as late with the next updates.
    """
    rates, nbytes = measured.rates, _STATE_BYTES * totals_of(measured.model, config).selected
    on_link = nbytes / rates.d2h_gbps + nbytes / rates.h2d_gbps
    return (on_link + 2 * 2 * nbytes / rates.host_gbps) / 1e6


def _machine(measured: Measured, needed_bytes: int) -> Machine:
    """With as much device memory as a setting needs by prediction, and what other knobs may take beyond."""
    return machine_of(
        "this run",
        "",
        measured.rates,
        host_memory_bytes=measured.host_bytes,
        device_memory_bytes=needed_bytes + measured.device_bytes + LEAST_HEADROOM_BYTES,
    )
