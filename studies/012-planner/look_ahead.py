"""What longer windows win with `look_ahead="guess"`: planned steps on the rigs, and of models on machines.

.venv/bin/python studies/012-planner/look_ahead.py
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE.parent / "024-claims"), str(HERE.parent)]

from claims.rigs import MODEL, NEVER, rig_of  # noqa: E402
from claims.shapes import MACHINES, MODELS, ROOM  # noqa: E402

from zenflow import ZenFlowConfig  # noqa: E402
from zftune.emulation.machines import rig_names  # noqa: E402
from zftune.planner.choosing import fits  # noqa: E402
from zftune.planner.closed_form import predict  # noqa: E402
from zftune.planner.model import Job, Machine, ModelFacts  # noqa: E402
from zftune.planner.rates import Rates  # noqa: E402
from zftune.planner.simulate import simulate  # noqa: E402
from zftune.planner.split import split_of  # noqa: E402

PUBLISHED = ZenFlowConfig(topk_ratio=0.1, update_interval=4, staging_bytes=ROOM)
GUESS = ZenFlowConfig(topk_ratio=0.0, look_ahead="guess", window_phase="staggered", staging_bytes=ROOM)
WINDOWS = ((4, 1), (8, 1), (16, 1), (4, 2), (4, 3))
"""S and L; those with a longer lag lose too much of the loss (study 003), and show what it would win."""
SETTINGS = [replace(GUESS, update_interval=size, apply_lag=lag) for size, lag in WINDOWS]
TOKENS = 512


def rigs() -> list[list[str]]:
    """Steps over the published setting's, selections left out."""
    model, rows = ModelFacts.from_name(MODEL), []
    for name in rig_names():
        rates = Rates.of_rig(rig_of(name))
        steps = [
            simulate(rates, split_of(model, one), one).step_ms
            for one in (replace(config, select_interval=NEVER) for config in (PUBLISHED, *SETTINGS))
        ]
        rows.append([name, *(f"{step / steps[0]:.2f}" for step in steps[1:])])
    return rows


def shapes() -> list[list[str]]:
    """The same over models and machines where the published setting fits; and how many fit."""
    ratios: list[list[float]] = []
    fitting = [0] * (1 + len(SETTINGS))
    for name in MODELS:
        model = ModelFacts.from_name(name)
        for kind, counts in MACHINES.items():
            machine = Machine.load(kind)
            for gpus in counts:
                job = Job(seq=TOKENS, gpus=gpus, checkpointing=True)
                found = [predict(model, machine, job, config) for config in (PUBLISHED, *SETTINGS)]
                fit = [fits(one, machine) for one in found]
                fitting = [before + now for before, now in zip(fitting, fit, strict=True)]
                if fit[0]:
                    ratios.append([one.step_ms / found[0].step_ms for one in found[1:]])
    columns: list[tuple[float, ...]] = list(zip(*ratios, strict=True))
    rows = [[f"{how} of {len(ratios)}", *(f"{of(column):.2f}" for column in columns)] for how, of in _HOW.items()]
    return [*rows, [f"shapes that fit (published: {fitting[0]})", *map(str, fitting[1:])]]


_HOW: dict[str, Callable[[Sequence[float]], float]] = {
    "mean": statistics.fmean,
    "median": statistics.median,
    "least": min,
    "most": max,
}


def table(first: str, rows: Sequence[Sequence[str]]) -> str:
    """In Markdown."""
    head = [first, *(f"S = {size}, L = {lag}" for size, lag in WINDOWS)]
    lines = [head, ["---", *["---:"] * len(WINDOWS)], *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def main() -> None:
    """Write and print the tables."""
    title = "# 012: planned steps with a guess and k = 0, over those of the published setting (k = 0.1, S = L = 4)"
    text = "\n\n".join([title, table("rig", rigs()), table(f"shapes at {TOKENS} tokens", shapes())]) + "\n"
    (HERE / "results" / "look-ahead.md").write_text(text, encoding="utf-8")
    sys.stdout.write(text)


if __name__ == "__main__":
    main()
