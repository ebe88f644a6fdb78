"""Searches on a measured grid: its times with fresh noise on every step, in place of training."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from regret.grid import Times, mean_ms
from regret.scene import SETTINGS, START, Scene, space
from zftune.tuner.evidence import block_steps, block_value
from zftune.tuner.search import Search, SearchOptions
from zftune.tuner.space import Setting
from zftune.tuner.states import Outcome, Request

MOST_MEASUREMENTS = 24
_TOKENS = 32


@dataclass(frozen=True, slots=True)
class Result:
    """Where a search ended. Times are those of the grid, without noise."""

    chosen: Setting
    regret: float
    """Of the best setting's time, how much more the chosen one takes."""
    over_start: float
    """Of the starting point's time, how much more the chosen one takes; below 0: less."""
    stated_error: float
    """Two standard errors of the gain that the search states; 0 where it states none."""
    measurements: int
    lost_steps: float
    """What exploring took beyond the starting point's time, in steps of it."""


class Bench:
    """Stands for a training run.

    Args:
        times: of the rig's grid.
        noise: standard deviation of the logarithm of a step's time.
        seed: of the noise.
    """

    def __init__(self, times: Times, noise: float, seed: int) -> None:
        self.times, self.noise = times, noise
        self._random = np.random.default_rng([seed, 4])
        self.measurements = 0
        self._start_ms = mean_ms(times[START])
        self._lost_ms = 0.0

    def steps(self, setting: Setting, count: int) -> list[float]:
        """Step times from the first step of a window on, ms."""
        window = self.times[setting]
        noise = np.exp(self.noise * self._random.standard_normal(count))
        self._lost_ms += count * max(0.0, mean_ms(window) - self._start_ms)
        return [window[index % len(window)] * float(noise[index]) for index in range(count)]

    def measure(self, request: Request) -> Outcome:
        """What training would have shown."""
        discarded = self.steps(request.setting, request.discard)
        every: list[float] = []
        for _ in range(request.steps // request.setting.update_interval):
            for step in self.steps(request.setting, request.setting.update_interval):
                every.append(step)
                if request.ends_early(discarded, every):
                    return Outcome("measured", tuple(every), tuple(discarded), _TOKENS)
        return Outcome("measured", tuple(every), tuple(discarded), _TOKENS)

    def look(self, setting: Setting) -> float:
        """One measurement's score for those who have no other: as many steps, scored alike. Microseconds a token."""
        self.measurements += 1
        interval = setting.update_interval
        self.steps(setting, interval)  # the first window after a change does not count
        return 1e3 * math.exp(block_value(self.steps(setting, block_steps(interval)))) / _TOKENS

    def result(self, chosen: Setting, stated_error: float, measurements: int) -> Result:
        """What the choice is worth."""
        best = min(mean_ms(window) for window in self.times.values())
        of_chosen, of_start = mean_ms(self.times[chosen]), mean_ms(self.times[START])
        lost = self._lost_ms / self._start_ms
        return Result(chosen, of_chosen / best - 1, of_chosen / of_start - 1, stated_error, measurements, lost)


def tuned(scene: Scene, bench: Bench, seed: int) -> Result:
    """The tuner, as it is."""
    search = Search(
        space(),
        START,
        scene.remembered,
        scene.planned[:1],
        SearchOptions(seed=seed, most_measurements=MOST_MEASUREMENTS),
    )
    while (request := search.next()) is not None:
        search.tell(bench.measure(request))
    gain = search.book.gain
    error = 0.0 if gain is None else 2 * gain.error
    return bench.result(search.book.incumbent.setting, error, search.measurements)


def planned(scene: Scene, bench: Bench, seed: int) -> Result:
    """The planner alone: its first choice, unmeasured."""
    del seed
    return bench.result(scene.planned[0], 0.0, 0)


def random_alone(scene: Scene, bench: Bench, seed: int) -> Result:
    """As many settings at random, the best that was seen."""
    del scene
    order = np.random.default_rng([seed, 5]).permutation(len(SETTINGS))[: MOST_MEASUREMENTS - 1]
    seen = {setting: bench.look(setting) for setting in (START, *(SETTINGS[index] for index in order))}
    return bench.result(min(seen, key=lambda one: seen[one]), 0.0, bench.measurements)


def gp_alone(scene: Scene, bench: Bench, seed: int) -> Result:
    """Optuna's GPSampler without planner, constraint and comparison: the best that was seen."""
    import optuna

    del scene
    return _asked(bench, optuna.samplers.GPSampler(seed=seed))


def tpe_alone(scene: Scene, bench: Bench, seed: int) -> Result:
    """Optuna's TPESampler, likewise."""
    import optuna

    del scene
    return _asked(bench, optuna.samplers.TPESampler(seed=seed))


def _asked(bench: Bench, sampler: object) -> Result:
    """Settings outside the quality are not run, cost nothing and are told as what they are."""
    import optuna
    from optuna.distributions import IntDistribution

    whole = space()
    study = optuna.create_study(sampler=sampler)  # type: ignore[arg-type]
    choices = {one.name: IntDistribution(0, len(one.choices) - 1) for one in whole.dimensions}
    study.enqueue_trial(whole.indices(START))
    seen: dict[Setting, list[float]] = {}
    for _ in range(10 * MOST_MEASUREMENTS):
        trial = study.ask(choices)  # type: ignore[arg-type]
        setting = whole.setting(trial.params)
        violation = whole.violation(setting)
        trial.set_constraint("quality", -1.0 if violation is None else violation.excess)
        if violation is None:
            seen.setdefault(setting, []).append(bench.look(setting))
        study.tell(trial, math.log(np.mean(seen[setting]) if violation is None else seen[START][0]))
        if bench.measurements == MOST_MEASUREMENTS:
            break
    return bench.result(min(seen, key=lambda one: float(np.mean(seen[one]))), 0.0, bench.measurements)


RIVALS: dict[str, Callable[[Scene, Bench, int], Result]] = {
    "tuner": tuned,
    "planner alone": planned,
    "GP alone": gp_alone,
    "TPE alone": tpe_alone,
    "random": random_alone,
}
