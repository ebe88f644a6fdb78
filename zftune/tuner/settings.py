"""A setting: the knobs that a search changes while it trains."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

from zenflow import ZenFlowConfig
from zftune.errors import BadInputError

TRAJECTORY_KNOBS = (
    "topk_ratio",
    "update_interval",
    "select_interval",
    "apply_lag",
    "deferred_update",
    "overlap_step",
)
"""What changes the training trajectory; the other knobs change only its speed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """Values of the live knobs. Two settings that the runtime takes for the same are equal (see `of`)."""

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
                f"apply_lag is {self.apply_lag}, allowed is an integer from 1 to {self.update_interval}"
            )

    @classmethod
    def of(cls, config: ZenFlowConfig) -> Setting:
        """The setting of a configuration.

        Raises:
            BadInputError: its update interval is "auto", which has no window of a known length to measure.
        """
        if config.update_interval == "auto":
            raise BadInputError("update_interval is 'auto', allowed is an integer: a search sets it itself")
        return cls(
            topk_ratio=config.topk_ratio,
            update_interval=config.update_interval,
            select_interval=config.select_interval,
            apply_lag=config.lag,
            offload_ratio=config.offload_ratio,
            deferred_update=config.deferred_update,
            host_threads=config.host_threads,
            overlap_step=config.overlap_step,
        )

    @classmethod
    def from_knobs(cls, knobs: Mapping[str, Any]) -> Setting:
        """From `knobs()`, such as the store keeps.

        Raises:
            BadInputError: a knob is missing or unknown, or has a value that is not allowed.
        """
        if set(knobs) != set(cls.__dataclass_fields__):
            raise BadInputError(f"knobs are {', '.join(sorted(knobs))}, allowed are {', '.join(_NAMES)}")
        return cls(**knobs)

    def knobs(self) -> dict[str, Any]:
        """What `set_knobs` takes."""
        return asdict(self)

    def config(self, base: ZenFlowConfig) -> ZenFlowConfig:
        """A configuration with this setting; the rest as in `base`."""
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

    def differences(self, other: Setting) -> str:
        """What is set otherwise than in `other`, in words; "" where nothing is."""
        return ", ".join(
            f"{name} {_text(value)}" for name, value in self.knobs().items() if value != getattr(other, name)
        )

    def __str__(self) -> str:
        window = f"topk_ratio {self.topk_ratio:g}, update_interval {self.update_interval}"
        window += f", apply_lag {self.apply_lag}" if self.overlap_step else ", each window synchronous"
        window += "" if self.offload_ratio == 1 else f", offload_ratio {self.offload_ratio:g}"
        window += "" if self.deferred_update == "replay" else f", deferred_update {self.deferred_update}"
        return window if self.host_threads is None else f"{window}, host_threads {self.host_threads}"


_NAMES = tuple(Setting.__dataclass_fields__)


def _text(value: object) -> str:
    return f"{value:g}" if isinstance(value, float) else "default" if value is None else str(value)
