"""Does the daemon keep a long run tuned, where the link, the host and the sequences change while it trains?

See README.md beside this file.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

from longrun.figures import Fixed, Recovery, fixed, recovery, verdicts  # noqa: E402
from longrun.grid import Cell, Grid, measured  # noqa: E402
from longrun.plot import write_page  # noqa: E402
from longrun.scene import MEMORY_BYTES, PHASES, QUICK_SETTINGS, SETTINGS, spec  # noqa: E402
from longrun.tuned import COMPRESSION, GRANT_S, THINKING_S, tuned  # noqa: E402
from rich.console import Console  # noqa: E402
from rich.progress import Progress  # noqa: E402
from rich.table import Table  # noqa: E402
from studykit import Job, Results, code_digest, done, parser, write_json  # noqa: E402

from zftune.planner.choosing import LEAST_HEADROOM_BYTES  # noqa: E402
from zftune.tuner.space import Setting  # noqa: E402

SEEDS, FIRST_STEPS, LEAST_STEPS = 3, 1000, 16
QUICK_SEEDS, QUICK_FIRST_STEPS, QUICK_LEAST_STEPS = 1, 160, 8
GRID_CODE = ("runtime/zenflow", *(f"studies/006-long-run/longrun/{name}.py" for name in ("grid", "scene", "training")))
CODE = (
    *("runtime/zenflow", "zftune/tuner", "zftune/planner", "zftune/daemon/runs"),
    *(f"studies/006-long-run/longrun/{name}.py" for name in ("scene", "training", "tuned")),
)


def script() -> dict[str, Any]:
    """What happens in the run, for the record."""
    rig = spec()
    return {
        "rig": rig.name,
        "values": dict(rig.values),
        "phases": [dataclasses.asdict(phase) for phase in PHASES],
        "memory_bytes": MEMORY_BYTES,
    }


def jobs_of(*, quick: bool) -> list[Job]:
    """The grid, and a run for each seed."""
    settings, least = (QUICK_SETTINGS, QUICK_LEAST_STEPS) if quick else (SETTINGS, LEAST_STEPS)
    seeds, first = (QUICK_SEEDS, QUICK_FIRST_STEPS) if quick else (SEEDS, FIRST_STEPS)
    knobs = [setting.knobs() for setting in settings]
    grid = {**script(), "settings": knobs, "steps": least, "code": code_digest(*GRID_CODE)}
    run = {**script(), "first_steps": first, "grant_s": GRANT_S, "thinking_s": THINKING_S, "code": code_digest(*CODE)}
    return [
        Job("grid", grid, grid_figures, (settings, least)),
        *(Job(f"run-{seed}", {**run, "seed": seed}, tuned, (seed, first)) for seed in range(seeds)),
    ]


def grid_figures(settings: Sequence[Setting], least_steps: int) -> dict[str, Any]:
    """Measure the grid; as the file of results has it."""
    found = measured(settings, least_steps)
    cells = {name: [dataclasses.asdict(row[one]) for one in settings] for name, row in found.cells.items()}
    return {"cells": cells, "cost": [found.cost[one] for one in settings], "budget": found.budget}


def grid_of(figures: Mapping[str, Any], settings: Sequence[Setting]) -> Grid:
    """The grid of a file of results."""
    rows = {
        name: {one: Cell(**cell) for one, cell in zip(settings, row, strict=True)}
        for name, row in figures["cells"].items()
    }
    return Grid(rows, dict(zip(settings, figures["cost"], strict=True)), figures["budget"])


# --- what came of it -------------------------------------------------------------------------------------------------

GRID_HEADS = ("phase", "steps", "oracle", "ms a step", "best fixed setting's", "without the budget", "ms a step")
RUN_HEADS = ("seed", "run", "of the gap", *(phase.name for phase in PHASES), "exploring", "allowed", "reopened")
SETTING_HEADS = ("setting", "cost, steps", *(phase.name for phase in PHASES))


def grid_rows(of: Fixed, grid: Grid) -> list[tuple[str, ...]]:
    """By phase: who is the fastest."""
    rows: list[tuple[str, ...]] = []
    for name, steps in of.steps.items():
        cells, free = grid.cells[name], of.unconstrained[name]
        best, oracle = cells[of.best], of.oracle[name]
        beyond = "the same" if grid.allowed(free) else str(free)
        times = (f"{cells[oracle].step_ms:.1f}", f"{best.step_ms:.1f}")
        rows.append((name, str(steps), str(oracle), *times, beyond, f"{cells[free].step_ms:.1f}"))
    return rows


def setting_rows(grid: Grid) -> list[tuple[str, ...]]:
    """Every setting in every phase."""

    def cell(setting: Setting, name: str) -> str:
        found = grid.cells[name][setting]
        return f"{found.step_ms:.1f}" + ("" if found.fits else " (does not fit)")

    return [
        (
            str(one) + ("" if grid.allowed(one) else " (beyond the budget)"),
            f"{grid.cost[one]:.2f}",
            *(cell(one, name) for name in grid.cells),
        )
        for one in grid.cost
    ]


def run_rows(found: Sequence[Recovery]) -> list[tuple[str, ...]]:
    """By seed: what the daemon's run took."""
    return [
        (
            str(seed),
            f"{one.seconds:.1f} s",
            f"{one.recovered:.0%}",
            *(f"{seconds:.1f} s" for seconds in one.by_phase_s.values()),
            f"{one.spent_s:.2f} s",
            f"{one.allowed_s:.2f} s",
            str(one.reopened),
        )
        for seed, one in enumerate(found)
    ]


