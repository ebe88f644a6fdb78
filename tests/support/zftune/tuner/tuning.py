"""`zftune tune` on the built-in workload's loop, with a model and a rig that are small enough."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from tests.support.zftune.fixtures import rig_text
from zftune.builtin import OnStep
from zftune.explain.screen import render
from zftune.tuner.search import SearchOptions
from zftune.tuner.tuner import Tuner

THINKING_S = 0.25


def shown(document: dict[str, Any]) -> str:
    out = io.StringIO()
    Console(width=120, file=out).print(render(document))
    return out.getvalue()


def watch(done: int, tuner: Tuner) -> None:
    """Nobody looks."""


def interrupt_after(measurements: int) -> OnStep:
    def on_step(done: int, tuner: Tuner) -> None:
        if tuner.search is not None and tuner.search.measurements == measurements:
            raise KeyboardInterrupt

    return on_step


@pytest.fixture
def quick(tmp_path: Path, mini_model: Path) -> dict[str, Any]:
    """Short steps, whose times do not matter."""
    rig, text = tmp_path / "quick.toml", tmp_path / "text.txt"
    rig.write_text(rig_text("quick", forward_ms=3, backward_ms=3, d2h_ms=1, host_ms=4, h2d_ms=1, scale=1))
    text.write_text("to be, or not to be, that is the question: " * 200)
    search = SearchOptions(thinking_s=THINKING_S, most_measurements=24)
    return {"model": str(mini_model), "rig": str(rig), "text": str(text), "sequence": 8, "search": search}
