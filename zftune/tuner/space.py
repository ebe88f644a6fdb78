"""Settings, and those that a search may propose: a grid, the quality that was asked for, and what fits.

Trajectory knobs are free while the weighted staleness of a setting stays within a budget: what is late times its mean
staleness. Where it was measured how far the weights move in a step, that is the share of the columns that are late,
1 - k, and the budget follows from the loss that the quality allows (`zftune.quality`). Else it is their share of the
gradient energy, 1 - coverage(k), and the budget is the published setting's, or the user's own. Neither knows of
`select_interval` (coverage is that of a fresh selection) and of `deferred_update="mean"` (which averages instead of
only being late): these two stay as the user has them unless a space is made with more choices.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, Literal, NamedTuple

from zenflow import ZenFlowConfig
from zftune import words
from zftune.errors import BadInputError
from zftune.planner import choosing
from zftune.quality import allowed_loss_percent, most_late_steps, selected_share
from zftune.store.types import STALENESS, Quality
from zftune.text import number

TRAJECTORY_KNOBS = (
    "topk_ratio",
    "update_interval",
    "select_interval",
    "apply_lag",
    "deferred_update",
    "overlap_step",
)
"""What changes the training trajectory; the other knobs change only its speed."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Setting:
    """Values of the live knobs. Two that differ in knobs without an effect alone are one setting: they are equal."""

    topk_ratio: float = 0.1
    update_interval: int = 4
    select_interval: int | Literal["auto"] = "auto"
    apply_lag: int = 4
    """L in 1..S; there is no None."""
    offload_ratio: float = 1.0
    deferred_update: Literal["replay", "mean"] = "replay"
    host_threads: int | None = None
    """None: one on each core that is left to the host engine."""
    overlap_step: bool = True
    """False: every window is applied in the step that closes it."""

    def __post_init__(self) -> None:
        if not 1 <= self.apply_lag <= self.update_interval:
            raise BadInputError(
                f"apply_lag is {self.apply_lag}; it must be an integer from 1 to {self.update_interval}"
            )

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Setting) and self.heeded() == other.heeded()

    def __hash__(self) -> int:
        return hash(tuple(self.heeded().values()))

    @classmethod
    def of(cls, config: ZenFlowConfig) -> Setting:
        """The setting of a configuration. Raises BadInputError: its update interval is "auto", of no known length."""
        if config.update_interval == "auto":
            raise BadInputError("update_interval is 'auto'; it must be an integer: a search sets it itself")
        knobs: dict[str, Any] = {name: getattr(config, name) for name in _NAMES}
        return cls(**{**knobs, "apply_lag": config.lag})

    @classmethod
    def known(cls, config: ZenFlowConfig) -> Setting | None:
        """The setting of a configuration; None: its windows have no known length."""
        return None if config.update_interval == "auto" else cls.of(config)

    @classmethod
    def from_knobs(cls, knobs: Mapping[str, Any]) -> Setting:
        """From `knobs()`. Raises BadInputError: a knob is missing or unknown, or has a value that is not allowed."""
        try:
            if set(knobs) == set(_NAMES):
                return cls(**knobs)
        except TypeError as error:
            raise BadInputError(f"knobs are {dict(knobs)}: {error}") from error
        raise BadInputError(f"knobs are {', '.join(sorted(knobs))}; they must be {', '.join(_NAMES)}")

    def knobs(self) -> dict[str, Any]:
        """What `set_knobs` takes."""
        return asdict(self)

    def heeded(self) -> dict[str, Any]:
        """The knobs that have an effect, given the others: nothing else decides what is trained, and how fast."""
        if self.offload_ratio == 0:  # nothing is late, and no host updates anything
            return {"offload_ratio": 0}
        found = {name: getattr(self, name) for name in _NAMES}
        if not self.overlap_step:
            del found["apply_lag"]
        if self.topk_ratio == 0:
            del found["select_interval"]
        return found

    def config(self, base: ZenFlowConfig) -> ZenFlowConfig:
        return replace(base, **self.knobs())

    @property
    def synchronous(self) -> bool:
        """Whether every gradient is applied in its own step: the plain optimizer's trajectory."""
        return self.mean_staleness_steps == 0

    @property
    def mean_staleness_steps(self) -> float:
        """Steps from a deferred gradient's production to its application, on average over many buckets."""
        if self.offload_ratio == 0 or self.topk_ratio == 1:
            return 0.0
        in_window = (self.update_interval - 1) / 2
        return in_window + (self.apply_lag + 1) / 2 if self.overlap_step else in_window

    def late_steps(self, *, staggered: bool) -> float:
        """`mean_staleness_steps`, where windows may close by turns and are then visible all at once."""
        mean = self.mean_staleness_steps
        return mean + (self.apply_lag - 1) / 2 if staggered and self.overlap_step and mean else mean

    def differences(self, other: Setting) -> str:
        """What is set otherwise than in `other`, in words; "" where nothing is."""
        return ", ".join(
            f"{name} {words.value(value)}" for name, value in self.heeded().items() if value != getattr(other, name)
        )

    def __str__(self) -> str:
        window = f"topk_ratio {self.topk_ratio:g}, update_interval {self.update_interval}"
        window += f", apply_lag {self.apply_lag}" if self.overlap_step else ", each window synchronous"
        window += "" if self.offload_ratio == 1 else f", offload_ratio {self.offload_ratio:g}"
        window += "" if self.deferred_update == "replay" else f", deferred_update {self.deferred_update}"
        return window if self.host_threads is None else f"{window}, host_threads {self.host_threads}"


