"""The sentences: what is left to win, and which knobs won it."""

from __future__ import annotations

from zenflow import ZenFlowConfig
from zftune.hiding.measured import Measured
from zftune.hiding.planned import Planned
from zftune.profile.units import ms, percent, times

SMALL_GAIN = 1.05
"""Speed, as a multiple, from which a win is worth naming."""
NOTHING_TO_HIDE_BEHIND = (
    "on a plain CPU there is nothing to hide the updates behind: host and device are the same cores, so "
    "`--quality published` would win nothing"
)


def to_win(measured: Measured, plans: list[Planned], device: str) -> str:
    """What `--quality published` would win.

    Args:
        measured: the run.
        plans: for it, best first.
        device: what waits.
    """
    waits = f"the {device} waits {percent(measured.share)} of a step for the host"
    if not plans:
        return f"{waits}, and no late updates fit into memory"
    best = plans[0]
    gain = measured.step_ms / best.step_ms
    if gain < SMALL_GAIN:
        return f"{waits}: `--quality published` would win less than {percent(SMALL_GAIN - 1)}"
    return (
        f"{waits}; `--quality published` hides it: about {times(gain)} the speed, {ms(best.step_ms)} a step instead of "
        f"{ms(measured.step_ms)} ({named(best.config)})"
    )


def named(config: ZenFlowConfig) -> str:
    """The knobs that decide what is late."""
    window = f"topk_ratio {config.topk_ratio:g}, update_interval {config.update_interval}"
    lag = f", apply_lag {config.lag}" if config.overlap_step else ", overlap_step off"
    return f"{window}{lag}, select_interval {config.select_interval}"