def table_of(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    """For a terminal."""
    table = Table()
    for number, head in enumerate(heads):
        table.add_column(head, justify="left" if number < 1 else "right")
    for row in rows:
        table.add_row(*row)
    return table


def markdown_of(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """For `table.md`."""
    return "\n".join("| " + " | ".join(line) + " |" for line in (heads, ["---"] * len(heads), *rows)) + "\n\n"


def summary(of: Fixed, found: Sequence[Recovery]) -> list[str]:
    """In sentences."""
    return [
        f"the whole run: oracle {of.oracle_s:.1f} s, best fixed setting {of.best_s:.1f} s ({of.best})",
        f"one second stands for {COMPRESSION}; the grant of 108 s is {GRANT_S:g} s",
        f"times are simulated; a thought of the daemon's takes {THINKING_S:g} s of them",
        *(f"seed {seed}: {one.steps_over} steps above the memory that may be used" for seed, one in enumerate(found)),
    ]


def main() -> int:
    """Command line; 1 where a promise was not kept."""
    arguments = parser(__doc__ or "").parse_args()
    results, quick = Results.of(HERE, arguments), arguments.quick
    jobs = jobs_of(quick=quick)
    with Progress(console=Console(stderr=True)) as progress:
        bar = progress.add_task("grid and runs", total=len(jobs))
        measurements, *runs = done(
            results, jobs, again=arguments.again, tell=lambda count: progress.update(bar, completed=count)
        )
    grid = grid_of(measurements, QUICK_SETTINGS if quick else SETTINGS)
    of = fixed(grid, QUICK_FIRST_STEPS if quick else FIRST_STEPS)
    found = [recovery(run, of, MEMORY_BYTES - LEAST_HEADROOM_BYTES) for run in runs]
    verdict = [] if quick else verdicts(of, found, grid)
    console = Console(width=None if sys.stdout.isatty() else 160)
    _show(console, results, of, grid, found, verdict)
    document = {
        **script(),
        "fixed": {"oracle_s": of.oracle_s, "best_s": of.best_s, "best": str(of.best), "gap": of.gap},
        "recoveries": [dataclasses.asdict(one) for one in found],
        "verdicts": [{"text": text, "kept": kept} for text, kept in verdict],
    }
    (results.folder / "run.html").write_text(write_page(document, runs, of, grid), encoding="utf-8")
    if arguments.json:
        write_json(arguments.json, {**document, "runs": runs})
    return 0 if all(kept for _, kept in verdict) else 1


def _show(
    console: Console,
    results: Results,
    of: Fixed,
    grid: Grid,
    found: Sequence[Recovery],
    verdict: Sequence[tuple[str, bool]],
) -> None:
    parts = [(GRID_HEADS, grid_rows(of, grid)), (SETTING_HEADS, setting_rows(grid)), (RUN_HEADS, run_rows(found))]
    lines = [*summary(of, found), *(f"{'kept' if kept else 'BROKEN'}: {text}" for text, kept in verdict)]
    for heads, rows in parts:
        console.print(table_of(heads, rows))
    console.print("\n".join(lines))
    text = "".join(markdown_of(heads, rows) for heads, rows in parts) + "".join(f"- {line}\n" for line in lines)
    (results.folder / "table.md").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