_NAMES = tuple(Setting.__dataclass_fields__)
_OF_AUTO = ("select_strategy", "steps_per_epoch", "max_update_interval", "auto_ratio")
"""Say what a setting's own values follow from."""


def unsearched(config: ZenFlowConfig) -> dict[str, Any]:
    """What a configuration sets otherwise than by default, and no setting has."""
    others = (one for one in fields(config) if one.name not in (*_NAMES, *_OF_AUTO))
    return {one.name: value for one in others if (value := getattr(config, one.name)) != one.default}


PUBLISHED = Setting.of(choosing.PUBLISHED)
TOPK_RATIOS = (0.0, 0.01, 0.02, 0.05, 0.1, 0.15, 0.2, 0.3, 0.4)
UPDATE_INTERVALS = (1, 2, 3, 4, 6, 8, 12, 16)
LAG_SHARES = (0.0, 0.5, 1.0)
"""Of S; 0 is a lag of one step."""
OFFLOAD_RATIOS = (0.4, 0.6, 0.8, 0.9, 1.0)
Coverage = Callable[[float], float]
"""Share of the gradient energy in the top k columns, for every k from 0 to 1."""
_ROUNDING = 1e-9
_NO_LOSS = "no loss is known (zftune.log_loss tells it), so that a training that goes wrong would not be noticed"


@dataclass(frozen=True, slots=True)
class Forecast:
    """What the planner says of a setting."""

    step_ms: float
    device_bytes: int = 0
    host_bytes: int = 0
    excess: float = 0.0
    """Above 0: it breaks a limit of memory, by this share of it."""
    reason: str = ""


Forecaster = Callable[[Setting], Forecast]


@dataclass(frozen=True, slots=True)
class Dimension:
    """One knob and its choices, in an order in which neighbours are alike."""

    name: str
    choices: tuple[Any, ...]


class Violation(NamedTuple):
    """Why a setting is not allowed, and by which share of the limit."""

    excess: float
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Space:
    """The allowed settings.

    Args:
        base: the user's; knobs without a dimension have its values.
        dimensions: with more than one choice each.
        budget: most of the weighted staleness.
        coverage: of the live model; `selected_share` where it is known how far the weights move.
        fixed_because: why trajectory knobs are not free, in words; "" where they are.
        movement_percent: how far a step moves the deferred weights at the rate `movement_rate`; None: not measured.
        staggered: whether windows close by turns, so that all of a window is visible L steps after its close.
        guesses: whether late weights are guessed, so that lateness is bounded first, weights may move far, and the lag
            stays one step.
    """

    base: Setting
    quality: Quality
    dimensions: tuple[Dimension, ...]
    budget: float
    coverage: Coverage
    fixed_because: str = ""
    movement_percent: float | None = None
    movement_rate: float | None = None
    staggered: bool = False
    guesses: bool = False

    def setting(self, indices: Mapping[str, int]) -> Setting:
        values = {one.name: one.choices[indices[one.name]] for one in self.dimensions}
        interval = values.get("update_interval", self.base.update_interval)
        share = values.pop("lag_share", 0.0 if self.guesses else self.base.apply_lag / self.base.update_interval)
        share = share if values.get("overlap_step", self.base.overlap_step) else 1.0  # it has no effect
        lag = min(interval, max(1, round(share * interval + _ROUNDING)))
        return replace(self.base, **values, apply_lag=lag)

    def indices(self, setting: Setting) -> dict[str, int]:
        windows = setting.update_interval - 1
        values = {**setting.knobs(), "lag_share": (setting.apply_lag - 1) / windows if windows else 1.0}
        return {one.name: _nearest(one.choices, values[one.name]) for one in self.dimensions}

    @property
    def offload_ratios(self) -> tuple[float, ...]:
        """That may be proposed: the base's own where there is no choice."""
        found = next((one.choices for one in self.dimensions if one.name == "offload_ratio"), ())
        return tuple(found) or (self.base.offload_ratio,)

    def settings(self) -> Iterator[Setting]:
        """Every allowed one, the base's own choices as they come; each once."""
        seen: set[Setting] = set()
        for chosen in itertools.product(*(range(len(one.choices)) for one in self.dimensions)):
            setting = self.setting({one.name: index for one, index in zip(self.dimensions, chosen, strict=True)})
            if setting not in seen and self.violation(setting) is None:
                seen.add(setting)
                yield setting

    def moving(self, movement_percent: float, rate: float | None = None) -> Space:
        """The same space with lateness bounded by how far a step moves the weights, % of their norm, at a rate."""
        if self.fixed_because:
            return self
        budget = most_late_steps(self.quality, movement_percent, guesses=self.guesses)
        return replace(
            self, budget=budget, coverage=selected_share, movement_percent=movement_percent, movement_rate=rate
        )

    def earlier(self, setting: Setting) -> Setting:
        """A setting with as little lag, and windows as short, as the budget asks for; at last none that is late."""
        found = (
            replace(setting, update_interval=interval, apply_lag=lag)
            for interval in range(setting.update_interval, 0, -1)
            for lag in range(min(setting.apply_lag, interval), 0, -1)
        )
        on_time = replace(setting, update_interval=1, apply_lag=1, overlap_step=False)
        return next((one for one in found if self.violation(one) is None), on_time)

    def cost(self, setting: Setting) -> float:
        """The weighted staleness: (1 - coverage(k)) * mean staleness, in steps."""
        return (1.0 - self.coverage(setting.topk_ratio)) * setting.late_steps(staggered=self.staggered)

    def violation(self, setting: Setting) -> Violation | None:
        """Why a setting is outside the quality; None: it is not."""
        cost, moved, mean = self.cost(setting), self.movement_percent, setting.late_steps(staggered=self.staggered)
        if cost <= self.budget * (1 + _ROUNDING) + _ROUNDING:
            return None
        if self.guesses:
            reason = f"updates would come {cost:.2f} steps late, and quality {self.quality} allows {self.budget:.2f}"
        elif moved is None:
            reason = (
                f"its weighted staleness would be {cost:.2f} steps (a mean of {mean:.1f} times {cost / mean:.0%}, the "
                f"share of the gradient that is deferred), and quality {self.quality} allows {self.budget:.2f}"
            )
        else:
            loss, why = allowed_loss_percent(self.quality, moved)
            reason = (
                f"weights would move {moved * cost:.3g}% before late updates arrive, the quality allows "
                f"{moved * self.budget:.3g}% (up to about {number(loss)}% of loss in a long fine-tuning"
                f"{'; ' if why else ''}{why})"
            )
        return Violation(cost / self.budget - 1 if self.budget else cost, reason)


