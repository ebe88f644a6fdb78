"""From records to verdicts, and the tables."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.table import Table

from defects.case import Defect, agrees

REPRODUCED, NOT_REPRODUCED, NO_VERDICT = "reproduced", "not reproduced", "no verdict"
PASSES, FAILS, NOT_YET, NOT_RUN = "passes", "FAILS", "not yet", ""


@dataclass(frozen=True, slots=True)
class Row:
    """A defect's line."""

    name: str
    defect: Defect
    expected: str
    upstream: str
    control: str
    ours: str
    verdict: str
    ours_verdict: str
    elsewhere: str
    """What other versions of DeepSpeed do."""

    @property
    def wrong(self) -> bool:
        """Whether the study itself, or this runtime, is in error."""
        return self.verdict == NO_VERDICT or self.ours_verdict == FAILS


def verdict_of(defect: Defect, figures: Mapping[str, Any]) -> str:
    """Whether upstream shows the defect and the control does not; no verdict where either has no figure."""
    if defect.control is not None:
        found = figures.get("control")
        if not isinstance(found, list) or not agrees(found[0], found[1], defect.tolerance):
            return NO_VERDICT
    if "upstream" not in figures or (isinstance(figures["upstream"], str) and not defect.raises):
        return NO_VERDICT
    return NOT_REPRODUCED if agrees(figures["upstream"], figures["expected"], defect.tolerance) else REPRODUCED


def ours_verdict_of(defect: Defect, figures: Mapping[str, Any]) -> str:
    """Whether this runtime gives what is expected, or does not claim to."""
    if "ours" not in figures:
        return NOT_RUN if "ended" not in figures else FAILS
    ours = figures["ours"]
    if ours is None or str(ours).startswith("UnsupportedError"):
        return NOT_YET
    return PASSES if agrees(ours, figures["expected"], defect.tolerance) else FAILS


def row_of(name: str, defect: Defect, record: Mapping[str, Any], others: Sequence[Mapping[str, Any]]) -> Row:
    """A defect's line from its record, and those of other versions of DeepSpeed."""
    figures = record["figures"]
    control = figures.get("control")
    return Row(
        name=name,
        defect=defect,
        expected=shown(figures.get("expected")),
        upstream=shown(figures.get("upstream", figures.get("ended"))),
        control=shown(control[0]) if isinstance(control, list) else shown(control),
        ours=shown(figures.get("ours")),
        verdict=verdict_of(defect, figures),
        ours_verdict=ours_verdict_of(defect, figures),
        elsewhere="; ".join(_other(defect, other) for other in others),
    )


def _other(defect: Defect, record: Mapping[str, Any]) -> str:
    figures = record["figures"]
    found = shown(figures.get("upstream", figures.get("ended")))
    return f"{record['inputs']['versions']['deepspeed']}: {found}, {verdict_of(defect, figures)}"


def shown(figure: Any) -> str:
    """A figure for people: four digits, or what was raised."""
    if figure is None:
        return "-"
    if isinstance(figure, str):
        return figure
    return "0" if abs(figure) < 1e-9 else f"{figure:.4g}"


COLUMNS = ("expected", "DeepSpeed {version}", "control", "zenflow", "verdict", "zenflow's", "other versions")


def cells(row: Row) -> list[str]:
    """A line's cells, in the order of `COLUMNS`."""
    verdict = f"{row.verdict}, by the paper's design" if row.defect.by_design else row.verdict
    return [row.expected, row.upstream, row.control, row.ours, verdict, row.ours_verdict, row.elsewhere]


def table_of(rows: Sequence[Row], version: str) -> Table:
    """For a terminal."""
    table = Table(
        title=f"ZenFlow in DeepSpeed {version} beside AdamW on fp32 masters and this runtime", show_lines=True
    )
    table.add_column("defect", overflow="fold", ratio=4)
    table.add_column("figure", overflow="fold", ratio=4)
    for column in COLUMNS:
        table.add_column(column.format(version=version), overflow="fold", ratio=2)
    for row in rows:
        table.add_row(row.defect.title, row.defect.measure, *cells(row))
    return table


def summary_of(rows: Sequence[Row]) -> str:
    """How many of each verdict."""
    verdicts, ours = Counter(row.verdict for row in rows), Counter(row.ours_verdict for row in rows if row.ours_verdict)
    return "\n".join(
        f"{who}: " + ", ".join(f"{count} {verdict}" for verdict, count in found.most_common())
        for who, found in (("upstream", verdicts), ("zenflow", ours))
        if found
    )


def markdown_of(rows: Sequence[Row], version: str) -> str:
    """The same table as a file, with each case's control and how zenflow's case differs."""
    head = ["defect", "figure", *(column.format(version=version) for column in COLUMNS)]
    lines = [head, ["---"] * len(head)]
    lines += [[f"`{row.name}` {row.defect.title}", row.defect.measure, *cells(row)] for row in rows]
    table = "".join(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in line)} |\n" for line in lines)
    notes = "".join(f"- `{row.name}`: {_notes(row.defect)}\n" for row in rows if _notes(row.defect))
    return f"{table}\nControls, and where zenflow's case differs:\n\n{notes}"


def _notes(defect: Defect) -> str:
    control = f"control: {defect.control_is}" if defect.control_is else ""
    return "; ".join(part for part in (control, f"zenflow: {defect.ours_is}" if defect.ours_is else "") if part)
