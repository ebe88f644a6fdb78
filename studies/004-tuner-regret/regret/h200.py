"""The tuner alone under the noise of a real GPU: on a grid's times, by the driver of study 022."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from studykit import Job, code_digest, of_study

from regret.grid import Times
from regret.scene import RIGS, START, scene_of, space
from zftune.emulation.machines import load_rig
from zftune.tuner.search import SearchOptions

NOISE = "h200-4k"
"""The rig whose noise it is."""
STEPS, MARKS = 2000, (500, 1000, 2000)
_STUDY = "022-noise"


def job(rig: str, times: Times, seeds: int, code: Sequence[str]) -> Job:
    """Searches on one rig's grid; `code` is that of the tuner."""
    driver = "zftune/emulation/noise.py", *(f"studies/{_STUDY}/noisy/{part}.py" for part in ("driver", "scenes"))
    own = (f"studies/004-tuner-regret/regret/{part}.py" for part in ("h200", "scene"))
    inputs = {
        "rig": rig,
        "noise": NOISE,
        "steps": STEPS,
        "seeds": seeds,
        "grid_ms": [list(window) for window in times.values()],
        "code": code_digest(*code, *driver, *own),
    }
    return Job(f"{rig}--{NOISE}", inputs, searched, (rig, times, seeds))


def searched(rig: str, times: Times, seeds: int) -> dict[str, Any]:
    """One search for each seed, in a training of so many steps; like a daemon's, it does not end before that."""
    driver, scene = of_study(_STUDY, "noisy.driver"), scene_of(rig)
    noisy = of_study(_STUDY, "noisy.scenes").Scene(rig, space(), START, scene.planned[:1], times, scene.remembered)
    noise, found = load_rig(NOISE).noise, []
    for number in range(seeds):
        seed = 100 * list(RIGS).index(rig) + number
        course = driver.search_once(noisy, noise, seed, STEPS, SearchOptions(seed=seed, hold=True))
        found.append(
            {
                "regret": [course.at(mark) / noisy.best_ms - 1 for mark in MARKS],
                "over_start": course.at(STEPS) / noisy.mean(START) - 1,
                "adopted": course.adoptions,
                "restarts": course.restarts,
                "lost_steps": course.lost_steps,
                "changes": course.changes,
            }
        )
    return {"searches": found}
