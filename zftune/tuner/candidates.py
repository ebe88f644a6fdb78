"""Which settings a search believes something of, and how alike they are."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from zftune.tuner.belief import Places
from zftune.tuner.space import Setting, Space

MOST = 96
"""Settings of a large space that the planner is asked about, beside neighbours: each prediction takes milliseconds."""
_LAG = 1.5
_KNOBS = ("topk_ratio", "update_interval", "offload_ratio", "host_threads")


def pool_of(space: Space, known: Iterable[Setting], seed: int) -> tuple[Setting, ...]:
    """The settings that may be proposed: all of a small space, else a sample, and the neighbours of the known ones."""
    known = list(known)
    allowed = list(space.settings())
    if len(allowed) <= MOST:
        return tuple(dict.fromkeys([*known, *allowed]))
    near = [neighbour for setting in known for neighbour in neighbours(space, setting)]
    sample = [allowed[index] for index in np.random.default_rng(seed).permutation(len(allowed))[:MOST]]
    return tuple(dict.fromkeys([*known, *near, *sample]))


def neighbours(space: Space, setting: Setting) -> list[Setting]:
    """Allowed settings that are one choice of one dimension away."""
    at = space.indices(setting)
    found = (
        space.setting({**at, dimension.name: index})
        for dimension in space.dimensions
        for index in (at[dimension.name] - 1, at[dimension.name] + 1)
        if 0 <= index < len(dimension.choices)
    )
    return [one for one in dict.fromkeys(found) if one != setting and space.violation(one) is None]


def places_of(settings: Sequence[Setting]) -> Places:
    """Axes on which the neighbouring choices of these settings are 1 apart."""
    values = {name: sorted({_number(one, name) for one in settings}) for name in _KNOBS}

    def places(setting: Setting) -> tuple[float, ...]:
        interval = setting.update_interval
        lag = 0.0 if interval == 1 else (setting.apply_lag - 1) / (interval - 1)
        on = [float(np.searchsorted(choices, _number(setting, name))) for name, choices in values.items()]
        return (*on, _LAG * lag, float(setting.overlap_step))

    return places


def _number(setting: Setting, name: str) -> float:
    value = getattr(setting, name)
    return float("inf") if value is None else float(value)  # default threads: the most that there are
