"""What a defect is, and the gradients that most of them are shown with."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

ROWS, COLUMNS = 6, 10
BIG = 10.0  # gradient of the columns that are to be selected, beside 1 elsewhere

Figure = float | str
"""A number in the case's unit, or what was raised."""


@dataclass(frozen=True, kw_only=True)
class Defect:
    """One defect as an experiment: the same gradients go to DeepSpeed, to the expectation and to this runtime."""

    title: str
    measure: str
    """What the figures count, and their unit."""
    settings: Mapping[str, Any]
    """DeepSpeed's configuration, whole."""
    expected: Callable[[], Figure]
    """The figure of torch's AdamW on fp32 masters, or by definition."""
    upstream: Callable[[], Figure]
    ours: Callable[[], Figure | None]
    """The figure of this runtime; None where it cannot do that yet."""
    control: Callable[[], tuple[Figure, Figure]] | None = None
    """Upstream's figure and the expected one where the cause is absent: the harness has to agree there."""
    control_is: str = ""
    tolerance: float = 1e-3
    """How far from the expected figure still agrees."""
    raises: bool = False
    """The defect is that upstream raises; elsewhere an exception is no figure, and no verdict."""
    by_design: bool = False
    """The paper's algorithm says so; a limit rather than an error."""
    ours_is: str = ""
    """How this runtime's case differs from upstream's, if it does."""
    quick: bool = False
    """Part of a short run."""
    limit_s: float = 120.0


def agrees(found: Figure | None, expected: Figure, tolerance: float) -> bool:
    """Whether a figure is the expected one; what was raised never is, unless that was expected."""
    if isinstance(found, str) or isinstance(expected, str) or found is None:
        return found == expected and found is not None
    return math.isfinite(found) and abs(found - expected) <= tolerance


def raised(attempt: Callable[[], Figure]) -> Figure:
    """A figure, or the type and first line of what was raised in its place."""
    try:
        return attempt()
    except Exception as error:  # noqa: BLE001 - whatever it is, it is the result
        return f"{type(error).__name__}: {next(iter(str(error).splitlines()), '')}"[:160]


def matrix(value: float | None = None, seed: int = 1) -> Tensor:
    """A `[ROWS, COLUMNS]` matrix of one value, or of random numbers."""
    if value is not None:
        return torch.full((ROWS, COLUMNS), value)
    return torch.randn(ROWS, COLUMNS, generator=torch.Generator().manual_seed(seed))


def constant(steps: int, big: Sequence[int] = (0,)) -> list[list[Tensor]]:
    """The same gradient in every step: 1, in some columns `BIG`. AdamW then moves everything by lr a step."""
    gradient = matrix(1.0)
    gradient[:, list(big)] = BIG
    return [[gradient] for _ in range(steps)]


def random(steps: int, big: Sequence[int] = (0,), scale: float = 1.0) -> list[list[Tensor]]:
    """Random gradients, greater in some columns so that these are always selected."""
    found = []
    for step in range(steps):
        gradient = matrix(seed=100 + step)
        gradient[:, list(big)] *= BIG
        found.append([gradient * scale])
    return found


def moved(before: Tensor, after: Tensor, lr: float, columns: Sequence[int]) -> float:
    """Mean distance that some columns went down, in learning rates."""
    return float((before.float() - after.float())[:, list(columns)].mean()) / lr


def furthest(a: Tensor, b: Tensor, lr: float, columns: Sequence[int]) -> float:
    """Largest distance between two weights in some columns, in learning rates."""
    return float((a.float() - b.float())[:, list(columns)].abs().max()) / lr
