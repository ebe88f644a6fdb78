"""Study 006: what is made of a grid and of a run, on figures worked out by hand."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

STUDY = Path(__file__).parents[2] / "studies" / "006-long-run"


@pytest.fixture(scope="module")
def longrun() -> Iterator[Any]:
    """Its parts; they are not importable from anywhere else."""
    before = list(sys.path)
    sys.path[:0] = [str(STUDY), str(STUDY.parent)]
    for part in ("figures", "grid", "scene"):
        importlib.import_module(f"longrun.{part}")
    yield importlib.import_module("longrun")
    sys.path[:] = before


@pytest.fixture(scope="module")
def grid(longrun: Any) -> Any:
    """Three settings: one that fits until sequences get longer, one that always does, one beyond the budget."""
    start = longrun.scene.START
    low, high = replace(start, offload_ratio=0.6), replace(start, offload_ratio=1.0)
    stale = replace(high, update_interval=16, apply_lag=16)
    times = ((10, 40, 5), (20, 40, 15), (30, 50, 20), (60, 100, 90))
    cells = {
        phase.name: {
            setting: longrun.grid.Cell(ms, 0, not (phase.sequences == 2 and setting == low))
            for setting, ms in zip((low, high, stale), row, strict=True)
        }
        for phase, row in zip(longrun.scene.PHASES, times, strict=True)
    }
    return longrun.grid.Grid(cells, {low: 0.4, high: 0.4, stale: 1.6}, 0.4)


def test_the_oracle_changes_and_the_best_fixed_setting_fits_everywhere(longrun: Any, grid: Any) -> None:
    found = longrun.figures.fixed(grid, 100)
    low, high, stale = grid.cost
    assert list(found.steps.values()) == [100, 100, 100, 50]
    assert list(found.oracle.values()) == [low, low, low, high]
    assert list(found.unconstrained.values()) == [stale, stale, stale, stale]
    assert found.best == high
    assert found.oracle_s == pytest.approx(1 + 2 + 3 + 5)
    assert found.best_s == pytest.approx(4 + 4 + 5 + 5)
    assert found.gap == pytest.approx(7 / 18)


def test_what_a_run_recovers(longrun: Any, grid: Any) -> None:
    of = longrun.figures.fixed(grid, 100)
    step_ms = [*[15.0] * 100, *[25.0] * 100, *[35.0] * 100, *[100.0] * 50]  # 12.5 s
    decisions = [
        {"kind": "reopen", "reason": "", "details": {"spent_s": 0.2, "elapsed_s": 5.0}},
        {"kind": "adopt", "reason": "", "details": {"spent_s": 0.5, "elapsed_s": 10.0}},
        {"kind": "remark", "reason": "", "details": {}},
    ]
    run = {
        "step_ms": step_ms,
        "begins": [1, 101, 201, 301],
        "decisions": decisions,
        "changes": [[100, {}], [130, {}]],
        "peaks": [(1, 900), (301, 1100), (313, 950)],
    }
    found = longrun.figures.recovery(run, of, 1000)
    assert found.recovered == pytest.approx((18 - 12.5) / 7)
    assert list(found.by_phase_s.values()) == pytest.approx([1.5, 2.5, 3.5, 5.0])
    assert (found.spent_s, found.reopened, found.steps_over) == (0.5, 1, 12)
    # 3% of 10 s, and 40 steps as they were before the first change, which are as long as the grant
    assert found.allowed_s == pytest.approx(0.3 + 40 * 0.015)
    kept = dict(longrun.figures.verdicts(of, [found], grid))
    assert all(kept.values())
    slow = {**run, "step_ms": [1.2 * ms for ms in step_ms], "decisions": [{**decisions[0], "details": {}}]}
    broken = longrun.figures.verdicts(of, [longrun.figures.recovery(slow, of, 1000)], grid)
    assert [text for text, kept in broken if not kept] == [
        "seed 0: the daemon recovers 43% of the gap, wanted 70%",
    ]


def test_the_script_has_three_changes_and_the_settings_are_told_apart(longrun: Any) -> None:
    scene = longrun.scene
    base = scene.spec().for_elements(scene.ELEMENTS)
    rigs = [phase.rig(base) for phase in scene.PHASES]
    assert [rig.link_d2h_gbps / base.link_d2h_gbps for rig in rigs] == [1, 0.5, 0.5, 0.5]
    assert [rig.host_gbps / base.host_gbps for rig in rigs] == [1, 1, 0.5, 0.5]
    assert [rig.forward_ms + rig.backward_ms for rig in rigs] == [32, 32, 32, 64]
    assert scene.START in scene.SETTINGS
    assert len(set(scene.SETTINGS)) == len(scene.SETTINGS)
    assert set(scene.QUICK_SETTINGS) < set(scene.SETTINGS)
