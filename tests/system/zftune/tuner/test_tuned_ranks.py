"""`zftune tune` on several ranks, each a process of its own."""

from __future__ import annotations

import multiprocessing
from pathlib import Path
from typing import Any

import pytest

from tests.support.zftune.fixtures import rig_text
from tests.support.zftune.tuner.tuning import THINKING_S, interrupt_after, quick, shown, watch
from zftune.builtin import TuneOptions, tune
from zftune.store.store import Store
from zftune.tuner.search import SearchOptions

__all__ = ["quick"]


def of_ranks(quick: dict[str, Any], tmp_path: Path, ranks: int) -> TuneOptions:
    """A rig of ranks that take as long for their rows as one takes for all."""
    rig = tmp_path / f"{ranks}.toml"
    times = {"d2h_ms": ranks, "host_ms": 120 * ranks, "h2d_ms": ranks}
    rig.write_text(rig_text("ranks", forward_ms=10, backward_ms=20, **times, scale=1))
    return TuneOptions(**{**quick, "rig": str(rig)}, ranks=ranks, micro_batch=2 // ranks, quality="loose", fresh=True)


def test_two_ranks_find_what_one_finds(quick: dict[str, Any], tmp_path: Path, store: Store) -> None:
    quick["search"] = SearchOptions(sampler="random", most_measurements=8, thinking_s=THINKING_S)
    one, two = (tune(of_ranks(quick, tmp_path, ranks), watch, store) for ranks in (1, 2))
    assert two["start"]["step_ms"] == pytest.approx(one["start"]["step_ms"], rel=0.005)
    # Their batches are others, so that the quality may allow them other windows.
    assert two["best"]["step_ms"] == pytest.approx(one["best"]["step_ms"], rel=0.05)
    assert two["gain"]["share"] == pytest.approx(one["gain"]["share"], abs=0.05)
    assert two["best"]["step_ms"] < two["start"]["step_ms"]  # of two settings by chance one is faster
    assert "2 ranks, state sharded" in shown(two)


def test_ctrl_c_ends_all_ranks(quick: dict[str, Any], tmp_path: Path, store: Store) -> None:
    before = multiprocessing.active_children()  # of other tests
    document = tune(of_ranks(quick, tmp_path, 2), interrupt_after(1), store)
    assert (document["interrupted"], document["measurements"]) == (True, 1)
    assert set(multiprocessing.active_children()) <= set(before)
