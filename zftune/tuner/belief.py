"""What is believed of the settings' step times: one normal distribution over their logarithms.

The planner's prediction is the mean, and it may be off alike for settings that are alike. A unit of a comparison is one
linear observation of it. The planner's own error is learnt from the units: of some candidates the most likely one.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import astuple, replace

import numpy as np
from numpy.typing import NDArray

from zftune.tuner.space import Setting, Space
from zftune.tuner.states import Lesson

Array = NDArray[np.float64]
Places = Callable[[Setting], Sequence[float]]
"""Of a setting on axes on which neighbours are about 1 apart."""

MOST = 96
"""Settings of a large space that the planner is asked about, beside neighbours: each prediction takes milliseconds."""
ERRORS_OF_PLANNER = (0.1, 0.15, 0.2, 0.3)
"""Standard deviation of the logarithm of its ratio of two unlike settings."""
_EXPECTED = 0.1
_LENGTH = 1.5
_ALIKE = 0.6
_LAG = 1.5
_LEAST_UNITS = 3
_MOST_UNITS = 64
"""That the planner's error is learnt from."""
_KNOBS = ("topk_ratio", "update_interval", "offload_ratio", "host_threads")


class Belief:
    """A normal distribution over the logarithms of the settings' times; the planner's predictions are its mean."""

    def __init__(self, forecast_ms: Mapping[Setting, float], places: Places, lessons: Iterable[Lesson] = ()) -> None:
        self.settings = list(forecast_ms)
        self._at = {setting: index for index, setting in enumerate(self.settings)}
        where = np.array([places(setting) for setting in self.settings], dtype=np.float64)
        apart = ((where[:, None, :] - where[None, :, :]) ** 2).sum(axis=2)
        self._alike: Array = _ALIKE * np.exp(-apart / (2 * _LENGTH**2)) + (1 - _ALIKE) * np.eye(len(self.settings))
        self._prior: Array = np.log(np.array(list(forecast_ms.values()), dtype=np.float64))
        self._lessons: list[Lesson] = []
        self.planner_error = _EXPECTED
        self._fold()
        for lesson in lessons:
            self.learn(lesson)

    def __contains__(self, setting: Setting) -> bool:
        return setting in self._at

    def lesson(self, incumbent: Setting, challenger: Setting, gain: float, variance: float) -> Lesson:
        return Lesson(self._at[incumbent], self._at[challenger], gain, variance)

    def learn(self, lesson: Lesson) -> None:
        self._lessons.append(lesson)
        if _LEAST_UNITS <= len(self._lessons) <= _MOST_UNITS and (error := self._likeliest()) != self.planner_error:
            self.planner_error = error
            self._fold()
        else:
            self._update(lesson)

    @property
    def is_flat(self) -> bool:
        """Whether all settings are predicted to be equally fast."""
        return float(np.ptp(self._prior)) < 1e-9

    def gain(self, incumbent: Setting, challenger: Setting) -> tuple[float, float]:
        """Mean and standard deviation of a challenger's gain."""
        mean, sd = self._gains(incumbent)
        return float(mean[self._at[challenger]]), float(sd[self._at[challenger]])

    def improvements(self, incumbent: Setting) -> Array:
        """Expected improvement of every setting over the incumbent, in the order of `settings`."""
        mean, sd = self._gains(incumbent)
        z = mean / sd
        density = np.exp(-(z**2) / 2) / math.sqrt(2 * math.pi)
        share = 0.5 * (1 + np.array([math.erf(one / math.sqrt(2)) for one in z]))
        found: Array = sd * density + mean * share
        found[self._at[incumbent]] = 0.0
        return found

    def _gains(self, incumbent: Setting) -> tuple[Array, Array]:
        i = self._at[incumbent]
        variance = self._covariance[i, i] + np.diag(self._covariance) - 2 * self._covariance[i]
        return self._mean[i] - self._mean, np.sqrt(np.maximum(variance, 1e-12))

    def _fold(self) -> None:
        self._mean: Array = self._prior.copy()
        self._covariance: Array = self.planner_error**2 * self._alike
        for lesson in self._lessons:
            self._update(lesson)

    def _update(self, lesson: Lesson) -> None:
        i, j = lesson.incumbent, lesson.challenger
        row = self._covariance[i] - self._covariance[j]
        total = row[i] - row[j] + lesson.variance
        weight = row / total
        self._mean = self._mean + weight * (lesson.gain - (self._mean[i] - self._mean[j]))
        self._covariance = self._covariance - np.outer(weight, row)

    def _likeliest(self) -> float:
        """The candidate under which the units' gains are most likely; the usual one is a bit more likely before."""
        i, j, seen, noise = map(np.array, zip(*(astuple(one) for one in self._lessons), strict=True))
        gains = seen - (self._prior[i] - self._prior[j])
        alike = self._alike
        shared = alike[np.ix_(i, i)] + alike[np.ix_(j, j)] - alike[np.ix_(i, j)] - alike[np.ix_(j, i)]

        def likelihood(error: float) -> float:
            covariance = error**2 * shared + np.diag(noise)
            _, determinant = np.linalg.slogdet(covariance)
            fit = float(gains @ np.linalg.solve(covariance, gains))
            return -0.5 * (fit + float(determinant)) - abs(math.log(error / _EXPECTED))

        return max(ERRORS_OF_PLANNER, key=likelihood)


