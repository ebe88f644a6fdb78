"""Does the daemon keep a long run tuned, where the link, the host and the sequences change while it trains?

See README.md beside this file.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

from longrun.figures import Fixed, Recovery, fixed, recovery, verdicts  # noqa: E402
from longrun.grid import Cell, Grid, TooBusyError, measured  # noqa: E402
from longrun.plot import write_page  # noqa: E402
from longrun.scene import MEMORY_BYTES, PHASES, QUICK_SETTINGS, SETTINGS, spec  # noqa: E402
from longrun.tuned import COMPRESSION, GRANT_S, tuned  # noqa: E402
from rich.console import Console  # noqa: E402
from rich.progress import Progress  # noqa: E402
from rich.table import Table  # noqa: E402
from studykit import Results, code_digest, parser, write_json  # noqa: E402

from zftune.planner.choosing import LEAST_HEADROOM_BYTES  # noqa: E402
from zftune.tuner.settings import Setting  # noqa: E402

SEEDS, FIRST_STEPS, LEAST_STEPS = 3, 1000, 16
QUICK_SEEDS, QUICK_FIRST_STEPS, QUICK_LEAST_STEPS = 1, 160, 8
GRID_CODE = ("runtime/zenflow", *(f"studies/006-long-run/longrun/{name}.py" for name in ("grid", "scene", "training")))
CODE = (
    *("runtime/zenflow", "zftune/tuner", "zftune/planner", "zftune/daemon/brain"),
    *(f"studies/006-long-run/longrun/{name}.py" for name in ("scene", "training", "tuned")),
)

Tell = Callable[[int], None]


def script() -> dict[str, Any]:
    """What happens in the run, for the record."""
    rig = spec()
    return {
        "rig": rig.name,
        "values": dict(rig.values),
        "phases": [dataclasses.asdict(phase) for phase in PHASES],
        "memory_bytes": MEMORY_BYTES,
    }


def grid_of(results: Results, *, quick: bool, again: bool, tell: Tell) -> Grid:
    """Measured, or from the file of results."""
    settings, least = (QUICK_SETTINGS, QUICK_LEAST_STEPS) if quick else (SETTINGS, LEAST_STEPS)
    knobs = [setting.knobs() for setting in settings]
    inputs = {**script(), "settings": knobs, "steps": least, "code": code_digest(*GRID_CODE)}
    record = None if again else results.load("grid", inputs)
    if record is None:
        found = measured(settings, least, tell)
        cells = {name: [dataclasses.asdict(row[one]) for one in settings] for name, row in found.cells.items()}
        cost = [found.cost[one] for one in settings]
        record = results.save("grid", inputs, {"cells": cells, "cost": cost, "budget": found.budget})
    figures = record["figures"]
    rows = {
        name: {one: Cell(**cell) for one, cell in zip(settings, row, strict=True)}
        for name, row in figures["cells"].items()
    }
    return Grid(rows, dict(zip(settings, figures["cost"], strict=True)), figures["budget"])


def run_of(seed: int, first_steps: int, results: Results, *, again: bool, tell: Tell) -> Mapping[str, Any]:
    """One run with a daemon; kept only where this machine was fast enough for the rig."""
    inputs = {**script(), "seed": seed, "first_steps": first_steps, "grant_s": GRANT_S, "code": code_digest(*CODE)}
    record = None if again else results.load(f"run-{seed}", inputs)
    if record is not None:
        kept: Mapping[str, Any] = record["figures"]
        return kept
    figures = tuned(seed, first_steps, tell)
    return figures if figures["refused"] else results.save(f"run-{seed}", inputs, figures)["figures"]


# --- what came of it -------------------------------------------------------------------------------------------------

GRID_HEADS = ("phase", "steps", "oracle", "ms a step", "best fixed setting's", "without the budget", "ms a step")
RUN_HEADS = ("seed", "run", "of the gap", *(phase.name for phase in PHASES), "exploring", "allowed", "reopened", "late")
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


def run_rows(runs: Sequence[Mapping[str, Any]], found: Sequence[Recovery]) -> list[tuple[str, ...]]:
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
            f"{run['slack']['late']} of {run['slack']['segments']}",
        )
        for seed, (run, one) in enumerate(zip(runs, found, strict=True))
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


def summary(of: Fixed, runs: Sequence[Mapping[str, Any]], found: Sequence[Recovery]) -> list[str]:
    """In sentences."""
    lines = [
        f"the whole run: oracle {of.oracle_s:.1f} s, best fixed setting {of.best_s:.1f} s ({of.best})",
        f"one second stands for {COMPRESSION}; the grant of 60 s is {GRANT_S:g} s, or 40 steps where that is longer",
    ]
    for seed, (run, one) in enumerate(zip(runs, found, strict=True)):
        slack = run["slack"]
        lines.append(
            f"seed {seed}: slack {slack['least_margin_ms']:.2f} ms at least, {slack['median_margin_ms']:.2f} ms in the "
            f"median; {one.steps_over} steps above the memory that may be used"
        )
    return lines


def main() -> int:
    """Command line; 1 where a promise was not kept."""
    arguments = parser(__doc__ or "").parse_args()
    results, quick = Results.of(HERE, arguments), arguments.quick
    seeds, first = (QUICK_SEEDS, QUICK_FIRST_STEPS) if quick else (SEEDS, FIRST_STEPS)
    console = Console(width=None if sys.stdout.isatty() else 160)
    runs: list[Mapping[str, Any]] = []
    with Progress(console=Console(stderr=True)) as progress:
        bar = progress.add_task("grid", total=len(QUICK_SETTINGS if quick else SETTINGS) * len(PHASES))
        try:
            grid = grid_of(
                results, quick=quick, again=arguments.again, tell=lambda done: progress.update(bar, completed=done)
            )
        except TooBusyError as error:
            console.print(f"This machine is too busy for the rig: {error}.")
            return 1
        progress.update(bar, completed=progress.tasks[bar].total)
        total = sum(phase.steps(first) for phase in PHASES)
        for seed in range(seeds):
            task = progress.add_task(f"seed {seed}", total=total)

            def tell(done: int, task: Any = task) -> None:
                progress.update(task, completed=done)

            runs.append(run_of(seed, first, results, again=arguments.again, tell=tell))
            progress.update(task, completed=total)
    of = fixed(grid, first)
    found = [recovery(run, of, MEMORY_BYTES - LEAST_HEADROOM_BYTES) for run in runs]
    verdict = [] if quick else verdicts(of, found, grid)
    refused = [f"seed {seed} is refused: {run['refused']}" for seed, run in enumerate(runs) if run["refused"]]
    _show(console, results, of, grid, runs, found, verdict, refused)
    document = {
        **script(),
        "fixed": {"oracle_s": of.oracle_s, "best_s": of.best_s, "best": str(of.best), "gap": of.gap},
        "recoveries": [dataclasses.asdict(one) for one in found],
        "verdicts": [{"text": text, "kept": kept} for text, kept in verdict],
        "refused": refused,
    }
    (results.folder / "run.html").write_text(write_page(document, runs, of, grid), encoding="utf-8")
    if arguments.json:
        write_json(arguments.json, {**document, "runs": runs})
    return 0 if not refused and all(kept for _, kept in verdict) else 1


def _show(
    console: Console,
    results: Results,
    of: Fixed,
    grid: Grid,
    runs: Sequence[Mapping[str, Any]],
    found: Sequence[Recovery],
    verdict: Sequence[tuple[str, bool]],
    refused: Sequence[str],
) -> None:
    parts = [(GRID_HEADS, grid_rows(of, grid)), (SETTING_HEADS, setting_rows(grid)), (RUN_HEADS, run_rows(runs, found))]
    lines = [
        *summary(of, runs, found),
        *(f"{'kept' if kept else 'BROKEN'}: {text}" for text, kept in verdict),
        *refused,
    ]
    for heads, rows in parts:
        console.print(table_of(heads, rows))
    console.print("\n".join(lines))
    text = "".join(markdown_of(heads, rows) for heads, rows in parts) + "".join(f"- {line}\n" for line in lines)
    (results.folder / "table.md").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
