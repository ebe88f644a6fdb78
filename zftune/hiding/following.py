"""Follows an optimizer that waits for every update: a line about what is left to win, or knobs that win it.

steps 1 to 5: slow, as first ones are; the copies of steps 4 to 6 are timed
steps 6 to 13: measured, each alike; their figures are there two steps later
step 15: the planner begins, in a process of its own, and the training goes on
"""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass
from typing import Any

import torch

from zenflow import ConfigError, HostMemoryError, ZenFlowConfig, ZenFlowError
from zenflow.errors import HostThreadsError, RankError
from zenflow.optimizer import ZenFlowOptimizer
from zenflow.timeline import TimelineRecorder
from zftune.agent import NOBODY, ONLINE
from zftune.errors import ZftuneError
from zftune.hiding.measured import Measured, measured, waits_for_all
from zftune.hiding.planned import Planned, forecast, late_defaults, plan
from zftune.hiding.words import NOTHING_TO_HIDE_BEHIND, named, to_win
from zftune.profile.units import ms
from zftune.store.types import Quality
from zftune.tuner.background import Background
from zftune.tuner.following import open_tuners
from zftune.tuner.ranks.exchange import several_ranks
from zftune.tuner.step_count import StepCount
from zftune.tuner.thinker import Thinker

_SLOW, _MEASURED, _RESOLVED_LATER = 5, 8, 2
FIRST_STEPS = _SLOW + _MEASURED + _RESOLVED_LATER
"""After so many steps there is something to plan by."""
_TIMED = 3  # steps whose copies are timed
_AGREE_EVERY = 8  # steps, since ranks wait for each other to agree
_LATE_KNOBS = ("topk_ratio", "update_interval", "apply_lag", "overlap_step", "select_interval")
_REFUSALS = (ConfigError, HostMemoryError, HostThreadsError, RankError, MemoryError, torch.OutOfMemoryError)
_logger = logging.getLogger("zftune")


@dataclass(frozen=True, slots=True)
class _Answer:
    """What the planner said, on all ranks alike."""

    plans: list[Planned]
    step_ms: float = 0.0
    why_not: str = ""
    """Where it said nothing."""


def follow(optimizer: ZenFlowOptimizer, quality: Quality, late: ZenFlowConfig | None = None) -> None:
    """Say once what "published" would win, or let it be won; on several ranks all call it.

    Args:
        optimizer: made for this quality, before its first step.
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
        elif not waits_for_all(optimizer.config) or _is_tuned(optimizer):
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
        clock, late, quality = optimizer.device.clock, self._late, self._quality

        def work() -> list[Planned]:
            thinker = Thinker(gives_way=not clock.simulated)
            try:
                plans: list[Planned] = (
                    thinker.ask(plan, found, "published" if quality == "exact" else quality)
                    if late is None
                    else thinker.ask(forecast, found, late)
                )
            finally:
                thinker.close()
            return plans

        return Background(work, "zftune-hiding", clock, takes_s=0.0)

    def _tell(self, optimizer: ZenFlowOptimizer, answer: _Answer) -> None:
        if answer.why_not or self._measured is None:
            _say(f"what `--quality published` would win is not known: {answer.why_not}")
        else:
            device = "device" if optimizer.device.torch_device.type == "cpu" else "GPU"
            _say(to_win(self._measured, answer.plans, device))

    # --- all ranks ---------------------------------------------------------------------------------------------------

    def _take(self, optimizer: ZenFlowOptimizer, answer: _Answer) -> None:
        """Set the first knobs that there is memory for."""
        own = optimizer.config
        refused = answer.why_not or "no late updates fit into memory"
        choices = answer.plans or ([Planned(late_defaults(self._quality, own), 0.0)] if answer.why_not else [])
        for one in choices:
            try:
                step = optimizer.set_knobs(**{name: getattr(one.config, name) for name in _LATE_KNOBS})
            except _REFUSALS as error:
                refused = str(error)
                continue
            if self._is_first:
                _say(f"{named(one.config)} after step {step}, {_origin(one, answer)}")
            return
        if self._is_first:
            _logger.warning("zftune: every update is still waited for: %s", refused)


def _origin(one: Planned, answer: _Answer) -> str:
    if answer.why_not:
        return f"the default of this quality, since nothing could be planned: {answer.why_not}"
    return f"by the planner: about {ms(one.step_ms)} a step instead of {ms(answer.step_ms)}"


def _is_tuned(optimizer: ZenFlowOptimizer) -> bool:
    return any(tuner.follows(optimizer) for tuner in open_tuners())


def _is_first() -> bool:
    distributed = torch.distributed
    return not (distributed.is_available() and distributed.is_initialized()) or distributed.get_rank() == 0


def _say(sentence: str) -> None:
    _logger.info("zftune: %s", sentence)
