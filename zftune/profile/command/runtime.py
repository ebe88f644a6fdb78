"""What zenflow's own optimizer told through the agent, as the runtime's own types again."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from zftune.profile.command.records import Rank

if TYPE_CHECKING:
    from zenflow import StepStats, ZenFlowConfig


_MAY_BE_NONE = ("step_ms", "hidden_ms", "staleness_mean_steps", "staleness_max_steps", "coverage", "churn")


@dataclass(frozen=True, slots=True)
class Runtime:
    """The optimizer's own account of the measured steps."""

    config: ZenFlowConfig
    stats: list[StepStats]
    model_bytes: int
    engine: tuple[str, int]
    host_bytes: Mapping[str, int]
    timeline: Mapping[str, Any] | None
    """Of one window, as the profile document has it, but for the lanes that the agent fills."""
    rig: Mapping[str, Any] | None
    """The emulated accelerator that it ran on, as the profile document has it."""


def runtime_of(rank: Rank) -> Runtime | None:
    """The runtime's account; None where another optimizer trains, or where a part of it is lost."""
    knobs, last = rank.model.get("knobs"), rank.steps[-1].get("runtime")
    if not isinstance(knobs, Mapping) or not isinstance(last, Mapping) or not rank.model.get("model_bytes"):
        return None
    from zenflow import ConfigError, ZenFlowConfig

    try:
        name, threads = last["host_engine"]
        host_bytes = last["host_memory"]
        return Runtime(
            config=ZenFlowConfig(**knobs),
            stats=[_stats(step["runtime"]) for step in rank.steps],
            model_bytes=rank.model["model_bytes"],
            engine=(str(name), int(threads)),
            host_bytes={use: int(host_bytes[use]) for use in ("state", "log", "staging", "peak")},
            timeline=last.get("timeline"),
            rig=last.get("rig"),
        )
    except (ConfigError, KeyError, TypeError, ValueError):  # records that end early, or of another version
        return None


def _stats(row: Mapping[str, Any]) -> StepStats:
    from zenflow import StepStats

    names = {field.name for field in dataclasses.fields(StepStats)} - {"coverage_curve", "comm_ms"}
    values = {name: row[name] for name in names}
    for name, value in values.items():
        allowed = (int, float, type(None)) if name in _MAY_BE_NONE else (int, float)
        if name != "stall_ms" and not isinstance(value, allowed):
            raise TypeError(f"{name} is no number")
    return StepStats(**values, coverage_curve=None)
