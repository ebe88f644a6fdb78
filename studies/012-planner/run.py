"""Does the planner predict what is measured, published and allocated?

See README.md beside this file.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Sequence
from pathlib import Path

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

import torch  # noqa: E402
from planning import memory, published, rigs, sharded  # noqa: E402
from rich.console import Console  # noqa: E402
from rich.progress import Progress  # noqa: E402
from rich.table import Table  # noqa: E402
from studykit import Results, parser, write_json  # noqa: E402

Rows = Sequence[Sequence[str]]
_PUBLISHED = ("what", "published", "predicted", "off", "note")
_SHARDED = ("what", "published", "planned", "off", "compute given", "off", "note")


def published_rows(found: Sequence[published.Comparison]) -> list[tuple[str, ...]]:
    """Of the table."""
    return [
        (
            one.what,
            f"{one.published_ms:,.0f} ms",
            f"{one.predicted_ms:,.0f} ms",
            "fitted" if one.fitted else f"{one.off:+.0%}",
            one.note,
        )
        for one in found
    ]


def sharded_rows(found: Sequence[sharded.Step]) -> list[tuple[str, ...]]:
    """Of the table."""
    return [
        (
            one.what,
            f"{one.published_ms:,.0f} ms",
            f"{one.planned_ms:,.0f} ms",
            f"{one.off:+.1%}",
            "" if one.given_ms is None else f"{one.given_ms:,.0f} ms",
            "" if one.off_given is None else f"{one.off_given:+.1%}",
            one.note,
        )
        for one in found
    ]


def table_of(title: str, heads: Sequence[str], rows: Rows) -> Table:
    """For a terminal."""
    table = Table(title=title)
    for number, head in enumerate(heads):
        table.add_column(head, justify="left" if number == 0 else "right")
    for row in rows:
        table.add_row(*row)
    return table


def markdown_of(heads: Sequence[str], rows: Rows) -> str:
    """For `table.md`."""
    lines = [heads, ["---", *["---:"] * (len(heads) - 1)], *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n"


def main() -> int:
    """Command line; 1 where a promise was not kept."""
    arguments = parser(__doc__ or "").parse_args()
    results = Results.of(HERE, arguments)
    torch.set_num_threads(1)
    with Progress(console=Console(stderr=True)) as progress:
        bar = progress.add_task("", total=1)

        def tell(text: str, done: int, total: int) -> None:
            progress.update(bar, description=text, completed=done, total=total)

        on_rigs = rigs.study(results, quick=arguments.quick, again=arguments.again, tell=tell)
        cases = memory.study(results, quick=arguments.quick, again=arguments.again, tell=tell)
    fitted, compared = published.comparisons()
    several = sharded.steps()
    found = rigs.verdicts(on_rigs) + memory.verdicts(cases)
    rig_rows, published_cells = [rigs.cells(row) for row in on_rigs], published_rows(compared)
    sharded_cells = sharded_rows(several)
    console = Console(width=None if sys.stdout.isatty() else 140)
    console.print(table_of("step times on rigs", rigs.HEADS, rig_rows))
    console.print(table_of("published step times", _PUBLISHED, published_cells))
    console.print(table_of("published steps of several GPUs, by zftune plan", _SHARDED, sharded_cells))
    rates = f"fitted on Qwen2.5-1.5B: link {fitted.link_gbps:.1f} GB/s, host {fitted.host_gbps:.1f} GB/s, of each rank"
    lines = [rates, memory.summary(cases), *(f"{'kept' if kept else 'BROKEN'}: {text}" for text, kept in found)]
    for line in lines:
        console.print(line)
    tables = ((rigs.HEADS, rig_rows), (_PUBLISHED, published_cells), (_SHARDED, sharded_cells))
    text = "".join(markdown_of(heads, rows) + "\n" for heads, rows in tables)
    (results.folder / "table.md").write_text(text + "".join(f"- {line}\n" for line in lines), encoding="utf-8")
    if arguments.json:
        document = {
            "rigs": [dataclasses.asdict(row) for row in on_rigs],
            "published": [dataclasses.asdict(one) for one in compared],
            "sharded": [dataclasses.asdict(one) for one in several],
            "fitted": dataclasses.asdict(fitted),
            "memory": list(cases),
            "verdicts": [{"text": text, "kept": kept} for text, kept in found],
        }
        write_json(arguments.json, document)
    return 0 if all(kept for _, kept in found) else 1


if __name__ == "__main__":
    sys.exit(main())
