"""A training's figures under flat names, for a tracker: `zftune.stats()`.

tracker.log({"loss": loss.item(), **zftune.stats()})
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from statistics import fmean
from typing import Any

from zenflow import StepStats
from zenflow.living import all_training
from zenflow.optimizer import ZenFlowOptimizer
from zftune.errors import BadInputError
from zftune.quality import movement_percent
from zftune.tuner.tuner import open_tuners

_PREFIX = "zenflow_"
_KNOBS = ("topk_ratio", "update_interval", "select_interval", "offload_ratio", "overlap_step")


def stats(optimizer: Any = None) -> dict[str, float]:
    """What a tracker is told: knobs, what a step waited for, coverage and the tuner's gain. It never waits.

    Knobs are those that hold now. Of the steps since the last call for this optimizer (the newest two are not known
    yet) it is the mean, of this rank: `zenflow_step_ms`, `zenflow_stall_ms` and its causes (`zenflow_stall_host_ms` and
    so on), `zenflow_hidden_ms`, `zenflow_coverage` (share of the gradient energy in the selected columns),
    `zenflow_staleness_steps`, `zenflow_movement_percent` (how far a step moves the deferred weights, in percent of
    their norm). `zenflow_gain` is the share of the step time that the tuner's knobs save, as measured since
    step times changed last. What is not known has no entry, such as a stall on a plain CPU.

    Args:
        optimizer: of zenflow, or what Accelerate or DeepSpeed made of one; None: the one that this process trains with.

    Returns:
        Numbers by name; none where no optimizer of zenflow trains.

    Raises:
        BadInputError: the optimizer is not of zenflow, or none is given and several train.
    """
    found = _only() if optimizer is None else innermost(optimizer)
    if found is None:
        return {}
    if not isinstance(found, ZenFlowOptimizer):
        name = f"{type(found).__module__}.{type(found).__qualname__}"
        raise BadInputError(f"optimizer is a {name}; it must be one of zenflow, such as zenflow.ZenFlowAdamW")
    return _read.setdefault(found, Figures(found)).take()


class Figures:
    """What `stats` returns, for one reader: each reader sees every step once."""

    def __init__(self, optimizer: ZenFlowOptimizer) -> None:
        self._optimizer = weakref.ref(optimizer)
        self._seen = 0
        self._gain: float | None = None

    def skip(self) -> None:
        """Tell nothing of the steps so far."""
        optimizer = self._optimizer()
        self._seen = 0 if optimizer is None else optimizer.steps

    def take(self) -> dict[str, float]:
        """The figures, of the steps since the last call; none where the optimizer is gone."""
        optimizer = self._optimizer()
        if optimizer is None:
            return {}
        if optimizer.steps < self._seen:  # an earlier state was loaded
            self._seen = 0
        history = optimizer.history(after=self._seen)
        if history:
            self._seen = history[-1].step
        told = {**_knobs(optimizer), **dict(_means(history))}
        self.look()
        if self._gain is not None:
            told["gain"] = self._gain
        return {f"{_PREFIX}{name}": value for name, value in told.items()}

    def look(self) -> None:
        """See what a tuner has won before it is closed: its knobs stay."""
        optimizer = self._optimizer()
        for tuner in open_tuners():
            if optimizer is not None and tuner.follows(optimizer):
                self._gain = tuner.gain


_read: weakref.WeakKeyDictionary[ZenFlowOptimizer, Figures] = weakref.WeakKeyDictionary()


def innermost(optimizer: Any) -> Any:
    """What Accelerate or DeepSpeed has wrapped: an optimizer of zenflow, or what has no other in it."""
    while not isinstance(optimizer, ZenFlowOptimizer) and hasattr(optimizer, "optimizer"):
        optimizer = optimizer.optimizer
    return optimizer


def _only() -> ZenFlowOptimizer | None:
    """The one that trains; where several do, the one that is tuned."""
    training = [one for one in all_training() if one.steps]
    tuned = [one for one in training if any(tuner.follows(one) for tuner in open_tuners())]
    found = tuned or training
    if len(found) > 1:
        raise BadInputError(f"{len(found)} optimizers of zenflow train in this process: call stats(optimizer)")
    return found[0] if found else None


def _knobs(optimizer: ZenFlowOptimizer) -> dict[str, float]:
    """Those that are numbers now."""
    config = optimizer.config
    knobs = {name: getattr(config, name) for name in _KNOBS} | {"apply_lag": config.lag}
    knobs["host_threads"] = optimizer.host_engine[1]
    return {name: int(value) if isinstance(value, bool) else value for name, value in knobs.items() if value != "auto"}


def _means(history: list[StepStats]) -> Iterator[tuple[str, float]]:
    stalls = [one.stall_ms for one in history if one.stall_ms is not None]
    if stalls:
        yield "stall_ms", fmean(sum(stall.values()) for stall in stalls)
        for cause in dict.fromkeys(cause for stall in stalls for cause in stall):
            yield f"stall_{cause}_ms", fmean(stall.get(cause, 0.0) for stall in stalls)
    for name, values in (
        ("step_ms", [one.step_ms for one in history]),
        ("hidden_ms", [one.hidden_ms for one in history]),
        ("coverage", [one.coverage for one in history]),
        ("staleness_steps", [one.staleness_mean_steps for one in history]),
        ("movement_percent", [movement_percent(history)]),
    ):
        known = [value for value in values if value is not None]
        if known:
            yield name, fmean(known)
