"""The loss guard: whether training goes wrong while its knobs change."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field

import numpy as np

_TREND = 32
_RECENT = 4
_FACTOR = 1.5
_WIDTHS = 6.0


@dataclass(slots=True)
class LossGuard:
    """Looks at the loss of each step, in order."""

    _losses: deque[float] = field(default_factory=lambda: deque(maxlen=_TREND + _RECENT))

    def add(self, loss: float) -> str | None:
        """Take a step's loss; a reason where training goes wrong, else None.

        A spike is one where the last steps all lie far above the trend before them: one odd batch is none.
        """
        if not math.isfinite(loss):
            return f"the loss is {loss}"
        self._losses.append(loss)
        if len(self._losses) < _TREND + _RECENT:
            return None
        losses = np.asarray(self._losses)
        before, recent = losses[:_TREND], losses[_TREND:]
        slope, middle = np.polyfit(np.arange(_TREND), before, 1)
        expected = middle + slope * _TREND
        width = 1.4826 * float(np.median(np.abs(before - np.median(before))))
        limit = max(_FACTOR * expected if expected > 0 else math.inf, float(np.median(before)) + _WIDTHS * width)
        if float(recent.min()) <= limit:
            return None
        return (
            f"the loss of the last {_RECENT} steps is at least {recent.min():.3g}, the trend before was {expected:.3g}"
        )
