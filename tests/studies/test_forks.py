"""Study 018: a run's figures, what is promised of workers, and that memory can be given back to children at all."""

from __future__ import annotations

import mmap
import multiprocessing
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.studies.test_studies import STUDIES, load


@pytest.fixture(scope="module")
def study() -> Any:
    return load(STUDIES / "018-forks" / "run.py")


def run(*, first_s: float = 2.0, faults: float = 100.0, together: float = 500.0, huge: float = 64.0) -> dict[str, Any]:
    """Two epochs of three steps."""
    memory: dict[str, float] = {"rss": 400.0, "together": together, "huge": huge, "available": 900.0}
    steps: list[dict[str, float]] = [
        {"step_s": step_s, "cpu_s": 2.0 * step_s, "faults": faults} for step_s in (first_s, 1.0, 1.2)
    ]
    epochs = [{"steps": steps, "memory": memory | {"together": together - number}} for number in range(2)]
    return {
        "before": memory | {"huge": 64.0, "available": 1000.0},
        "epochs": epochs,
        "after": memory,
    }


def test_figures_are_beside_those_of_the_run_without_workers(study: Any) -> None:
    pairs = [(run(), run(first_s=5.0, faults=110, together=520.0)), (run(first_s=4.0), run(first_s=6.0, huge=0.0))]
    found = study.side_of(pairs)
    assert found["first_step_s"] == {"median": 5.5, "p5": 5.0, "p95": 6.0, "n": 4}
    assert found["step_s"]["median"] == 1.2
    assert found["step_s"]["n"] == 12
    assert found["ratios"]["first_step_s"] == {"median": 2.0, "p5": 1.5, "p95": 2.5, "n": 4}
    assert found["ratios"]["step_s"]["median"] == 1.0
    assert found["ratios"]["cpu_s"]["median"] == pytest.approx((7.2 / 4.2 + 8.2 / 6.2) / 2)
    assert found["ratios"]["faults"]["median"] == pytest.approx(1.05)
    assert found["ratios"]["together_mib"]["median"] == pytest.approx(1.02)
    assert found["large_kept"]["median"] == 0.5


@pytest.mark.parametrize(
    ("other", "broken"),
    [
        ({}, set()),
        ({"faults": 104, "together": 524.0}, set()),
        ({"faults": 106}, {"page faults within 5%"}),
        ({"together": 526.0}, {"memory within 5%"}),
        ({"huge": 62.0}, {"large pages stay whole"}),
    ],
)
def test_what_is_promised(study: Any, other: dict[str, float], broken: set[str]) -> None:
    sides = {study.NONE: study.side_of([(run(), run())]), study.WORKERS: study.side_of([(run(), run(**other))])}
    assert {promise for promise, kept in study.done(sides).items() if not kept} == broken


def test_memory_is_kept_from_children_and_given_to_them(study: Any) -> None:
    pages = 4
    piece = mmap.mmap(-1, pages * mmap.PAGESIZE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    address = np.frombuffer(piece, np.uint8).ctypes.data
    for advice, kept in ((mmap.MADV_DONTFORK, True), (mmap.MADV_DOFORK, False)):
        study.advise(address + 1, pages * mmap.PAGESIZE - 1, advice)
        assert ("dc" in flags_of(address + mmap.PAGESIZE)) is kept
        assert "dc" not in flags_of(address)  # a page in which something else lies, too


def flags_of(address: int) -> list[str]:
    """The kernel's flags of a mapping."""
    found: list[str] = []
    inside = False
    for line in Path("/proc/self/smaps").read_text(encoding="utf-8").splitlines():
        if span := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
            inside = int(span[1], 16) <= address < int(span[2], 16)
        elif inside and line.startswith("VmFlags:"):
            found = line.split()[1:]
    return found


def test_a_run_of_a_small_size(study: Any) -> None:
    size = study.Size(weights=1, side=64, epochs=2, steps=2, rounds=1)
    here, there = multiprocessing.Pipe()
    for _ in range(size.epochs * size.steps):
        here.send(None)  # its turns, all at once
    study.train(study.NONE, size, there)
    kinds = [len(here.recv()) for _ in range(1 + size.epochs * (size.steps + 1) + 1)]
    assert kinds == [4, 3, 3, 4, 3, 3, 4, 4]  # memory and steps
