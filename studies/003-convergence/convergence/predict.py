"""Which quantity, measured before anything is late, tells whether replay will hurt, and by how much at most."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any

from convergence.analysis import HURTS_PERCENT, Runs, early, excess_percent, rank_correlation, separation
from convergence.probe import EARLY
from convergence.setting import Setting

LATER = (60, 120, 180, 240)
SETTLED = EARLY[1:]
"""Places at which AdamW's first, long steps are over: where the product measures movement."""
PROMISED = {"published": 0.3, "loose": 1.2}
"""Percent of the loss that late updates may cost at most, by quality."""

Quantity = Callable[[Setting, Mapping[str, Any]], float | None]


def _probed(name: str, places: Iterable[int]) -> Quantity:
    return lambda setting, probed: early(probed, name, setting.staleness, places)


def _turned_away(places: Iterable[int]) -> Quantity:
    def of(setting: Setting, probed: Mapping[str, Any]) -> float | None:
        cosine = early(probed, "cosine", setting.staleness, places)
        return None if cosine is None else 1.0 - cosine

    return of


QUANTITIES: dict[str, Quantity] = {
    "learning rate": lambda setting, _: setting.lr,
    "learning rate x staleness": lambda setting, _: setting.lr * setting.staleness,
    "weights moved, first 32 steps": _probed("moved", EARLY),
    "weights moved, later": _probed("moved", LATER),
    "gradient turned, first 32 steps": _probed("turned", EARLY),
    "gradient turned, steps 12 to 32": _probed("turned", EARLY[1:]),
    "gradient turned, later": _probed("turned", LATER),
    "1 - gradient cosine, first 32 steps": _turned_away(EARLY),
    "1 - gradient cosine, later": _turned_away(LATER),
    "loss gained in a window, first 32 steps": _probed("gained", EARLY),
    "loss gained in a window, later": _probed("gained", LATER),
}
"""Larger means more harm is expected; "first 32 steps" are a synchronous warm-up's, "later" is the whole run's."""


@dataclass(frozen=True, slots=True)
class Prediction:
    """How well a quantity goes with the excess of late runs."""

    quantity: str
    n: int
    correlation: float
    """Spearman's, with the excess in percent."""
    separation: float | None
    """Chance that a hurting setting has the larger value than one that is not."""
    largest_good: float | None
    smallest_bad: float | None


@dataclass(frozen=True, slots=True)
class Point:
    """A late run, its excess in percent, and the synchronous run that was probed."""

    setting: Setting
    excess: float
    probed: Mapping[str, Any]


def points(runs: Runs, settings: Iterable[Setting]) -> list[Point]:
    """The late runs that have a synchronous run and a probe beside them."""
    found = []
    for setting in settings:
        excess, probed = excess_percent(runs, setting), runs.get(setting.probe().key)
        if setting.lag and excess is not None and probed is not None:
            found.append(Point(setting, excess, probed))
    return found


def movement_percent(probed: Mapping[str, Any]) -> float | None:
    """How far a step moves the matrices, once AdamW's first steps are over; None: the run was too short for that."""
    moved = [at["1"]["moved"] for place in SETTLED if (at := probed["probes"].get(str(place)))]
    return 100.0 * fmean(moved) if len(moved) == len(SETTLED) else None


def late_percent(point: Point) -> float:
    """By how much of their norm weights move before late updates arrive: movement of a step x (1 - k) x staleness."""
    return (movement_percent(point.probed) or 0.0) * (1 - point.setting.ratio) * point.setting.staleness


@dataclass(frozen=True, slots=True)
class Bound:
    """Excess at most coefficient x late_percent squared: chosen on some settings, judged on others."""

    coefficient: float
    """The largest quotient of the settings that it was chosen on."""
    chosen: int
    judged: int
    above: int
    """Of those that it was judged on."""
    worst: float
    """The largest excess of these over what the bound says."""


def bound(chosen: Sequence[Point], judged: Sequence[Point]) -> Bound:
    """Choose it on some settings, and judge it on others."""
    coefficient = max(point.excess / late_percent(point) ** 2 for point in chosen)
    over = [point.excess / (coefficient * late_percent(point) ** 2) for point in judged]
    return Bound(coefficient, len(chosen), len(judged), sum(one > 1 for one in over), max(over))


def halves(found: Iterable[Point], count: int, seed: int = 0) -> Iterator[Bound]:
    """Bounds chosen on a random half of the trajectories (a regime at a rate) and judged on the other half."""
    groups: dict[tuple[str, float], list[Point]] = defaultdict(list)
    for point in found:
        groups[point.setting.regime, point.setting.lr].append(point)
    chance, names = random.Random(seed), sorted(groups)
    for _ in range(count):
        half = set(chance.sample(names, len(names) // 2))
        parts: tuple[list[Point], list[Point]] = ([], [])
        for name in names:
            parts[name not in half].extend(groups[name])
        yield bound(*parts)


def duels(runs: Runs, settings: Iterable[Setting]) -> list[Point]:
    """The same, but how much more excess replay has than the mean of the same knobs."""
    found = []
    for point in points(runs, settings):
        mean = excess_percent(runs, replace(point.setting, method="mean"))
        if mean is not None:
            found.append(replace(point, excess=point.excess - mean))
    return found


def predictions(found: Iterable[Point], limit: float = HURTS_PERCENT) -> list[Prediction]:
    """Every quantity on these points, the best first; harm is an excess above `limit`."""
    known = list(found)
    table = []
    for name, quantity in QUANTITIES.items():
        pairs = [(value, p.excess) for p in known if (value := quantity(p.setting, p.probed)) is not None]
        if len(pairs) < 3 or len({value for value, _ in pairs}) < 2 or len({excess for _, excess in pairs}) < 2:
            continue
        values, excesses = [value for value, _ in pairs], [excess for _, excess in pairs]
        hurts = [excess > limit for excess in excesses]
        good = [value for value, bad in zip(values, hurts, strict=True) if not bad]
        bad = [value for value, bad in zip(values, hurts, strict=True) if bad]
        table.append(
            Prediction(
                name,
                len(pairs),
                rank_correlation(values, excesses),
                separation(values, hurts),
                max(good, default=None),
                min(bad, default=None),
            )
        )
    return sorted(table, key=lambda row: (-(row.separation or 0.0), -row.correlation))
