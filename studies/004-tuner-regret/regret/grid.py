"""Every setting of the grid, measured for real: one training run for each rig, whose knobs change while it trains."""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable, Mapping, Sequence

from studykit import Results, code_digest

from regret.scene import BASE, SETTINGS, Scene
from zftune.tuner.builtin import Training
from zftune.tuner.settings import Setting

CODE = ("runtime/zenflow", "zftune/tuner/builtin.py", "zftune/workload")
_LEAST_STEPS, _NOISY_STEPS = 12, 36  # a rig repeats itself, unless its copies are noisy
_SETTLING_WINDOWS = 2
_SELECTING_STEPS = 4

Times = Mapping[Setting, tuple[float, ...]]
"""Of a setting: mean time of each step of a window, in order, ms."""


def grid(scene: Scene, results: Results, *, again: bool, tell: Callable[[int], None]) -> Times:
    """The rig's times, from the file of results where they are there, whatever has changed in the runtime since.

    Args:
        scene: the rig.
        results: of the study.
        again: whether to measure in any case.
        tell: told settings done.
    """
    inputs = {
        "rig": scene.rig,
        "values": dict(scene.spec.values),
        "effects": dict(scene.spec.effects),
        "settings": [setting.knobs() for setting in SETTINGS],
        "steps": _least_steps(scene),
    }
    name = f"grid--{scene.rig}"
    record = None if again else results.load(name, inputs)
    if record is None:
        record = results.save(name, inputs, {"window_ms": _measured(scene, tell), "code": code_digest(*CODE)})
    windows = record["figures"]["window_ms"]
    return {setting: tuple(window) for setting, window in zip(SETTINGS, windows, strict=True)}


def mean_ms(window: Sequence[float]) -> float:
    """A step's time."""
    return statistics.fmean(window)


def _measured(scene: Scene, tell: Callable[[int], None]) -> list[list[float]]:
    order = list(range(len(SETTINGS)))
    random.Random(0).shuffle(order)  # so that what a change of knobs leaves behind looks like no effect of a knob
    windows: dict[int, list[float]] = {}
    with Training(scene.task(), BASE) as training:
        for _ in range(_SELECTING_STEPS * BASE.longest_window):
            training.step()
        for done, number in enumerate(order):
            tell(done)
            windows[number] = _window(training, SETTINGS[number], _least_steps(scene))
    return [windows[number] for number in range(len(SETTINGS))]


def _least_steps(scene: Scene) -> int:
    return _NOISY_STEPS if "link_noise" in scene.spec.effects else _LEAST_STEPS


def _window(training: Training, setting: Setting, least: int) -> list[float]:
    """Mean time of each step of a window, once the setting has settled."""
    interval = setting.update_interval
    first = training.optimizer.set_knobs(**setting.knobs()) + _SETTLING_WINDOWS * interval
    while training.optimizer.steps < first:
        training.step()
    for _ in range(interval * max(2, -(-least // interval))):
        training.step()
    stats = training.optimizer.history(wait=True, after=first)
    steps = [one.step_ms for one in stats if one.step_ms is not None]
    return [round(statistics.fmean(steps[position::interval]), 4) for position in range(interval)]
