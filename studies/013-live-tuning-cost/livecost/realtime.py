"""The searches in real time on this machine."""

from __future__ import annotations

import itertools
import statistics
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from studykit import spread

from livecost.gaps import extra, gaps
from livecost.searching import Run
from zftune.tuner.messages import sentence

ALLOWED = 0.01

Figures = Mapping[str, Any]


def searched(seed: int, most: int) -> dict[str, Any]:
    """One search."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder, Run(seed, most, Path(folder), real_time=True) as run:
        found = run.search()
    closes = [step.number for step in found.steps if step.closed]
    search = found.prepared.search
    return {
        "step_ms": statistics.median(step.ms for step in found.steps),
        "gaps": [one for gap in gaps(found.steps) if (one := extra(gap, closes)) is not None],
        "thinking_steps": sum(step.kind == "thinking" for step in found.steps),
        "steps": len(found.steps),
        "measurements": search.measurements,
        "settings_measured": sum(bool(trial.blocks) for trial in search.book.trials),
        "weights": found.weights,
        "balanced": found.balanced,
        "stopped": sentence(search.notes[-1]),
    }


def verdicts(runs: Sequence[Figures]) -> list[tuple[str, bool]]:
    """Each promise, and whether it was kept."""
    hooks = statistics.median(_hooks(runs))
    balanced, weights = (sum(run[name] for run in runs) for name in ("balanced", "weights"))
    return [
        (f"{hooks:.2%} of such a step is spent in the training thread", hooks <= ALLOWED),
        (f"{balanced} of {weights} ledgers are balanced after the search", balanced == weights),
    ]


def _hooks(runs: Sequence[Figures]) -> list[float]:
    gaps = itertools.chain.from_iterable(run["gaps"] for run in runs)
    return [gap["on_step_ms"] / gap["all_ms"] for gap in gaps]


def lines(runs: Sequence[Figures]) -> list[str]:
    """What was measured."""
    gaps = [gap for run in runs for gap in run["gaps"]]
    pooled = sum(gap["extra_ms"] for gap in gaps) / sum(gap["expected_ms"] for gap in gaps)
    step_ms, steps = statistics.median(run["step_ms"] for run in runs), sum(run["steps"] for run in runs)
    figures = {
        "of a step, in the training thread": spread(_hooks(runs)),
    }
    return [
        f"in the searches' own {len(gaps)} gaps: {pooled:+.1%}, with errors of several percent",
        f"{steps} steps of {step_ms:.1f} ms, {sum(run['measurements'] for run in runs)} measurements",
        *(
            f"{name}: {one['median']:.4f} [{one['p5']:.4f} - {one['p95']:.4f}], n = {one['n']}"
            for name, one in figures.items()
        ),
    ]
