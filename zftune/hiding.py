"""Follows an optimizer that waits for every update: a line about what is left to win, or knobs that win it.

steps 1 to 5: slow, as first ones are; the copies of steps 4 to 6 are timed
steps 6 to 13: measured, each alike; their figures are there two steps later
step 15: the planner begins, in a process of its own, and the training goes on
"""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from zenflow import Device, StepStats, ZenFlowConfig, ZenFlowError
from zenflow.config import AUTO_SELECT_INTERVAL, AUTO_SELECT_OVERLAP
from zenflow.history import Lane, Timeline, TimelineRecorder
from zenflow.host.limits import available_host_bytes
from zenflow.optimizer import ZenFlowOptimizer
from zenflow.ranks import several_ranks
from zftune.background import Background
from zftune.emulation import EmulatedAccelerator
from zftune.errors import ZftuneError
from zftune.planner.choosing import HEADROOM, LEAST_HEADROOM_BYTES, PUBLISHED, bound_of, choose
from zftune.planner.closed_form import predict
from zftune.planner.machine import UNLIMITED, device_gbps, machine_of
from zftune.planner.model import Job, Machine, ModelFacts
from zftune.planner.rates import MOMENTS, Rates, device_work_ms
from zftune.planner.split import totals_of
from zftune.quality import at_full_rate, movement_percent
from zftune.store.types import STALENESS, Quality
from zftune.text import ms, number, percent, times
from zftune.tuner.executor import REFUSALS
from zftune.tuner.setup import WarmupStats, device_limit
from zftune.tuner.tuner import StepCount, open_tuners
from zftune.variables import NOBODY, ONLINE

SMALL_GAIN = 1.05
NOTHING_TO_HIDE_BEHIND = (
    "on a plain CPU there is nothing to hide the updates behind: host and device are the same cores, so what "
    "`--quality published` would win cannot be estimated; a search (`--online`) or a comparison measures it"
)


def to_win(measured: Measured, plans: list[Planned], device: str) -> str:
    """What `--quality published` would win."""
    waits = f"the {device} waits {percent(measured.share)} of a step for the host"
    moved = (
        "" if measured.movement_percent is None else f"; weights move {number(measured.movement_percent)}% in a step"
    )
    if not plans:
        return f"{waits}, and no late updates fit into memory"
    best = plans[0]
    gain = measured.step_ms / best.step_ms
    if gain < SMALL_GAIN:
        return f"{waits}: `--quality published` would win less than {percent(SMALL_GAIN - 1)}{moved}"
    return (
        f"{waits}; `--quality published` hides it: about {times(gain)} the speed, {ms(best.step_ms)} a step instead of "
        f"{ms(measured.step_ms)} ({named(best.config)}){moved}"
    )


def named(config: ZenFlowConfig) -> str:
    """The knobs that decide what is late."""
    window = f"topk_ratio {config.topk_ratio:g}, update_interval {config.update_interval}"
    lag = f", apply_lag {config.lag}" if config.overlap_step else ", overlap_step off"
    return f"{window}{lag}, select_interval {config.select_interval}"


_JOB = Job(seq=1)  # activations are in what was measured
_MOST = 3
_SELECTING = 0.05
"""Share of a step that selecting other columns may cost, were all of them others; nobody knows how many will be."""
_LEAST_SELECT_INTERVAL = 16
_EXCHANGED = 0.5
_STATE_BYTES = 4 * (1 + MOMENTS)


@dataclass(frozen=True, slots=True)
class Planned:
    """A setting and the step time that is predicted for it."""

    config: ZenFlowConfig
    step_ms: float


def late_defaults(quality: Quality, own: ZenFlowConfig) -> ZenFlowConfig:
    """The published setting, for "loose" with windows of twice the length, where nothing can be planned."""
    interval = PUBLISHED.longest_window * STALENESS[quality]
    return replace(
        own, topk_ratio=PUBLISHED.topk_ratio, update_interval=interval, apply_lag=None, overlap_step=True
    )  # fmt: skip


