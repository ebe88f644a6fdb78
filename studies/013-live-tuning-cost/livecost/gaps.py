"""The steps between two measurements: what they take while somebody thinks, beside what they take while nobody does."""

from __future__ import annotations

import itertools
import statistics
from collections import defaultdict
from collections.abc import Sequence
from typing import Literal

from livecost.searching import Step


def gaps(steps: Sequence[Step]) -> list[list[Step]]:
    """The steps of each gap; the last ones, after which nothing is measured, are none."""
    groups = [(trial, list(group)) for trial, group in itertools.groupby(steps, lambda one: one.kind == "trial")]
    return [group for trial, group in groups[:-1] if not trial]


def extra(
    gap: Sequence[Step], closes: Sequence[int], kind: Literal["thinking", "settling"] = "thinking"
) -> dict[str, float] | None:
    """What steps of a kind take beyond plain ones at the same place of a window, in all; None: there are none.

    Args:
        gap: its steps.
        closes: the steps that closed a window.
        kind: while somebody thinks, or just after a change of knobs.
    """
    usual: dict[int, list[float]] = defaultdict(list)
    for one in gap:
        if one.kind == "plain":
            usual[_place(one.number, closes)].append(one.ms)
    known = [one for one in gap if one.kind == kind and _place(one.number, closes) in usual]
    if not known:
        return None
    expected = sum(statistics.fmean(usual[_place(one.number, closes)]) for one in known)
    return {
        "extra_ms": sum(one.ms for one in known) - expected,
        "expected_ms": expected,
        "on_step_ms": sum(one.on_step_ms for one in gap if one.kind != "settling"),
        "all_ms": sum(one.ms for one in gap if one.kind != "settling"),
    }


def _place(step: int, closes: Sequence[int]) -> int:
    """Steps since the last close."""
    return step - max((close for close in closes if close < step), default=0)
