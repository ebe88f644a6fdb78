"""What the figures say: tables, and whether the engine is as fast as it has to be."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.table import Table

from hostupdate.engine import NAME as ENGINE
from hostupdate.timing import IN_CACHE, PASS

# Time of the engine over that of the faster of the rivals as they are used, largest size: replayed, interval, limit.
AGAINST_RIVALS = ((False, 4, 0.35), (False, 1, 0.75), (True, 4, 0.40), (True, 8, 0.35))
OF_PASS, OF_IN_CACHE, OF_LOOP = 0.9, 0.8, 0.9
_BLOCKS = ", in blocks"


@dataclass(frozen=True, slots=True)
class Line:
    """One thing that should hold."""

    claim: str
    found: str
    holds: bool | None
    """None: not measured."""

    @property
    def verdict(self) -> str:
        """In a word."""
        return "not measured" if self.holds is None else "holds" if self.holds else "FAILS"


class Rows:
    """The rows of one size, by setting and contender."""

    def __init__(self, rows: Sequence[Mapping[str, Any]]) -> None:
        self._rows = {(row["replay"], row["interval"], row["contender"]): row for row in rows}

    def ratio(self, replay: bool, interval: int, contender: str) -> float | None:
        """Median of the engine's time over this contender's."""
        row = self._rows.get((replay, interval, contender))
        return None if row is None or row["engine_over_it"] is None else float(row["engine_over_it"]["median"])

    def rivals(self, *, in_blocks: bool = False) -> list[str]:
        """Names of the optimizers that compete."""
        names = dict.fromkeys(name for _, _, name in self._rows if name not in (ENGINE, PASS, IN_CACHE))
        return [name for name in names if name.endswith(_BLOCKS) == in_blocks]

    def faster(self, replay: bool, interval: int, *, in_blocks: bool = False) -> tuple[float, str] | None:
        """The largest of the engine's ratios to the rivals, and whose it is."""
        ratios = [(self.ratio(replay, interval, name), name) for name in self.rivals(in_blocks=in_blocks)]
        return max(((ratio, name) for ratio, name in ratios if ratio is not None), default=None)


def lines(largest: Rows, main_thread: Mapping[str, Any], intervals: Sequence[int]) -> list[Line]:
    """All that should hold, on the figures of the largest size and of the main thread."""
    found = [_against_rivals(largest, *case) for case in AGAINST_RIVALS]
    found += [_mean_against_pass(largest, interval) for interval in intervals]
    found += [_replay_against_bounds(largest, interval) for interval in intervals]
    return [*found, _loop(main_thread)]


def _name(replay: bool, interval: int) -> str:
    return f"{'replay' if replay else 'mean'}, S = {interval}"


def _against_rivals(rows: Rows, replay: bool, interval: int, limit: float) -> Line:
    claim = f"{_name(replay, interval)}: time at most {limit:.2f} of the faster rival's"
    found = rows.faster(replay, interval)
    if found is None:
        return Line(claim, "", None)
    blocks = rows.faster(replay, interval, in_blocks=True)
    beside = "" if blocks is None else f"; in blocks {blocks[0]:.3f}"
    return Line(claim, f"{found[0]:.3f} of {found[1]}{beside}", found[0] <= limit)


def _mean_against_pass(rows: Rows, interval: int) -> Line:
    claim = f"{_name(False, interval)}: rate at least {OF_PASS} of the no-arithmetic pass"
    ratio = rows.ratio(False, interval, PASS)
    return Line(claim, "", None) if ratio is None else Line(claim, f"{1 / ratio:.3f}", 1 / ratio >= OF_PASS)


def _replay_against_bounds(rows: Rows, interval: int) -> Line:
    claim = f"{_name(True, interval)}: rate at least {OF_PASS} of the pass or {OF_IN_CACHE} of in-cache replay"
    to_pass, to_cache = rows.ratio(True, interval, PASS), rows.ratio(True, interval, IN_CACHE)
    if to_pass is None or to_cache is None:
        return Line(claim, "", None)
    holds = 1 / to_pass >= OF_PASS or 1 / to_cache >= OF_IN_CACHE
    return Line(claim, f"{1 / to_pass:.3f} of the pass, {1 / to_cache:.3f} of in-cache", holds)


def _loop(figures: Mapping[str, Any]) -> Line:
    claim = f"a Python loop beside the engine keeps at least {OF_LOOP} of its rate"
    row = figures.get("rows", {}).get(ENGINE)
    if row is None:
        return Line(claim, "", None)
    kept = row["kept"]["median"]
    return Line(claim, f"{kept:.3f}; {work_kept_text(row)}", kept >= OF_LOOP)


def work_kept_text(row: Mapping[str, Any]) -> str:
    """How much of its rate the native code keeps beside the loop."""
    if row["work_kept"] is None:
        return "too few pieces of the native work were done for a rate"
    return f"the native work keeps {row['work_kept']['median']:.3f} of its own"


def table_cells(figures: Mapping[str, Any]) -> Iterator[list[str]]:
    """Cells of a size's table, one list a row."""
    n = figures["elements"]
    for row in sorted(figures["rows"], key=lambda row: (row["replay"], row["interval"], row["ns"]["median"])):
        ns, ratio, interval = row["ns"], row["engine_over_it"], row["interval"]
        in_cache = row["contender"] == IN_CACHE
        yield [
            "replay" if row["replay"] else "mean",
            str(interval),
            row["contender"],
            "" if in_cache else f"{ns['median'] * n * interval / 1e6:.3f}",
            f"{ns['median']:.4f}",
            f"{ns['p5']:.4f} - {ns['p95']:.4f}",
            "" if in_cache else f"{(26 + 2 * interval) / interval / ns['median']:.1f}",
            "" if ratio is None else f"{ratio['median']:.3f} ({ratio['p5']:.3f} - {ratio['p95']:.3f})",
        ]


COLUMNS = ("window", "S", "contender", "ms", "ns", "p5 - p95", "GB/s", "engine / it (p5 - p95)")


def size_table(title: str, figures: Mapping[str, Any]) -> Table:
    """A size's figures for a terminal."""
    table = Table(title=f"{title}: {figures['elements']:,} elements")
    for column in COLUMNS:
        table.add_column(column, justify="left" if column in ("window", "contender") else "right")
    previous = ""
    for cells in table_cells(figures):
        if previous not in ("", cells[0] + cells[1]):
            table.add_section()
        previous = cells[0] + cells[1]
        table.add_row(*cells)
    return table


def lines_table(found: Sequence[Line]) -> Table:
    """What should hold, for a terminal."""
    table = Table(title="at the largest size: medians of ratios of neighbouring samples")
    for column in ("what should hold", "found", ""):
        table.add_column(column)
    for line in found:
        table.add_row(line.claim, line.found, line.verdict)
    return table


def agreement_text(figures: Mapping[str, Any]) -> str:
    """How near the contenders are to the oracle."""
    parts = (
        f"{name} {a['first_ulp']:.2f} ulp after one update, {a['last_ulp']:.2f} after {a['updates']}"
        for name, a in figures["agreement"].items()
    )
    return "checked against zenflow's eager AdamW: " + "; ".join(parts)
