"""Noise of step times, as real machines show it: the `[noise]` table of a rig, and step times that are drawn from it.

    scatter         standard deviation of the logarithm of a plain step's time
    level           standard deviation of the logarithm of a level that wanders slowly
    level_steps     its time constant, in steps
    select          what a step that selects columns takes beyond a plain one, as a share of that
    exchange        the same for a step that exchanges columns, by a factor that scatters by a quarter
    double          share of the plain steps that take twice as long
    others          share of the steps in which other processes take the training thread's core
    others_share    what they take then, as a share of the step
    others_steps    how many steps in a row that lasts on average

Each entry is optional; without it there is no such noise.
"""

from __future__ import annotations

import math
import random
import sys
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from zenflow.errors import ConfigError

_MOST: Mapping[str, float] = {"double": 1.0, "others": 0.95}


@dataclass(frozen=True, slots=True, kw_only=True)
class Noise:
    """What a rig's `[noise]` table says."""

    scatter: float = 0.0
    level: float = 0.0
    level_steps: float = 100.0
    select: float = 0.0
    exchange: float = 0.0
    double: float = 0.0
    others: float = 0.0
    others_share: float = 0.0
    others_steps: float = 1.0

    @classmethod
    def of(cls, table: Any, path: Path) -> Noise:
        """From a rig file's table.

        Raises:
            ConfigError: it is no table, or has an entry that is unknown or out of range.
        """
        if not isinstance(table, dict):
            raise ConfigError(f"rig '{path}' has noise = {table!r}; it must be a table")
        names = [one.name for one in fields(cls)]
        for name, value in table.items():
            if name not in names:
                raise ConfigError(f"rig '{path}' has noise.{name}; it may have {', '.join(names)}")
            least, most = 1.0 if name.endswith("_steps") else 0.0, _MOST.get(name, sys.float_info.max)
            is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
            if not is_number or not least <= value <= most:
                raise ConfigError(
                    f"rig '{path}' has noise.{name} = {value!r}; it must be a number from {least:g} to {most:g}"
                )
        return cls(**{name: float(value) for name, value in table.items()})


@dataclass(frozen=True, slots=True)
class NoisyStep:
    """A step's time in ms."""

    ms: float
    taken_ms: float
    """What other processes took of it from the training thread."""
    moves: bool
    """Whether it selected or exchanged columns."""


class NoisySteps:
    """Step times under noise, one after the other; the same seed gives the same noise.

    Args:
        select_interval: steps from a selection to the next; the window that it is in exchanges columns at its end.
    """

    def __init__(self, noise: Noise, seed: int, select_interval: int = 16) -> None:
        self._noise, self._random, self._select = noise, random.Random(seed), select_interval
        self._level = noise.level * self._random.gauss(0, 1)
        self._busy = self._random.random() < noise.others
        self._place = self._taken = 0
        self._pending = False

    def close_window(self) -> None:
        """Knobs change: the next step begins a window."""
        self._place = 0

    def step(self, ms: float, window: int) -> NoisyStep:
        """A step of a setting with windows of `window` steps, whose steps take `ms` without noise."""
        noise, draw = self._noise, self._random
        self._taken += 1
        self._place += 1
        decay = math.exp(-1 / noise.level_steps)
        self._level = decay * self._level + math.sqrt(1 - decay**2) * noise.level * draw.gauss(0, 1)
        factor = math.exp(noise.scatter * draw.gauss(0, 1) - noise.scatter**2 / 2)
        factor += draw.random() < noise.double
        moves = False
        if (noise.select or noise.exchange) and self._taken % self._select == 1:
            factor += noise.select
            moves = self._pending = True
        if self._place >= window:
            self._place = 0
            if self._pending and noise.exchange:
                factor += noise.exchange * math.exp(0.25 * draw.gauss(0, 1))
                moves, self._pending = True, False
        own_ms = ms * factor * math.exp(self._level)
        taken_ms = ms * noise.others_share if self._is_taken() else 0.0
        return NoisyStep(own_ms + taken_ms, taken_ms, moves)

    def _is_taken(self) -> bool:
        """Whether other processes have the core: a two-state chain with the given share and mean length."""
        noise = self._noise
        if not noise.others:
            return False
        ends = 1 / noise.others_steps
        begins = ends * noise.others / (1 - noise.others)
        self._busy = self._random.random() >= ends if self._busy else self._random.random() < begins
        return self._busy
