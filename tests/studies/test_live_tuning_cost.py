"""Study 013: what is made of a search's steps, by hand; and that a training which waits for the thinking shows."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

STUDY = Path(__file__).parents[2] / "studies" / "013-live-tuning-cost"


@pytest.fixture(scope="module")
def livecost() -> Iterator[Any]:
    """Its parts; they are not importable from anywhere else."""
    before = list(sys.path)
    sys.path[:0] = [str(STUDY), str(STUDY.parent)]
    for part in ("gaps", "searching", "simulated"):
        importlib.import_module(f"livecost.{part}")
    yield importlib.import_module("livecost")
    sys.path[:] = before


def steps_of(livecost: Any, kinds: str, times: list[float]) -> list[Any]:
    names = {"t": "trial", "s": "settling", "p": "plain", "c": "thinking"}
    made = livecost.searching.Step
    return [
        made(number, names[kind], ms, 0.5, closed=number % 2 == 0)
        for number, (kind, ms) in enumerate(zip(kinds, times, strict=True), 1)
    ]


def test_thinking_steps_are_compared_with_plain_ones_at_the_same_place(livecost: Any) -> None:
    #                  1   2   3   4   5   6   7   8   9  10
    times = [9.0, 9.0, 12.0, 22.0, 10.0, 20.0, 11.0, 23.0, 9.0, 5.0]
    steps = steps_of(livecost, "ttssppcctp", times)
    closes = [2, 4, 6, 8, 10]
    (gap,) = livecost.gaps.gaps(steps)
    assert [one.number for one in gap] == [3, 4, 5, 6, 7, 8]
    thinking = livecost.gaps.extra(gap, closes)
    assert thinking == {"extra_ms": 4.0, "expected_ms": 30.0, "on_step_ms": 2.0, "all_ms": 64.0}
    settling = livecost.gaps.extra(gap, closes, "settling")
    assert (settling["extra_ms"], settling["expected_ms"]) == (4.0, 30.0)
    assert livecost.gaps.extra([one for one in gap if one.kind != "thinking"], closes) is None


def test_a_step_that_waits_while_somebody_thinks_shows(livecost: Any, every_fault: None) -> None:
    class WaitingDesk(livecost.searching.PatientDesk):  # type: ignore[misc]
        thoughts = 0

        def hand(self, outcome: Any) -> None:
            self.thoughts += 1
            super().hand(outcome)

        def poll(self) -> Any:
            if self.busy and not self.resting and self.thoughts == 2:
                self._clock.sleep(0.3)  # two steps
            return super().poll()

    found = livecost.simulated.searched(0, 6, WaitingDesk)
    first, second = (one["extra_ms"] / one["expected_ms"] for one in found["thinking"][:2])
    assert abs(first) < 1e-3
    assert second > 0.2
    assert found["balanced"] == found["weights"] > 0
    assert not all(kept for _, kept in livecost.simulated.verdicts([found]))
