"""Does the search find gains under the noise of real machines, and how often is it wrong?

See README.md beside this file.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE.parent), str(HERE)]

from noisy.driver import search_once  # noqa: E402
from noisy.scenes import lift  # noqa: E402
from studykit import Job, Results, code_digest, done, parser, write_json  # noqa: E402

from zftune.emulation.machines import load_rig  # noqa: E402

CODE = (
    *(f"zftune/tuner/{part}.py" for part in ("belief", "evidence", "search", "states")),
    "zftune/emulation/noise.py",
    "studies/022-noise/noisy/driver.py",
    "studies/022-noise/noisy/scenes.py",
)
MOST_LOST_STEPS = 100
"""1% of 10,000."""
NEAR = 1.02
"""Times the best: a setting that is found."""


@dataclass(frozen=True, slots=True)
class Cell:
    """Searches among the start and eight settings, of which one at most is faster."""

    rig: str
    """Whose noise it is."""
    gain: float
    steps: int
    searches: int
    promised: Mapping[int, float]
    """Share of the searches that have found it after so many steps, at least; at 0: that adopt what is not faster, at
    most."""


CELLS = (
    Cell("h200-4k", 0.0, 2000, 1000, {0: 0.02}),
    Cell("h200-16k", 0.05, 1000, 200, {500: 0.60, 1000: 0.95}),
    Cell("h200-4k", 0.10, 1000, 200, {1000: 0.75}),
    Cell("h200-4k", 0.05, 5000, 200, {5000: 0.82}),
)
QUICK = (Cell("h200-16k", 0.05, 500, 4, {}),)


def searched(cell: Cell) -> dict[str, Any]:
    """What the searches of a cell came to."""
    scene, noise = lift(cell.gain), load_rig(cell.rig).noise
    rows = [search_once(scene, noise, seed, cell.steps) for seed in range(cell.searches)]
    marks = [mark for mark in (500, 1000, 2000, 5000) if mark <= cell.steps]
    share = 1 / len(rows)
    true = [1 - one.incumbents[-1][1] / one.incumbents[0][1] for one in rows]
    return {
        "found": {
            str(mark): share * sum(one.at(mark) <= NEAR * scene.best_ms for one in rows) for mark in marks if cell.gain
        },
        "wrong": share * sum(any(gain <= 1e-9 for _, gain in one.adoptions) for one in rows),
        "within_two_errors": share
        * sum(abs(one.stated - gain) <= 2 * one.error + 1e-9 for one, gain in zip(rows, true, strict=True)),
        "restarts": sum(one.restarts for one in rows),
        "lost_steps": statistics.fmean(one.lost_steps for one in rows),
        "changes": statistics.fmean(one.changes for one in rows),
    }


def promises(cell: Cell, figures: Mapping[str, Any]) -> list[tuple[str, bool]]:
    """Sentences, and whether they hold."""
    where = f"{cell.rig}, a gain of {cell.gain:.0%}"
    said = [
        (f"{where}: no restart ({figures['restarts']})", figures["restarts"] == 0),
        (f"{where}: at most 100 steps lost ({figures['lost_steps']:.0f})", figures["lost_steps"] <= MOST_LOST_STEPS),
    ]
    for mark, share in cell.promised.items():
        if mark == 0:
            said.append(
                (f"{where}: at most {share:.0%} adopt anything ({figures['wrong']:.1%})", figures["wrong"] <= share)
            )
        else:
            found = figures["found"][str(mark)]
            said.append((f"{where}: found by {share:.0%} in {mark} steps ({found:.1%})", found >= share))
    return said


def main() -> int:
    """Command line; 1 where a promise was not kept."""
    arguments = parser("Does the search see through noise?").parse_args()
    results, digest = Results.of(HERE, arguments), code_digest(*CODE)
    cells = QUICK if arguments.quick else CELLS
    jobs = [
        Job(f"{cell.rig}-{cell.gain:g}-{cell.steps}", {**asdict(cell), "code": digest}, searched, (cell,))
        for cell in cells
    ]
    records = done(results, jobs, again=arguments.again, tell=lambda _count: None)
    said = [] if arguments.quick else [one for pair in zip(cells, records, strict=True) for one in promises(*pair)]
    text = table(cells, records) + "".join(f"\n- {'kept' if kept else 'BROKEN'}: {line}" for line, kept in said) + "\n"
    (results.folder / "searches.md").write_text(text, encoding="utf-8")
    sys.stdout.write(text)
    if arguments.json:
        write_json(arguments.json, {"cells": records, "verdicts": [[line, kept] for line, kept in said]})
    return 0 if all(kept for _, kept in said) else 1


def table(cells: Sequence[Cell], records: Sequence[Mapping[str, Any]]) -> str:
    """The figures as a table in Markdown."""
    heads = (
        "noise",
        "gain",
        "searches",
        "found in 500 / 1,000 / 2,000 / 5,000 steps",
        "wrong",
        "within two errors",
        "lost",
    )
    lines = ["| " + " | ".join(heads) + " |", "|---" * len(heads) + "|"]
    for cell, one in zip(cells, records, strict=True):
        found = " / ".join(f"{share:.0%}" for share in one["found"].values()) or "-"
        row = (
            cell.rig, f"{cell.gain:.0%}", str(cell.searches), found, f"{one['wrong']:.1%}",
            f"{one['within_two_errors']:.0%}", f"{one['lost_steps']:.0f}",
        )  # fmt: skip
        lines.append("| " + " | ".join(row) + " |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.exit(main())
