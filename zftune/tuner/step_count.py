"""The steps that a tuner follows: how many, and until its search may begin."""

from __future__ import annotations

from zenflow.optimizer import ZenFlowOptimizer
from zftune.tuner.windows import warm_up_steps


class StepCount:
    """Counts them, whatever numbers they have: those jump where a saved state is loaded, at the begin or later.

    Args:
        optimizer: that takes them.
    """

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

    def after_step(self) -> bool:
        """Count a step; whether it is the first after a saved state was loaded."""
        before, self._last = self._last, self._optimizer.steps
        loaded = self._last not in (before, before + 1)  # a step that a gradient scaler leaves out is none
        if loaded:
            before = self._last - 1
        self.followed += self._last - before
        return loaded