def plan(measured: Measured, quality: Quality, late: ZenFlowConfig | None = None) -> list[Planned]:
    """The planner's choices for a run, best first, or the known knobs; empty if nothing fits into memory."""
    now = predict(measured.model, _machine(measured, 0), _JOB, late or measured.config, rates=measured.rates)
    if late is not None:
        auto = AUTO_SELECT_INTERVAL / (1 - AUTO_SELECT_OVERLAP)
        often = auto if late.select_interval == "auto" else late.select_interval / _EXCHANGED
        return [Planned(late, now.step_ms + _exchange_ms(measured, late) / often)]
    budget, coverage = bound_of(quality, measured.movement_percent, guesses=measured.config.guesses)
    found = choose(
        measured.model,
        _machine(measured, now.memory.device_bytes),
        _JOB,
        budget=budget,
        coverage=coverage,
        memory_headroom=0.0,  # it is left out of what may be taken
        rates=measured.rates,
        base=measured.config,
    )
    return [_with_selections(measured, config, prediction.step_ms) for config, prediction in found[:_MOST]]


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
    return machine_of(
        "this run",
        "",
        measured.rates,
        host_memory_bytes=measured.host_bytes,
        device_memory_bytes=needed_bytes + measured.device_bytes + LEAST_HEADROOM_BYTES,
    )


_COPY_BYTES = 1 << 26
_RANKS_HERE = ("LOCAL_WORLD_SIZE", "LOCAL_SIZE")  # of torchrun, of DeepSpeed's launcher


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """A run, by value."""

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
    movement_percent: float | None = None
    """How far a step moves the deferred weights, at the schedule's highest learning rate; None: not known."""

    @property
    def share(self) -> float:
        """Of a step that the device waits for host and link."""
        return max(0.0, 1 - self.busy_ms / self.step_ms)


def waits_for_all(config: ZenFlowConfig) -> bool:
    """Whether a step waits for every update that the host makes for it, and there are some."""
    return config.update_interval == 1 and not config.overlap_step and config.offload_ratio > 0


def measured(optimizer: ZenFlowOptimizer, steps: Sequence[StepStats], timeline: Timeline | None) -> Measured:
    """Read it; on a GPU the device is waited for, once.

    Raises:
        ZftuneError: they show too little to plan by.
    """
    parameters = [one for group in optimizer.param_groups for one in group["params"]]
    module = optimizer.module or nn.ParameterList(parameters)
    model = ModelFacts.from_module(type(module).__name__, module)
    seen = WarmupStats(optimizer.config, tuple(steps), has_loss=False)
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
        movement_percent=at_full_rate(movement_percent(steps), optimizer.param_groups),
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
    return own["state"] + own["log"] + own["staging"] + own["spare"] + round((1 - HEADROOM) * free / max(1, ranks))


def _link_gbps(timeline: Timeline, lane: Lane) -> float:
    spans = [span for span in timeline.lanes.get(lane, ()) if span.begin_ms > 0 and span.nbytes]
    busy_ms = sum(span.end_ms - span.begin_ms for span in spans)
    if not busy_ms > 0:
        raise ZftuneError(f"no copy ({lane}) was seen")
    return sum(span.nbytes or 0 for span in spans) / busy_ms / 1e6


def _host_gbps(steps: Sequence[StepStats], at_one: Rates) -> float:
    """With which the planner finds the time that updates took, whatever limited them and whatever the rule is."""
    elements, taken_ms = sum(one.host_elements for one in steps), sum(one.host_ms for one in steps)
    if not elements or not taken_ms > 0:
        raise ZftuneError("the host updated nothing")
    return at_one.host_ms(elements, 1) / taken_ms


_SLOW, _MEASURED, _RESOLVED_LATER = 5, 8, 2
FIRST_STEPS = _SLOW + _MEASURED + _RESOLVED_LATER
_TIMED = 3  # steps whose copies are timed
_AGREE_EVERY = 8  # steps, since ranks wait for each other to agree
_LATE_KNOBS = ("topk_ratio", "update_interval", "apply_lag", "overlap_step", "select_interval")
_logger = logging.getLogger("zftune")


@dataclass(frozen=True, slots=True)
class _Answer:
    plans: list[Planned]
    step_ms: float = 0.0
    why_not: str = ""


def follow(optimizer: ZenFlowOptimizer, quality: Quality, late: ZenFlowConfig | None = None) -> None:
    """Say once what "published" would win, or let it be won; on several ranks all call it.

    Args:
        quality: "exact": say it; else find the knobs.
        late: knobs that a run with "published" has; None: the planner finds them.
    """
    if os.environ.get(ONLINE) == NOBODY or not waits_for_all(optimizer.config):
        return
    if optimizer.device.has_streams:
        _Following(optimizer, quality, late)
    elif quality == "exact" and _is_first():
        _say(NOTHING_TO_HIDE_BEHIND)


