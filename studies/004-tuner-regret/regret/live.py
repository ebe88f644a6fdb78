"""The tuner on a rig for real: knobs that change while a model trains; judged by the grid."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from studykit import Results, code_digest

from regret.grid import CODE, Times, mean_ms
from regret.replay import MOST_MEASUREMENTS
from regret.scene import BASE, START, Scene, space
from zftune.tuner.builtin import Training
from zftune.tuner.live import LiveSearch
from zftune.tuner.search import Search, SearchOptions

RIGS = ("slow-core", "link-bound")
THINKING_S = 0.5
"""Simulated time that a thought takes, a few steps."""
_WARM_UP_STEPS = 16
MOST_STEPS = 4000


def live(rig: str, times: Times, results: Results, *, again: bool, tell: Callable[[int], None]) -> dict[str, Any]:
    """One search on one rig.

    Args:
        rig: its name.
        times: its grid.
        results: of the study.
        again: whether to search in any case.
        tell: told steps done.
    """
    scene = Scene(rig)
    inputs = {
        "rig": rig,
        "values": dict(scene.spec.values),
        "effects": dict(scene.spec.effects),
        "most_measurements": MOST_MEASUREMENTS,
        "thinking_s": THINKING_S,
        "code": code_digest(*CODE, "zftune/tuner/search.py", "zftune/tuner/live.py", "zftune/planner"),
    }
    record = None if again else results.load(f"live--{rig}", inputs)
    if record is None:
        record = results.save(f"live--{rig}", inputs, _searched(scene, tell))
    figures: dict[str, Any] = record["figures"]
    of = {str(setting): mean_ms(window) for setting, window in times.items()}
    chosen, best = of[figures["chosen"]], min(of.values())
    return {**figures, "regret": chosen / best - 1, "over_start": chosen / of[str(START)] - 1}


def _searched(scene: Scene, tell: Callable[[int], None]) -> dict[str, Any]:
    options = SearchOptions(most_measurements=MOST_MEASUREMENTS, thinking_s=THINKING_S)
    search = Search(space(), START, scene.forecast, scene.planned[:1], options)
    with Training(scene.task(), BASE) as training:
        for _ in range(_WARM_UP_STEPS):
            training.step()
        running = LiveSearch(training.optimizer, search, tokens=training.tokens)
        try:
            for done in range(MOST_STEPS):
                tell(done)
                loss = training.step()
                if not running.on_step(loss):
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
        "stopped": search.notes[-1].reason,
    }
