"""The settings that a search may propose: a grid of choices, the quality that the user asked for, and what fits.

Trajectory knobs are free while (1 - coverage(k)) * mean staleness stays within a budget. That figure knows nothing of
`select_interval` (coverage is that of a fresh selection) and of `deferred_update="mean"` (which averages instead of
only being late): these two stay as the user has them unless a space is made with more choices.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from zftune.errors import BadInputError
from zftune.store.types import Quality
from zftune.tuner.settings import Setting

QUALITIES: tuple[Quality, ...] = ("exact", "published", "loose")
QUALITY_WORDS = {
    "exact": "exact: the plain optimizer's trajectory; only knobs that change nothing but the speed are tuned",
    "published": "published: gradients get no staler, by what they weigh, than under your own knobs",
    "loose": "loose: gradients may get twice as stale, by what they weigh, as under your own knobs",
}
PUBLISHED = Setting(topk_ratio=0.1, update_interval=4, apply_lag=4)
"""The published setting: the budget where the user's configuration has no `zenflow` section of its own."""

TOPK_RATIOS = (0.0, 0.01, 0.02, 0.05, 0.1, 0.15, 0.2, 0.3, 0.4)
UPDATE_INTERVALS = (1, 2, 3, 4, 6, 8, 12, 16)
LAG_SHARES = (0.0, 0.5, 1.0)
"""Of S; 0 is a lag of one step."""
OFFLOAD_RATIOS = (0.4, 0.6, 0.8, 0.9, 1.0)

_ROUNDING = 1e-9

Coverage = Callable[[float], float]
"""Share of the gradient energy in the top k columns, for every k from 0 to 1."""


@dataclass(frozen=True, slots=True)
class Forecast:
    """What the planner says of a setting."""

    step_ms: float
    device_bytes: int = 0
    host_bytes: int = 0
    excess: float = 0.0
    """Above 0: it breaks a limit of memory, by this share of it."""
    reason: str = ""
    """Which, in words."""


Forecaster = Callable[[Setting], Forecast]


@dataclass(frozen=True, slots=True)
class Dimension:
    """One knob and its choices, in an order in which neighbours are alike."""

    name: str
    choices: tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class Violation:
    """Why a setting is not allowed."""

    excess: float
    """Above 0: share of the limit."""
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Space:
    """The allowed settings.

    Args:
        base: the user's; knobs without a dimension have its values.
        quality: what the user asked for.
        dimensions: with more than one choice each.
        budget: most of (1 - coverage(k)) * mean staleness.
        coverage: of the live model.
        fixed_because: why trajectory knobs are not free, in words; "" where they are.
    """

    base: Setting
    quality: Quality
    dimensions: tuple[Dimension, ...]
    budget: float
    coverage: Coverage
    fixed_because: str = ""

    def setting(self, indices: Mapping[str, int]) -> Setting:
        """The setting at one choice of each dimension."""
        values = {one.name: one.choices[indices[one.name]] for one in self.dimensions}
        interval = values.get("update_interval", self.base.update_interval)
        share = values.pop("lag_share", self.base.apply_lag / self.base.update_interval)
        lag = min(interval, max(1, round(share * interval + _ROUNDING)))
        return replace(self.base, **values, apply_lag=lag)

    def indices(self, setting: Setting) -> dict[str, int]:
        """The choices nearest to a setting, in or out of the space."""
        values = {**setting.knobs(), "lag_share": _share(setting)}
        return {one.name: _nearest(one.choices, values[one.name]) for one in self.dimensions}

    @property
    def offload_ratios(self) -> tuple[float, ...]:
        """That may be proposed: the base's own where there is no choice."""
        found = next((one.choices for one in self.dimensions if one.name == "offload_ratio"), ())
        return tuple(found) or (self.base.offload_ratio,)

    def settings(self) -> Iterator[Setting]:
        """Every allowed one, the base's own choices as they come; each once."""
        seen: set[Setting] = set()
        ranges = [range(len(one.choices)) for one in self.dimensions]
        names = [one.name for one in self.dimensions]
        for chosen in itertools.product(*ranges):
            setting = self.setting(dict(zip(names, chosen, strict=True)))
            if setting not in seen and self.violation(setting) is None:
                seen.add(setting)
                yield setting

    def cost(self, setting: Setting) -> float:
        """(1 - coverage(k)) * mean staleness, in steps."""
        return (1.0 - self.coverage(setting.topk_ratio)) * setting.mean_staleness_steps

    def violation(self, setting: Setting) -> Violation | None:
        """Why a setting is outside the quality; None: it is not."""
        cost = self.cost(setting)
        if cost <= self.budget * (1 + _ROUNDING) + _ROUNDING:
            return None
        excess = cost / self.budget - 1 if self.budget else cost
        return Violation(excess, f"(1 - coverage) x staleness is {cost:.2f} steps, allowed are {self.budget:.2f}")