class _Following:
    def __init__(self, optimizer: ZenFlowOptimizer, quality: Quality, late: ZenFlowConfig | None) -> None:
        self._quality, self._late = quality, late
        self._is_first, self._several = _is_first(), several_ranks()
        self._count = StepCount(optimizer)
        self._from = 0
        self._recorder: TimelineRecorder | None = None
        self._measured: Measured | None = None
        self._thinking: Background[list[Planned]] | None = None
        self._answer: _Answer | None = None
        self._over = quality == "exact" and not self._is_first
        self._pid = os.getpid()
        if not self._over:
            optimizer.register_step_post_hook(self._after_step)  # not removed: a hook must not be from within

    def _after_step(self, optimizer: Any, *_: Any) -> None:
        if self._over or os.getpid() != self._pid:
            return
        if self._count.after_step():  # a saved state was loaded
            self._from = self._count.followed - 1
            self._recorder = self._thinking = self._answer = None
        taken = self._count.followed - self._from
        if taken < FIRST_STEPS:
            if taken == _SLOW - _TIMED and self._recorder is None and self._is_first:
                self._recorder = optimizer.record_timeline(_TIMED)
        elif not waits_for_all(optimizer.config) or any(tuner.follows(optimizer) for tuner in open_tuners()):
            self._over = True  # somebody else has set knobs, or a saved state brought them
        else:
            self._go_on(optimizer, taken - FIRST_STEPS)

    def _go_on(self, optimizer: ZenFlowOptimizer, since: int) -> None:
        if self._is_first and self._answer is None:
            self._answer = self._ask(optimizer)
        answer = self._answer
        if self._several and self._quality != "exact":
            if since % _AGREE_EVERY:
                return
            told = [answer]
            torch.distributed.broadcast_object_list(told, src=0)
            (answer,) = told
        if answer is None:
            return
        self._over = True
        if self._quality == "exact":
            self._tell(optimizer, answer)
        else:
            self._take(optimizer, answer)

    # --- the first rank ----------------------------------------------------------------------------------------------

    def _ask(self, optimizer: ZenFlowOptimizer) -> _Answer | None:
        """None: there is no answer yet. What fails here must not, or other ranks would wait for this one."""
        try:
            if self._thinking is None:
                self._thinking = self._begin(optimizer)
            if not self._thinking.done:
                return None
            assert self._measured is not None
            return _Answer(self._thinking.result, self._measured.step_ms)
        except ZenFlowError:  # the training's own
            raise
        except ZftuneError as error:
            return _Answer([], why_not=str(error))
        except Exception as error:
            _logger.exception("What late updates win could not be found out; the training goes on.")
            return _Answer([], why_not=type(error).__name__)

    def _begin(self, optimizer: ZenFlowOptimizer) -> Background[list[Planned]]:
        recorder, self._recorder = self._recorder, None
        timeline = None if recorder is None else recorder.timeline()
        self._measured = found = measured(optimizer, optimizer.history()[-_MEASURED:], timeline)
        clock = optimizer.device.clock
        quality: Quality = "published" if self._quality == "exact" else self._quality

        return Background(lambda: plan(found, quality, self._late), "zftune-hiding", clock, takes_s=0.0)

    def _tell(self, optimizer: ZenFlowOptimizer, answer: _Answer) -> None:
        if answer.why_not or self._measured is None:
            _say(f"what `--quality published` would win is not known: {answer.why_not}")
        else:
            device = "device" if optimizer.device.torch_device.type == "cpu" else "GPU"
            _say(to_win(self._measured, answer.plans, device))

    # --- all ranks ---------------------------------------------------------------------------------------------------

    def _take(self, optimizer: ZenFlowOptimizer, answer: _Answer) -> None:
        refused = answer.why_not or "no late updates fit into memory"
        choices, origin = answer.plans, ""
        if answer.why_not:
            choices = [Planned(late_defaults(self._quality, optimizer.config), 0.0)]
            origin = f"the default of this quality, since nothing could be planned: {answer.why_not}"
        for one in choices:
            try:
                step = optimizer.set_knobs(**{name: getattr(one.config, name) for name in _LATE_KNOBS})
            except REFUSALS as error:
                refused = str(error)
                continue
            if self._is_first:
                if not answer.why_not:
                    origin = f"by the planner: about {ms(one.step_ms)} a step instead of {ms(answer.step_ms)}"
                _say(f"{named(one.config)} after step {step}, {origin}")
            return
        if self._is_first:
            _logger.warning("zftune: every update is still waited for: %s", refused)


def _is_first() -> bool:
    distributed = torch.distributed
    return not (distributed.is_available() and distributed.is_initialized()) or distributed.get_rank() == 0


def _say(sentence: str) -> None:
    _logger.info("zftune: %s", sentence)