def space_for(
    base: Setting,
    quality: Quality,
    *,
    coverage: Coverage,
    has_loss: bool = True,
    threads: Sequence[int] = (),
    offload_ratios: Sequence[float] = OFFLOAD_RATIOS,
    zenflow_section: bool = True,
    movement_percent: float | None = None,
    movement_rate: float | None = None,
    staggered: bool = False,
    guesses: bool = False,
) -> Space:
    """The space of a quality, around the setting that the user has; movements, `staggered`, `guesses` as of `Space`.

    Args:
        quality: "exact": the plain optimizer's trajectory; "published": as stale as the base; "loose": twice that. Of
            a known movement: by what it adds to the loss.
        has_loss: whether a loss guard can watch over the training; trajectory knobs are fixed without.
        threads: choices for the host engine's threads; none: they stay.
        zenflow_section: whether the base's trajectory knobs are the user's own choice, not a default.
    """
    speed = Dimension("offload_ratio", tuple(offload_ratios)), Dimension("host_threads", tuple(threads))
    if quality == "exact":  # without staleness the split between the tiers, too, changes nothing but the speed
        split = Dimension("topk_ratio", tuple(sorted({*TOPK_RATIOS, base.topk_ratio})))
        return Space(
            base=replace(base, update_interval=1, apply_lag=1, overlap_step=False), quality="exact",
            dimensions=_open((split, *speed)), budget=0.0, coverage=coverage,
            fixed_because="exact keeps the plain optimizer's trajectory",
        )  # fmt: skip
    space = Space(base=base, quality=quality, dimensions=(), budget=0.0, coverage=coverage, staggered=staggered)
    if not has_loss:
        return replace(space, dimensions=_open(speed), budget=space.cost(base), fixed_because=_NO_LOSS)
    if guesses:
        space = replace(space, coverage=selected_share, guesses=True)
    own = STALENESS[quality] * space.cost(base if zenflow_section else PUBLISHED)
    budget = most_late_steps(quality, 0.0, guesses=True) if guesses else own
    trajectory = (
        Dimension("topk_ratio", TOPK_RATIOS),
        Dimension("update_interval", UPDATE_INTERVALS),
        Dimension("lag_share", (0.0,) if guesses else LAG_SHARES),
    )
    free = replace(space, base=replace(base, overlap_step=True), dimensions=_open((*trajectory, *speed)), budget=budget)
    bounded = free if movement_percent is None else free.moving(movement_percent, movement_rate)
    return bounded if movement_percent is None else replace(bounded, base=bounded.earlier(free.base))


def _open(dimensions: Sequence[Dimension]) -> tuple[Dimension, ...]:
    """Those that leave a choice."""
    return tuple(one for one in dimensions if len(one.choices) > 1)


def _nearest(choices: Sequence[Any], value: Any) -> int:
    if value is None:  # default threads: one on each core that is left, the most of the choices
        return len(choices) - 1
    return min(range(len(choices)), key=lambda index: abs(choices[index] - value))
