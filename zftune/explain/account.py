"""What exploring cost against what the adopted knobs saved, and when the one had paid for the other.

While a setting is the incumbent whose gain over the starting point is g, a second of training under it saves
g / (1 - g) seconds: the starting point would have taken 1 / (1 - g). What a challenger saves while it is measured does
not count. The run has broken even where the savings have caught up with the cost for good.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Account:
    """Cost and savings over the time that a search has trained, seconds."""

    elapsed_s: float = 0.0
    spent_s: float = 0.0
    saved_s: float = 0.0
    _even_s: float | None = None

    def add(self, seconds: float, *, spent_s: float, incumbent_s: float, gain: float) -> None:
        """Count time that passed.

        Args:
            seconds: that passed.
            spent_s: of them, beyond what the incumbent would have taken.
            incumbent_s: that the incumbent would have taken.
            gain: of the incumbent, as a share of the starting point's time.
        """
        before = self.saved_s - self.spent_s
        self.spent_s += spent_s
        self.saved_s += incumbent_s * gain / (1 - gain)
        after = self.saved_s - self.spent_s
        if after < 0:
            self._even_s = None
        elif before < 0:
            self._even_s = self.elapsed_s + seconds * before / (before - after)
        self.elapsed_s += seconds

    @property
    def break_even_s(self) -> float | None:
        """Since the search began; None: it has not broken even, or nothing was saved."""
        if self.saved_s <= 0 or self.saved_s < self.spent_s:
            return None
        return self._even_s if self._even_s is not None else 0.0

    def remaining_s(self, gain: float) -> float | None:
        """Training under the incumbent until it breaks even; None: it has, or never will.

        Args:
            gain: of the incumbent, as a share of the starting point's time.
        """
        missing_s = self.spent_s - self.saved_s
        return missing_s * (1 - gain) / gain if gain > 0 and missing_s > 0 else None
