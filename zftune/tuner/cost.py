"""What exploring has cost, and what it may."""

from __future__ import annotations

import statistics
from dataclasses import dataclass, field

_NEWEST = 5


@dataclass(slots=True)
class ExplorationCost:
    """Time of challengers beyond the incumbent's for the same steps, changes of knobs included, and its limit.

    Args:
        share: of the elapsed time that it may be.
        floor_s: it may always be so much.
    """

    share: float
    floor_s: float
    spent_s: float = 0.0
    elapsed_s: float = 0.0
    changes_s: list[float] = field(default_factory=list)
    """What the last changes of knobs cost."""

    def add(self, seconds: float, steps: int, incumbent_step_s: float | None) -> None:
        """Count time of steps, discarded ones too; `incumbent_step_s` None: the incumbent itself ran."""
        self.elapsed_s += seconds
        if incumbent_step_s is not None:
            self.spent_s += max(0.0, seconds - steps * incumbent_step_s)

    def changed(self, seconds: float, steps: int, incumbent_step_s: float) -> None:
        """Learn what a change of knobs and back costs; the arguments are those of `add`, which counts them."""
        self.changes_s = [*self.changes_s[1 - _NEWEST :], max(0.0, seconds - steps * incumbent_step_s)]

    def catch_up(self, spent_s: float, elapsed_s: float) -> None:
        """Take in what the run's account has counted."""
        self.spent_s, self.elapsed_s = max(self.spent_s, spent_s), max(self.elapsed_s, elapsed_s)

    @property
    def change_s(self) -> float:
        """What a change of knobs costs, on average of the last; 0: not known yet."""
        return statistics.fmean(self.changes_s) if self.changes_s else 0.0

    @property
    def allowed_s(self) -> float:
        """What may be spent, all in all."""
        return max(self.floor_s, self.share * self.elapsed_s)

    @property
    def left_s(self) -> float:
        """What may still be spent."""
        return self.allowed_s - self.spent_s
