"""The ranks of a run beside each other: what their steps consist of."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from zftune.profile.bars import Bar, Kind
from zftune.profile.schema import PHASES
from zftune.profile.units import number, percent

Rank = Mapping[str, Any]

MAX_RANKS = 8
"""Ranks that are shown; of more, the first and the slowest."""
# Fills and letters tell the phases apart where there is no colour.
PHASE_KINDS = {
    "data": Kind("data", "·", "L", "bright_black"),
    "forward": Kind("forward", "█", "#", "green"),
    "backward": Kind("backward", "▓", "B", "blue"),
    "optimizer": Kind("optimizer", "▒", "O", "red"),
    "other": Kind("other", "░", "X", "magenta"),
}


def phases_bar(phases: Mapping[str, float | None]) -> Bar:
    """A bar of the phases that are known."""
    return Bar([(PHASE_KINDS[name], value) for name in PHASES if (value := phases[name]) is not None])


def rank_bars(ranks: Sequence[Rank]) -> Iterator[tuple[str, str, Bar]]:
    """Name, style and phases of each rank that is shown."""
    for rank in _shown(ranks):
        name = "a step" if len(ranks) == 1 else f"rank {rank['rank']}"
        phases = rank["phases_ms"] or {**dict.fromkeys(PHASES), "other": rank["step_ms"]["mean"]}
        yield name, "bold" if rank is ranks[0] else "", phases_bar(phases)


def ranks_table(ranks: Sequence[Rank], *, stall: Mapping[str, Any] | None, wide: bool) -> RenderableType:
    """Step times and phases of each rank that is shown, in milliseconds.

    Args:
        ranks: as in the document.
        stall: of the first one, who alone tells it; None if it is not known.
        wide: whether there is room for the phases.
    """
    table = Table(box=None, expand=True, padding=(0, 1, 0, 0), header_style="dim")
    stalls = () if stall is None else ("stall",)
    for title in ("rank", "steps", "step ms: mean", "p50", "p95", *stalls, *(PHASES if wide else ())):
        table.add_column(title, justify="right", no_wrap=True)
    for rank in _shown(ranks):
        step, phases = rank["step_ms"], rank["phases_ms"] or {}
        cells = [str(rank["rank"]), str(rank["steps"]), *(number(step[name]) for name in ("mean", "p50", "p95"))]
        if stall is not None:
            cells.append(percent(stall["fraction"]) if rank is ranks[0] else "–")
        if wide:
            cells += ["–" if phases.get(name) is None else number(phases[name]) for name in PHASES]
        table.add_row(*(Text(cell) for cell in cells), style="bold" if rank is ranks[0] else "")
    return table


def _shown(ranks: Sequence[Rank]) -> list[Rank]:
    if len(ranks) <= MAX_RANKS:
        return list(ranks)
    slowest = sorted(ranks[1:], key=lambda rank: -float(rank["step_ms"]["mean"]))[: MAX_RANKS - 1]
    return [ranks[0], *sorted(slowest, key=lambda rank: int(rank["rank"]))]