def doubted(lessons: Sequence[Lesson], error: float) -> list[Lesson]:
    """Lessons after a change of the machine that was counted: each pair is known no better than `error` from them."""
    often = Counter((one.incumbent, one.challenger) for one in lessons)
    return [replace(one, variance=one.variance + often[one.incumbent, one.challenger] * error**2) for one in lessons]


def far_apart(settings: Sequence[Setting], places: Places, start: Setting, count: int) -> list[Setting]:
    """Settings that are far from the start and from each other, the farthest first: a first look without a planner."""
    where = np.array([places(one) for one in settings], dtype=np.float64)
    nearest = ((where - np.array(places(start), dtype=np.float64)) ** 2).sum(axis=1)
    found: list[Setting] = []
    while len(found) < count and nearest.max(initial=0.0) > 0:
        chosen = int(nearest.argmax())
        found.append(settings[chosen])
        nearest = np.minimum(nearest, ((where - where[chosen]) ** 2).sum(axis=1))
    return found


def pool_of(space: Space, known: Sequence[Setting], seed: int) -> list[Setting]:
    """The settings that may be proposed: all of a small space, else a sample, and the neighbours of the known ones."""
    allowed = list(space.settings())
    if len(allowed) <= MOST:
        return list(dict.fromkeys([*known, *allowed]))
    near = [neighbour for setting in known for neighbour in neighbours(space, setting)]
    sample = [allowed[index] for index in np.random.default_rng(seed).permutation(len(allowed))[:MOST]]
    return list(dict.fromkeys([*known, *near, *sample]))


def neighbours(space: Space, setting: Setting) -> list[Setting]:
    """Allowed settings that are one choice of one dimension away."""
    at = space.indices(setting)
    found = (
        space.setting({**at, dimension.name: index})
        for dimension in space.dimensions
        for index in (at[dimension.name] - 1, at[dimension.name] + 1)
        if 0 <= index < len(dimension.choices)
    )
    return [one for one in dict.fromkeys(found) if one != setting and space.violation(one) is None]


def places_of(settings: Sequence[Setting]) -> Places:
    """Axes on which the neighbouring choices of these settings are 1 apart."""

    def number(setting: Setting, name: str) -> float:
        value = getattr(setting, name)
        return float("inf") if value is None else float(value)  # default threads: the most that there are

    values = {name: sorted({number(one, name) for one in settings}) for name in _KNOBS}

    def places(setting: Setting) -> tuple[float, ...]:
        interval = setting.update_interval
        lag = 0.0 if interval == 1 else (setting.apply_lag - 1) / (interval - 1)
        on = [float(np.searchsorted(choices, number(setting, name))) for name, choices in values.items()]
        return (*on, _LAG * lag, float(setting.overlap_step))

    return places
