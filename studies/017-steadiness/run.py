"""How steady are this machine's own times? See README.md beside this file."""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))

import torch  # noqa: E402
from rich.console import Console  # noqa: E402
from rich.progress import track  # noqa: E402
from rich.table import Table  # noqa: E402
from studykit import Results, code_digest, parser, percentile, spread, write_json  # noqa: E402

STEP_MS = 150.0
TURNS, STEPS = 7, 80
QUICK_TURNS, QUICK_STEPS = 2, 20
THREADS = 2
_SIDE, _ELEMENTS = 512, 1 << 23
_CALIBRATED_S = 0.5


def pieces() -> dict[str, Callable[[], object]]:
    """A millisecond or so of what training is made of: arithmetic out of the cache, and passes over memory."""
    left, right = torch.randn(2, _SIDE, _SIDE)
    product = torch.empty(_SIDE, _SIDE)
    given, written = torch.randn(_ELEMENTS), torch.empty(_ELEMENTS)
    return {
        "matrix products": lambda: torch.mm(left, right, out=product),
        "passes over memory": lambda: torch.add(given, 1.0, out=written),
    }


def repeats(piece: Callable[[], object], step_ms: float) -> int:
    """How many make a step."""
    count, begin_s = 0, time.perf_counter()
    while (passed_s := time.perf_counter() - begin_s) < _CALIBRATED_S:
        piece()
        count += 1
    return max(1, round(count * step_ms / 1e3 / passed_s))


def turn(piece: Callable[[], object], count: int, steps: int) -> list[float]:
    """Milliseconds of steps that all do the same."""
    found = []
    for _ in range(steps):
        begin_s = time.perf_counter()
        for _ in range(count):
            piece()
        found.append(1e3 * (time.perf_counter() - begin_s))
    return found


def measure(turns: int, steps: int) -> dict[str, Any]:
    """Turns of each kind of work with one thread and with two, in random order."""
    kinds = [(name, threads) for name in pieces() for threads in range(1, THREADS + 1)]
    work, draw = pieces(), random.Random(0)
    found: dict[str, list[list[float]]] = {f"{name}, {threads}": [] for name, threads in kinds}
    counts: dict[tuple[str, int], int] = {}
    before = torch.get_num_threads()
    try:
        for _ in track(range(turns), "steadiness", console=Console(stderr=True), transient=True):
            for name, threads in draw.sample(kinds, len(kinds)):
                torch.set_num_threads(threads)
                if (name, threads) not in counts:
                    counts[name, threads] = repeats(work[name], STEP_MS)
                found[f"{name}, {threads}"].append(turn(work[name], counts[name, threads], steps))
    finally:
        torch.set_num_threads(before)
    return {"rows": [row_of(kind, ms) for kind, ms in found.items()]}


def row_of(kind: str, turns_ms: Sequence[Sequence[float]]) -> dict[str, Any]:
    """Of one kind of work."""
    return {
        "kind": kind,
        "p50_ms": spread([percentile(sorted(ms), 0.5) for ms in turns_ms]),
        "p95_over_p50": spread([percentile(sorted(ms), 0.95) / percentile(sorted(ms), 0.5) for ms in turns_ms]),
    }


def table_of(rows: Sequence[dict[str, Any]]) -> Table:
    """The ratio of every kind."""
    table = Table(title="the same work again and again: p95/p50 of its times, by turns")
    for column in ("work, threads", "p50 ms", "p95/p50, median", "p5 - p95 of turns"):
        table.add_column(column, justify="left" if column == "work, threads" else "right")
    for row in rows:
        ratio = row["p95_over_p50"]
        cells = (f"{row['p50_ms']['median']:.0f}", f"{ratio['median']:.2f}", f"{ratio['p5']:.2f} - {ratio['p95']:.2f}")
        table.add_row(row["kind"], *cells)
    return table


def main(argv: Sequence[str] | None = None) -> int:
    """Measure unless it is done, and print the table."""
    arguments = parser(__doc__ or "").parse_args(argv)
    results = Results.of(HERE, arguments)
    turns, steps = (QUICK_TURNS, QUICK_STEPS) if arguments.quick else (TURNS, STEPS)
    inputs = {"turns": turns, "steps": steps, "code": code_digest("studies/017-steadiness/run.py")}
    record = None if arguments.again else results.load("steadiness", inputs)
    if record is None:
        record = results.save("steadiness", inputs, measure(turns, steps))
    Console(width=None if sys.stdout.isatty() else 100).print(table_of(record["figures"]["rows"]))
    if arguments.json:
        write_json(arguments.json, {"study": HERE.name, "quick": arguments.quick, **record})
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
