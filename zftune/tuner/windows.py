"""Windows of a known length: a search measures whole ones, and cannot where the runtime chooses ("auto")."""

from __future__ import annotations

import logging
from dataclasses import replace

from zenflow import ZenFlowConfig
from zenflow.optimizer import ZenFlowOptimizer
from zftune.errors import ZftuneError
from zftune.tuner.changing import AtOnce, Change, Changes
from zftune.tuner.settings import Setting

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


class KnownWindow:
    """Leaves `update_interval: "auto"` once there is a search, and not before: until then the knobs are the user's.

    Args:
        optimizer: that trains.
        changes: how knobs change; None: at once.
        on_change: told of that change.
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
