"""The tables, as Markdown: a word for each cell, numbered notes below."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from compatibility import scripts
from compatibility.cells import DTYPES, SETTINGS, SIDES, Cell
from compatibility.judging import WORDS, Verdict, script_verdict, verdict

BEGIN = "<!-- The tables below are written by run.py. -->"
END = "<!-- The end of what run.py writes. -->"
TITLES = {
    "stages": "Stages and dtypes",
    "ZeRO-Offload": "What scripts do, with ZeRO-Offload at stage 2",
    "ZenFlow": "What scripts do, with ZenFlow at stage 2, nothing deferred",
    "settings": "Settings of ZenFlow and Twin-Flow, and a loss scale that overflows",
    "ranks": "Several ranks, with ZeRO-Offload and ZenFlow",
    "idioms": "What scripts do to weights beside training them, fp32",
    "scripts": "Scripts of `examples/`, bf16",
}
HEADS = {"zenflow": "zftune, zenflow", "deepspeed": "zftune, deepspeed", "plain": "DeepSpeed alone"}
_COLUMNS = (*DTYPES, *SETTINGS)
_UNTRIED = "-"

Records = Mapping[str, Mapping[str, Any]]
"""A record (as the study's results have it) for each table."""


@dataclass(slots=True)
class Notes:
    """Numbered remarks; equal ones have one number."""

    texts: list[str] = field(default_factory=list)

    def shown(self, found: Verdict | None) -> str:
        """A verdict with the number of its note."""
        if found is None:
            return _UNTRIED
        if not found.note:
            return found.word
        if found.note not in self.texts:
            self.texts.append(found.note)
        word = found.word if found.word in ("trains", "refused") else f"**{found.word}**"
        return f"{word} ({self.texts.index(found.note) + 1})"


def verdicts(table: Sequence[Cell], figures: Mapping[str, Any]) -> dict[tuple[str, str, str], Verdict]:
    """By row, side and column."""
    return {
        (cell.row, cell.side, cell.column): verdict(cell, figures[cell.name]) for cell in table if cell.name in figures
    }


def script_verdicts(figures: Mapping[str, Any]) -> dict[tuple[str, str, str], Verdict]:
    """By script, side and dtype."""
    nothing: dict[str, Any] = {"losses": []}
    return {
        (name, side, "bf16"): script_verdict(name, figures[f"{name}, {side}"], figures.get(f"{name}, plain", nothing))
        for name in scripts.EXAMPLES
        for side in SIDES
        if f"{name}, {side}" in figures
    }


def found_of(tables: Mapping[str, Sequence[Cell]], records: Records) -> dict[str, dict[Any, Verdict]]:
    """Every verdict, by table."""
    found = {name: verdicts(table, records[name]["figures"]) for name, table in tables.items() if name in records}
    if "scripts" in records:
        found["scripts"] = script_verdicts(records["scripts"]["figures"])
    return found


def markdown(tables: Mapping[str, Sequence[Cell]], records: Records) -> str:
    """All tables.

    Args:
        tables: the cells.
        records: those that are there.
    """
    found = found_of(tables, records)
    parts = [
        where_of(records),
        _summary(found),
        *(f"### {TITLES[name]}\n\n{_table(one)}" for name, one in found.items()),
    ]
    return "\n\n".join(parts) + "\n"


def _summary(found: Mapping[str, Mapping[Any, Verdict]]) -> str:
    lines = [_line(["cells", *WORDS]), _line(["---"] * (len(WORDS) + 1))]
    lines += [_line([HEADS[side], *map(str, counts(found, side).values())]) for side in SIDES]
    return "\n".join(lines)


def _table(found: Mapping[tuple[str, str, str], Verdict]) -> str:
    rows, notes = list(dict.fromkeys(row for row, _, _ in found)), Notes()
    columns = sorted({key[1:] for key in found}, key=lambda one: (SIDES.index(one[0]), _COLUMNS.index(one[1])))
    lines = [
        _line(["", *(f"{HEADS[side]}, {column}" for side, column in columns)]),
        _line(["---"] * (len(columns) + 1)),
    ]
    lines += [_line([row, *(notes.shown(found.get((row, *column))) for column in columns)]) for row in rows]
    told = [f"{number}. {text}" for number, text in enumerate(notes.texts, 1)]
    return "\n".join([*lines, *([""] if told else []), *told])


def _line(parts: Iterable[str]) -> str:
    return f"| {' | '.join(parts)} |"


def where_of(records: Records) -> str:
    """When, with what versions, on what."""
    last = max((record["provenance"] for record in records.values()), key=lambda one: str(one["when"]))
    versions = next(iter(records.values()))["inputs"]["versions"]
    told = ", ".join(f"{name} {version}" for name, version in versions.items())
    return f"Run on {str(last['when'])[:10]} with {told}, on a CPU ({last['hardware'].get('cpu_model', 'unknown')})."


def into(readme: Path, text: str) -> None:
    """Write the tables into a README, between its markers."""
    document = readme.read_text(encoding="utf-8")
    before, _, rest = document.partition(BEGIN)
    _, _, after = rest.partition(END)
    readme.write_text(f"{before}{BEGIN}\n\n{text}\n{END}{after}", encoding="utf-8")


def counts(found: Mapping[str, Mapping[Any, Verdict]], side: str) -> dict[str, int]:
    """How many cells of a side have which verdict."""
    words: list[str] = [one.word for table in found.values() for key, one in table.items() if key[1] == side]
    return {word: words.count(word) for word in WORDS}
