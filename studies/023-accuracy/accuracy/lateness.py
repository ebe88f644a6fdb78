"""How much late updates cost at most: what bounds replay's loss on half of the problems, judged on the other half."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from accuracy.training import SHORTER, STALENESS

OF_MOVEMENT = 10.2
"""Study 003's: percent of the loss for late updates by 1% of the weights, with the square."""
_DEFERRED = 0.95  # of the columns: 1 - k
_DELAYS: Mapping[str, float] = {"replay": STALENESS, **{str(name): float(size) for name, size in SHORTER.items()}}


@dataclass(frozen=True, slots=True)
class Point:
    """Replay on a problem, in one setting: means over the seeds that AdamW has too."""

    problem: str
    steps: int
    lr: float
    variant: str
    seeds: int
    excess: float
    """Percent of AdamW's loss."""
    moved: float
    """How far the matrices move in a step of AdamW where they move furthest, in percent."""
    fall: float
    """How much AdamW's training loss falls in a step where it falls fastest, in percent of the held-out loss."""

    @property
    def late_steps(self) -> float:
        """(1 - k) times the mean staleness."""
        return _DEFERRED * _DELAYS[self.variant]

    @property
    def late_percent(self) -> float:
        """By how much of their norm weights move before late updates arrive."""
        return self.moved * self.late_steps

    @property
    def share(self) -> float:
        """Of the run that updates are late by, in percent."""
        return 100 * self.late_steps / self.steps


Quantity = Callable[[Point], float]
QUANTITIES: Mapping[str, tuple[Quantity, float]] = {
    "movement, squared": (lambda point: point.late_percent**2, 0.0),
    "loss that falls meanwhile": (lambda point: point.fall * point.late_steps, 0.0),
    "share of the run": (lambda point: point.share, 0.0),
    "loss that falls meanwhile, beside movement": (lambda point: point.fall * point.late_steps, OF_MOVEMENT),
    "share of the run, beside movement": (lambda point: point.share, OF_MOVEMENT),
}
"""What a coefficient is chosen for, and that of the movement squared, which is study 003's and fixed."""


def read(folder: Path) -> list[Point]:
    """All that is known of replay, in this folder and those below it, but for the short form's."""
    known: dict[tuple[str, int, float], dict[str, Mapping[str, Any]]] = {}
    for file in sorted(one for one in folder.rglob("*.json") if one.parent.name != "quick"):
        record = json.loads(file.read_text(encoding="utf-8"))
        problem, _, variant = file.stem.partition("-")
        if "runs" in record["figures"]:
            key = problem, record["inputs"]["steps"], record["inputs"]["lr"]
            known.setdefault(key, {})[variant] = record["figures"]["runs"]
    return [
        point(key, variant, of[variant], of["AdamW"])
        for key, of in sorted(known.items())
        for variant in _DELAYS
        if variant in of and "AdamW" in of
    ]


def point(key: tuple[str, int, float], variant: str, late: Mapping[str, Any], adamw: Mapping[str, Any]) -> Point:
    """A setting's figures.

    Args:
        key: problem, steps and learning rate.
        variant: of replay.
        late: its runs, by seed.
        adamw: AdamW's.
    """
    pairs = [(late[seed], adamw[seed]) for seed in sorted(late) if seed in adamw]
    tenth = max(1, key[1] // 10)
    return Point(
        *key,
        variant,
        len(pairs),
        100 * fmean(own["loss"] / other["loss"] - 1 for own, other in pairs),
        100 * fmean(max(other["moved"].values()) for _, other in pairs) / STALENESS,
        100 * fmean(_steepest(other["training"]) / other["loss"] for _, other in pairs) / tenth,
    )


def _steepest(tenths: Sequence[float]) -> float:
    return max(before - after for before, after in itertools.pairwise(tenths))


def bound(chosen: Sequence[Point], judged: Sequence[Point], name: str) -> tuple[float, list[float]]:
    """A quantity's least coefficient that covers some points, and the others' excess over what it then says.

    Args:
        chosen: that it has to cover.
        judged: the others.
        name: of the quantity.
    """
    quantity, of_movement = QUANTITIES[name]
    least = max(0.0, *((one.excess - of_movement * one.late_percent**2) / quantity(one) for one in chosen))
    return least, [one.excess / (least * quantity(one) + of_movement * one.late_percent**2) for one in judged]


def halves(points: Sequence[Point]) -> Iterator[tuple[str, list[Point], list[Point]]]:
    """Every half of the problems to choose on, with the other half to judge on."""
    problems = sorted({one.problem for one in points})
    for half in itertools.combinations(problems, len(problems) // 2):
        chosen, judged = ([one for one in points if (one.problem in half) is own] for own in (True, False))
        yield ", ".join(half), chosen, judged


def markdown(points: Sequence[Point]) -> str:
    """The points, and each quantity's bounds."""
    lines = ["# 023: how much late updates cost", "", "Replay's loss over AdamW's at the same seed.", ""]
    head = "problem | steps | rate | S = L | seeds | excess, % | late, % | 10.2 late², % | % of the run | over that"
    lines += [f"| {head} |", "|---" + "|---:" * head.count("|") + "|"]
    lines += [
        f"| {one.problem} | {one.steps} | {one.lr:g} | {_DELAYS[one.variant]:g} | {one.seeds} | {one.excess:+.2f} "
        f"| {one.late_percent:.3f} | {OF_MOVEMENT * one.late_percent**2:.2f} | {one.share:.2f} "
        f"| {one.excess / one.share:+.2f} |"
        for one in points
    ]
    lines += [
        "",
        "Excess at most a coefficient times a quantity, chosen on one half of the problems, judged on the other:",
    ]
    lines += ["", "| chosen on | " + " | ".join(QUANTITIES) + " |", "|---|" + "---:|" * len(QUANTITIES)]
    for name, chosen, judged in halves(points):
        cells = [name]
        for quantity in QUANTITIES:
            least, over = bound(chosen, judged, quantity)
            cells.append(f"{least:.3g}: {sum(one > 1 for one in over)} of {len(over)} above, worst {max(over):.2f}")
        lines.append(f"| {' | '.join(cells)} |")
    everywhere = [f"{bound(points, points, quantity)[0]:.3g}" for quantity in QUANTITIES]
    return "\n".join([*lines, f"| all | {' | '.join(everywhere)} |"]) + "\n"