def space_for(
    base: Setting,
    quality: Quality,
    *,
    coverage: Coverage,
    has_loss: bool = True,
    threads: Sequence[int] = (),
    offload_ratios: Sequence[float] = OFFLOAD_RATIOS,
    zenflow_section: bool = True,
) -> Space:
    """The space of a quality.

    Args:
        base: the setting that the user has.
        quality: "exact": the plain optimizer's trajectory; "published": as stale as the base; "loose": twice that.
        coverage: measured on the live model (or assumed), for every k.
        has_loss: whether a loss guard can watch over the training; trajectory knobs are fixed without.
        threads: choices for the host engine's threads; none: they stay.
        offload_ratios: choices; a single one where memory forbids others.
        zenflow_section: whether the base's trajectory knobs are the user's own choice, not a default.

    Raises:
        BadInputError: the quality is unknown.
    """
    if quality not in QUALITIES:
        raise BadInputError(f"--quality '{quality}': allowed are {', '.join(QUALITIES)}")
    speed = Dimension("offload_ratio", tuple(offload_ratios)), Dimension("host_threads", tuple(threads))
    if quality == "exact":
        return _exact(base, coverage, speed)
    space = Space(base=base, quality=quality, dimensions=(), budget=0.0, coverage=coverage)
    if not has_loss:
        return replace(space, dimensions=_open(speed), budget=space.cost(base), fixed_because=_NO_LOSS)
    budget = space.cost(base if zenflow_section else PUBLISHED)
    return replace(
        space,
        base=replace(base, overlap_step=True),
        dimensions=_open((*_trajectory(), *speed)),
        budget=2 * budget if quality == "loose" else budget,
    )


def _exact(base: Setting, coverage: Coverage, speed: Sequence[Dimension]) -> Space:
    """Without staleness the split between the tiers, too, changes nothing but the speed."""
    base = replace(base, update_interval=1, apply_lag=1, overlap_step=False)
    split = Dimension("topk_ratio", tuple(sorted({*TOPK_RATIOS, base.topk_ratio})))
    return Space(
        base=base, quality="exact", dimensions=_open((split, *speed)), budget=0.0, coverage=coverage,
        fixed_because="exact asks for the plain optimizer's trajectory",
    )  # fmt: skip


def _open(dimensions: Sequence[Dimension]) -> tuple[Dimension, ...]:
    """Those that leave a choice."""
    return tuple(one for one in dimensions if len(one.choices) > 1)


_NO_LOSS = "no loss is known, so that nobody would see training go wrong"


def _trajectory() -> list[Dimension]:
    return [
        Dimension("topk_ratio", TOPK_RATIOS),
        Dimension("update_interval", UPDATE_INTERVALS),
        Dimension("lag_share", LAG_SHARES),
    ]


def _share(setting: Setting) -> float:
    return 1.0 if setting.update_interval == 1 else (setting.apply_lag - 1) / (setting.update_interval - 1)


def _nearest(choices: Sequence[Any], value: Any) -> int:
    if value is None:  # default threads: one on each core that is left, the most of the choices
        return len(choices) - 1
    return min(range(len(choices)), key=lambda index: abs(choices[index] - value))
