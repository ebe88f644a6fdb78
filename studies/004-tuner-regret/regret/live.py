"""The tuner on a rig for real: knobs that change while a model trains; judged by the grid."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from studykit import Job, code_digest

from regret.grid import CODE, Times, mean_ms
from regret.replay import MOST_MEASUREMENTS
from regret.scene import START, scene_of, space
from zftune.profile.measure import Training
from zftune.tuner.executor import TuningContext, live_search
from zftune.tuner.messages import sentence
from zftune.tuner.search import Search, SearchOptions

RIGS = ("slow-core", "link-bound")
THINKING_S = 0.5
"""Simulated time that a thought takes, a few steps."""
_WARM_UP_STEPS = 16
MOST_STEPS = 4000


def job(rig: str) -> Job:
    """One search on one rig."""
    spec = scene_of(rig).spec
    inputs = {
        "rig": rig,
        "values": dict(spec.values),
        "effects": dict(spec.effects),
        "most_measurements": MOST_MEASUREMENTS,
        "thinking_s": THINKING_S,
        "code": code_digest(*CODE, "zftune/tuner", "zftune/planner", "studies/004-tuner-regret/regret/live.py"),
    }
    return Job(f"live--{rig}", inputs, searched, (rig,))


def judged(found: Mapping[str, Any], times: Times) -> dict[str, Any]:
    """A search's figures, with what the rig's grid says of its choice."""
    of = {str(setting): mean_ms(window) for setting, window in times.items()}
    chosen, best = of[found["chosen"]], min(of.values())
    return {**found, "regret": chosen / best - 1, "over_start": chosen / of[str(START)] - 1}


def searched(rig: str) -> dict[str, Any]:
    """Search, and train as long as that goes on."""
    scene = scene_of(rig)
    options = SearchOptions(most_measurements=MOST_MEASUREMENTS, thinking_s=THINKING_S)
    search = Search(space(), START, scene.forecast, scene.planned[:1], options)
    with Training(scene.task(), scene.base) as training:
        for _ in range(_WARM_UP_STEPS):
            training.step()
        running = live_search(TuningContext(optimizer=training.optimizer, tokens=training.tokens), search)
        try:
            for _ in range(MOST_STEPS):
                if not running.on_step(training.step()):
                    break
        finally:
            running.close()
    gain = search.book.gain
    return {
        "chosen": str(search.book.incumbent.setting),
        "gain": None if gain is None else gain.share,
        "error": 0.0 if gain is None else 2 * gain.error,
        "measurements": search.measurements,
        "steps": training.optimizer.steps,
        "spent_s": search.cost.spent_s,
        "elapsed_s": search.cost.elapsed_s,
        "stopped": sentence(search.notes[-1]),
    }
