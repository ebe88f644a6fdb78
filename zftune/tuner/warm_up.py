"""What comes before a search: settings that can be measured, and steps that are like all later ones."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from zenflow import ZenFlowConfig
from zenflow.optimizer import ZenFlowOptimizer
from zftune.errors import ZftuneError
from zftune.tuner import messages
from zftune.tuner.executor import AtOnce, Change, Changes, Verdict, change_knobs
from zftune.tuner.space import Setting

_INTERVAL = 4  # S where the configuration leaves it to the runtime
_WARM_UP_STEPS = 8
_LONGEST_WARM_UP = 32
_MOST_VOIDS = 8
_logger = logging.getLogger("zftune")


def counted(config: ZenFlowConfig) -> ZenFlowConfig:
    """A configuration whose windows have a known length: where it has none, what a search begins from."""
    return replace(config, update_interval=_INTERVAL, apply_lag=None) if config.update_interval == "auto" else config


def warm_up_steps(config: ZenFlowConfig) -> int:
    """Steps before a search: the first are slow, and the first selection sees untrained weights."""
    every = config.select_interval
    second = 0 if every == "auto" else min(every + 1, _LONGEST_WARM_UP)
    return max(_WARM_UP_STEPS, 2 * counted(config).longest_window, second)


def holds(config: ZenFlowConfig, knobs: Mapping[str, Any]) -> bool:
    """Whether knobs are in force."""
    one = config.changed(knobs)
    return replace(one, apply_lag=one.lag) == replace(config, apply_lag=config.lag)


def go_back(
    optimizer: ZenFlowOptimizer,
    on_change: Change | None,
    agree: Callable[[Mapping[str, Any]], Verdict | None] | None = None,
) -> str:
    """Leave settings that were being tried when the loaded state was saved; with several ranks all call it.

    `agree` changes knobs where all ranks do, else returns None; without it they are changed at once.

    Returns:
        What is to be said, a sentence; "": none were tried.

    Raises:
        HostEngineError: host work failed.
    """
    kept, config = optimizer.kept_knobs, optimizer.config
    verdict = None if kept is None else agree(kept) if agree else change_knobs(optimizer, kept)
    if verdict is None or kept is None:
        return ""
    if verdict.step is None:
        optimizer.kept_knobs = None
        _logger.warning("%s", messages.not_back(verdict.refused))
        return ""
    optimizer.kept_knobs = kept  # they are not what the user asks for
    if on_change is not None:
        on_change(verdict.step or 1, kept)
    best, tried = (Setting.of(counted(one)) for one in (config.changed(kept), config))
    return messages.back_to_best(best.differences(tried) or str(best))


class KnownWindow:
    """Leaves `update_interval: "auto"` once there is a search, and not before: until then the knobs are the user's.

    `changes` changes the knobs; None: at once.
    """

    def __init__(self, optimizer: ZenFlowOptimizer, changes: Changes | None, on_change: Change | None) -> None:
        self._optimizer, self._on_change = optimizer, on_change
        self._changes = changes or AtOnce(optimizer)
        self._asked = False
        self._voids = 0

    @property
    def there(self) -> bool:
        """Whether windows have a known length."""
        return self._optimizer.config.update_interval != "auto"

    def ask(self) -> None:
        """Call it after each step until it is there.

        Raises:
            ZftuneError: such windows cannot be had, or not all ranks agree.
            HostEngineError: host work failed.
        """
        setting = Setting.of(counted(self._optimizer.config))
        if not self._asked:
            self._asked = True
            self._changes.ask(setting.knobs())
        verdict = self._changes.verdict()
        if verdict is None:
            return
        self._asked = False
        if verdict.refused:
            raise ZftuneError(f"update_interval {_INTERVAL} instead of auto is refused ({verdict.refused})")
        self._voids += bool(verdict.void)
        if self._voids == _MOST_VOIDS:
            raise ZftuneError(f"update_interval {_INTERVAL} instead of auto is not agreed on ({verdict.void})")
        if verdict.step is not None:
            _logger.info("update_interval is %d instead of auto: from here on the search sets it.", _INTERVAL)
            if self._on_change is not None:
                self._on_change(verdict.step or 1, setting.knobs())


class StepCount:
    """Counts steps, whatever numbers they have: those jump where a saved state is loaded, at the begin or later."""

    def __init__(self, optimizer: ZenFlowOptimizer) -> None:
        self.followed = 0
        """Steps so far."""
        self._optimizer = optimizer
        self._last = optimizer.steps
        self.begin_warm_up()

    def begin_warm_up(self) -> None:
        """From here on: what was seen before does not count."""
        self.warm_up = warm_up_steps(self._optimizer.config)
        """Its steps."""
        full = max(0, self._optimizer.config.full_warm_up_rounds - self._last)
        self.begins = self.followed + full + self.warm_up
        """After how many followed steps it is over."""

    @property
    def begins_anew(self) -> bool:
        """Whether the training goes on from no saved state: all of its steps were seen, since the first."""
        if self.followed == self._optimizer.steps:
            return True
        known = self._optimizer.history()  # steps that were taken before anybody followed them, too
        return bool(known) and known[0].step == 1 and known[-1].step == len(known)

    def after_step(self) -> bool:
        """Count a step; whether it is the first after a saved state was loaded."""
        before, self._last = self._last, self._optimizer.steps
        loaded = self._last not in (before, before + 1)  # a step that a gradient scaler leaves out is none
        if loaded:
            before = self._last - 1
        self.followed += self._last - before
        return loaded
