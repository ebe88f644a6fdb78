"""Study 018: a run's figures, what is promised of workers, and that memory can be given back to children at all."""

from __future__ import annotations

import contextlib
import gc
import mmap
import multiprocessing
from typing import Any

import numpy as np
import pytest
import torch

from tests.mappings import flags_of, pages_kept_from_children
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


def test_memory_of_tensors_is_given_back_to_children_whatever_comes(study: Any) -> None:
    piece = mmap.mmap(-1, 4 * mmap.PAGESIZE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    tensors = torch.frombuffer(piece, dtype=torch.uint8).split(2 * mmap.PAGESIZE)
    with contextlib.suppress(KeyError), study.kept_from_children(tensors):
        assert all("dc" in flags_of(tensor.data_ptr()) for tensor in tensors)
        raise KeyError
    assert not any("dc" in flags_of(tensor.data_ptr()) for tensor in tensors)


def test_a_run_of_a_small_size(study: Any) -> None:
    size = study.Size(weights=1, side=64, epochs=2, steps=2, rounds=1)
    before = pages_kept_from_children()
    here, there = multiprocessing.Pipe()
    for _ in range(size.epochs * size.steps):
        here.send(None)  # its turns, all at once
    study.train(study.NONE, size, there)
    kinds = [len(here.recv()) for _ in range(1 + size.epochs * (size.steps + 1) + 1)]
    assert kinds == [4, 3, 3, 4, 3, 3, 4, 4]  # memory and steps
    gc.collect()  # with the optimizer ends the host memory, which no child has
    assert pages_kept_from_children() <= before  # others' that was freed meanwhile is missing
