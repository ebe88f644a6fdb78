"""How many steps of a run a measurement needs, and what to say where a run ended before it had made them."""

from __future__ import annotations

from dataclasses import dataclass

from zftune.tuner.restarting.upstream import Upstream
from zftune.tuner.scores import MOST_STEPS, steps_of
from zftune.tuner.settings import Setting
from zftune.tuner.space import Space
from zftune.tuner.states import Request


@dataclass(frozen=True, slots=True)
class Length:
    """Whole windows from a boundary on; the first one, and what is slow in the beginning, does not count.

    Args:
        upstream: says how long its own warm-up is.
        warm_up: first steps that do not count, at least.
        steps: that count, at least.
    """

    upstream: Upstream
    warm_up: int
    steps: int

    def first(self, setting: Setting) -> int:
        """Number of the first step that counts, from 0."""
        window, begin = setting.update_interval, self.upstream.warm_up(setting)
        least = max(self.warm_up, begin + window, 1)
        return begin + window * -(-(least - begin) // window)

    def counted(self, setting: Setting, steps: int) -> int:
        """Steps that count where a search asks for so many."""
        return steps_of(setting.update_interval, max(steps, self.steps))

    def needed(self, setting: Setting, steps: int) -> int:
        """Steps of a whole run for it."""
        return self.first(setting) + self.counted(setting, steps)

    def most(self, space: Space, start: Setting) -> int:
        """Steps of a run that are enough for every measurement of a search."""
        return max(self.needed(setting, MOST_STEPS) for setting in (start, *space.settings()))


def too_short(length: Length, request: Request, taken: int, most: int) -> str:
    """What a run that ended too early means, without a subject.

    Args:
        length: of the runs.
        request: what it was to measure.
        taken: steps that it made.
        most: steps that are always enough.
    """
    setting = request.setting
    fewer = length.first(setting) + steps_of(setting.update_interval, request.steps)
    smaller = f", or --trial-steps {request.steps}" if fewer <= taken else ""
    return (
        f"ended by itself after {taken} steps, {length.needed(setting, request.steps)} are needed to measure "
        f"{setting}; allowed is a training of {most} steps or more, which is always enough{smaller}"
    )
