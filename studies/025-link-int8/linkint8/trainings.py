"""The trainings, in the order of their worth; finished ones are lines of a file, as study 003 keeps them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from convergence.analysis import interval
from convergence.setting import Regime
from convergence.store import Store
from convergence.train import World

from linkint8.coding import FACTORIAL, FEW, FINE, Code
from linkint8.numerics import Coded, published, run

WHERE: tuple[tuple[Regime, float], ...] = (
    ("fine-tuning", 1e-4),
    ("from scratch", 1e-4),
    ("fine-tuning", 1e-5),
    ("from scratch", 1e-3),
)
"""Regimes and learning rates of study 003; codes are all tried in the first."""
SEEDS = (0, 1, 2)
OTHERS = tuple(code for code in (*FACTORIAL, FINE) if code not in FEW)


def wanted(seeds: tuple[int, ...] = SEEDS) -> Iterator[tuple[Coded, Code | None]]:
    """Every training, those that answer most first."""
    for regime, lr in WHERE[:2]:
        for seed in seeds:
            for code in (None, *FEW):
                yield published(regime, lr, seed, code), code
    for seed in seeds:
        for code in OTHERS:
            yield published(*WHERE[0], seed, code), code
    for regime, lr in WHERE[2:]:
        for seed in seeds:
            for code in (None, *FEW):
                yield published(regime, lr, seed, code), code


def trained(
    world: World,
    file: Path,
    seeds: tuple[int, ...],
    origin: dict[str, Any],
    most: int | None,
    say: Callable[[str], None],
) -> Store:
    """Run what is missing, at most so many, and give all that is there."""
    store = Store(file, {**world.describe(), "study": "025"})
    missing = [one for one in wanted(seeds) if store.get(one[0]) is None]
    for number, (setting, code) in enumerate(missing[:most], 1):
        say(f"{number} of {len(missing)}: {setting.key}")
        store.put(setting, run(world, setting, code), origin)
    return store


def excesses(store: Store, seeds: tuple[int, ...]) -> list[dict[str, Any]]:
    """Of each regime, rate and code: held-out loss over bf16's at the same seed, in percent of it."""
    codes = (*FEW, *OTHERS)
    found = []
    for regime, lr in WHERE:
        for code in codes:
            pairs = [[store.get(published(regime, lr, seed, one)) for one in (None, code)] for seed in seeds]
            values = [
                100 * (coded["held_out"] - plain["held_out"]) / plain["held_out"]
                for plain, coded in pairs
                if plain is not None and coded is not None
            ]
            if values:
                mean = interval(values)
                found.append(
                    {"regime": regime, "lr": lr, "code": code.name, "mean": mean.mean, "half": mean.half, "n": mean.n}
                )
    return found
