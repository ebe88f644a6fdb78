"""Every setting of the grid, measured for real: one training run for each rig, whose knobs change while it trains."""

from __future__ import annotations

import random
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from studykit import Job, code_digest

from regret.scene import BASE, SETTINGS, Scene, scene_of
from zenflow import ZenFlowAdamW
from zftune.emulation import RigSpec
from zftune.profile.measure import Training
from zftune.tuner.space import Setting

CODE = ("runtime/zenflow", "zftune/profile/measure.py", "zftune/workload")
_SETTLING_WINDOWS, _SETTLING_STEPS = 3, 6  # at least: most windows then are as the one before, all within 1%
_LEAST_WINDOWS = 2  # to be counted: two may take turns
_NOISY_STEPS = 36  # where copies are noisy, at least
_SELECTING_STEPS = 4

Times = Mapping[Setting, tuple[float, ...]]
"""Of a setting: mean time of each step of a window, in order, ms."""


def job(rig: str) -> Job:
    """The rig's grid; one that is there stays, whatever has changed in the runtime since."""
    spec = scene_of(rig).spec
    inputs = {
        "rig": rig,
        "clock": "simulated",
        "values": dict(spec.values),
        "effects": dict(spec.effects),
        "settings": [setting.knobs() for setting in SETTINGS],
        "steps": _least_steps(spec),
        "bucket_bytes": scene_of(rig).base.bucket_bytes,
    }
    return Job(f"grid--{rig}", inputs, figures, (rig,))


def figures(rig: str) -> dict[str, Any]:
    """Measure it."""
    return {"window_ms": _measured(scene_of(rig)), "code": code_digest(*CODE)}


def times_of(found: Mapping[str, Any]) -> Times:
    """The times in the figures of a grid."""
    return {setting: tuple(window) for setting, window in zip(SETTINGS, found["window_ms"], strict=True)}


def mean_ms(window: Sequence[float]) -> float:
    """A step's time."""
    return statistics.fmean(window)


def _measured(scene: Scene) -> list[list[float]]:
    order = list(range(len(SETTINGS)))
    random.Random(0).shuffle(order)  # so that what a change of knobs leaves behind looks like no effect of a knob
    windows: dict[int, list[float]] = {}
    with Training(scene.task(), scene.base) as training:
        for _ in range(_SELECTING_STEPS * BASE.longest_window):
            training.step()
        for number in order:
            windows[number] = _window(training, SETTINGS[number], _least_steps(scene.spec))
    return [windows[number] for number in range(len(SETTINGS))]


def _least_steps(spec: RigSpec) -> int:
    return _NOISY_STEPS if "link_noise" in spec.effects else 0


def _window(training: Training[ZenFlowAdamW], setting: Setting, least: int) -> list[float]:
    """Mean time of each step of a window, once the setting has settled."""
    interval = setting.update_interval
    settling = interval * max(_SETTLING_WINDOWS, -(-_SETTLING_STEPS // interval))
    first = training.optimizer.set_knobs(**setting.knobs()) + settling
    while training.optimizer.steps < first:
        training.step()
    for _ in range(interval * max(_LEAST_WINDOWS, -(-least // interval))):
        training.step()
    stats = training.optimizer.history(wait=True, after=first)
    steps = [one.step_ms for one in stats if one.step_ms is not None]
    return [round(statistics.fmean(steps[position::interval]), 4) for position in range(interval)]
