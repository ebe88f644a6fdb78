"""The study's tables."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rich.table import Table

GAIN = 1.05
"""What pays is faster by more than 5%."""


def tables_of(figures: Mapping[str, Any]) -> list[Table]:
    """One for each part that is there."""
    makers: Mapping[str, Callable[[Any], Table]] = {
        "bytes": _bytes,
        "planned": _planned,
        "proposals": _proposals,
        "moments": _moments,
        "trainings": _trainings,
    }
    return [make(figures[part]) for part, make in makers.items() if part in figures]


def gain_of(cell: Mapping[str, Any], way: str = "coded") -> float:
    """How many times faster a step is with a code, each with its best S to 4."""
    return float(least_ms(cell, "bf16") / least_ms(cell, way))


def least_ms(cell: Mapping[str, Any], way: str) -> float:
    """The fastest step at k = 0.1 and S to 4, or AdamW on the GPU where that fits and is faster."""
    late = min(step for interval, step in cell["ways"][way]["steps_ms"].items() if int(interval) <= 4)
    alone = cell["no_offload_ms"]
    return float(late if alone is None else min(late, alone))


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title)
    for number, column in enumerate(columns):
        table.add_column(column, justify="right" if number else "left")
    return table


def _bytes(found: Mapping[str, Mapping[str, float]]) -> Table:
    labels = [name.partition(": ")[2] for name in next(iter(found.values()))]
    columns = list(dict.fromkeys(labels))
    table = _table("model sizes on the link a step (block, bytes of a scale)", "model; k, S", *columns)
    for model, own in found.items():
        rows = dict.fromkeys(name.partition(": ")[0] for name in own)
        for row in rows:
            cells = (f"{own[f'{row}: {column}']:.3f}" for column in columns)
            table.add_row(f"{model.removeprefix('bytes--')}; {row}", *cells)
    return table


def _planned(found: Mapping[str, Mapping[str, Any]]) -> Table:
    columns = (
        "bf16, ms",
        "coded, ms",
        "residual too, ms",
        "times",
        "S_min",
        "coded",
        "residual GB",
        "of saved",
        "fits",
    )
    table = _table("planned where it pays, or a residual does not fit (k = 0.1, S to 4)", "cell", *columns)
    cells = {name: cell for own in found.values() for name, cell in own.items()}
    for name, cell in cells.items():
        fit = cell["fits_with_residual"]
        if gain_of(cell) < GAIN and fit["2"]:
            continue
        least = [cell["ways"][way]["s_min"] for way in ("bf16", "coded")]
        table.add_row(
            name,
            *(f"{least_ms(cell, way):,.0f}" for way in ("bf16", "coded", "coded, residual")),
            f"{gain_of(cell):.2f}",
            *("none" if one is None else str(one) for one in least),
            f"{cell['residual_bytes']['2'] / 1e9:.1f}",
            f"{cell['residual_bytes']['2'] / cell['saved_bytes']:.0%}",
            "yes" if fit["2"] else "1 byte only" if fit["1"] else "no",
        )
    table.caption = f"{len(cells)} cells fit with bf16; {sum(gain_of(cell) >= GAIN for cell in cells.values())} win 5%"
    return table


def _proposals(found: Mapping[str, Mapping[str, Any]]) -> Table:
    table = _table("the planner's own proposals", "cell", "bf16", "ms", "stall", "coded", "ms", "stall", "times")
    for name, ways in found.items():
        row: list[str] = []
        for one in ways.values():
            row += [f"k={one['k']:g} S={one['S']} L={one['L']} of {one['offload_ratio']:g}"]
            row += [f"{one['step_ms']:,.0f}", f"{one['stall_ms']:,.0f}"]
        gain = ways["bf16"]["step_ms"] / ways["coded"]["step_ms"]
        table.add_row(name.removeprefix("proposal--"), *row, f"{gain:.2f}")
    return table


def _moments(found: Mapping[str, Mapping[str, Mapping[str, Mapping[str, float]]]]) -> Table:
    columns = ("arrive as 0, %", "v, p5", "p50", "p95", "p99", "way off, %", "small entries' way, %")
    table = _table("AdamW's moments on the same gradients, to those of bf16", "code; weights", *columns)
    for code, kinds in found["moments"].items():
        for kind in ("all", "tokens", "head"):
            values = kinds[kind].values()
            table.add_row(f"{code}; {kind}", *(f"{value:.2f}" for value in values))
    return table


def _trainings(found: Sequence[Mapping[str, Any]]) -> Table:
    table = _table("held-out loss over bf16's, the same seed, %", "regime, rate, code", "mean", "95%", "seeds")
    for one in found:
        half = "" if one["half"] is None else f"{one['half']:.3f}"
        table.add_row(f"{one['regime']}, {one['lr']:g}, {one['code']}", f"{one['mean']:+.3f}", half, str(one["n"]))
    return table
