"""The steps of a search that belong to no measurement: how many, how long, and what of them exploring has cost."""

from __future__ import annotations

from zftune.tuner.states import Between


class Outside:
    """Takes them in, in order."""

    def __init__(self) -> None:
        self.steps: list[int] = []
        """Their numbers."""
        self.seconds = 0.0
        """Of all of them."""
        self._changes: list[tuple[int, bool]] = []
        self._seconds = self._late_s = 0.0
        self._late_steps = 0

    def change(self, step: int, *, challenges: bool) -> None:
        """Knobs change.

        Args:
            step: after which they hold. It closes a window and moves columns: where a setting is tried, for its sake.
            challenges: whether they are not the incumbent's.
        """
        begin = step if challenges else step + 1
        self._changes = [change for change in self._changes if change[0] < begin]
        self._changes.append((begin, challenges))

    def forget_changes(self) -> None:
        """Steps are numbered otherwise from here on, and have the incumbent's knobs until they change."""
        self._changes = []

    def add(self, step: int, step_ms: float) -> None:
        """Count a step.

        Args:
            step: its number.
            step_ms: its time.
        """
        seconds = step_ms / 1e3
        self.steps.append(step)
        self.seconds += seconds
        begun = [challenges for begin, challenges in self._changes if begin <= step]
        if begun and begun[-1]:
            self._late_s += seconds
            self._late_steps += 1
        else:
            self._seconds += seconds
        del self._changes[: max(0, len(begun) - 1)]

    def taken(self) -> Between:
        """What was counted since this was asked last."""
        found = Between(self._seconds, self._late_s, self._late_steps)
        self._seconds = self._late_s = 0.0
        self._late_steps = 0
        return found
