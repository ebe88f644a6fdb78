"""The figures as a picture."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hostupdate.report import ENGINE, IN_CACHE, PASS

_COLOURS = {ENGINE: "#0072b2", PASS: "#000000", IN_CACHE: "#009e73"}
_RIVALS = ("#d55e00", "#e69f00", "#cc79a7", "#999999")  # distinguishable with any colour vision


def draw(path: Path, titles: Sequence[str], sizes: Sequence[Mapping[str, Any]], intervals: Sequence[int]) -> str | None:
    """Write an SVG: a column for each size, means above replays; None, or why there is none."""
    try:
        import matplotlib as mpl
        from matplotlib.figure import Figure
    except ImportError:
        return "no picture was drawn: matplotlib is not installed (it is in the extra dev)"
    names = list(dict.fromkeys(row["contender"] for figures in sizes for row in figures["rows"]))
    bars = [name for name in names if name not in (PASS, IN_CACHE)]
    colours = {**dict(zip([name for name in bars if name != ENGINE], _RIVALS, strict=False)), **_COLOURS}
    with mpl.rc_context({"svg.hashsalt": "001-host-update", "font.size": 8}):
        figure = Figure(figsize=(4 * len(sizes), 6), layout="constrained")
        axes = figure.subplots(2, len(sizes), squeeze=False, sharex=True)
        for column, (title, figures) in enumerate(zip(titles, sizes, strict=True)):
            for row, replay in enumerate((False, True)):
                axis = axes[row][column]
                _panel(axis, figures["rows"], replay, bars, colours, intervals)
                axis.set_title(f"{'replay' if replay else 'mean'}, {title}")
        for row in range(2):
            axes[row][0].set_ylabel("ns for each element and gradient")
        handles, labels = axes[1][-1].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=min(4, len(labels)))
        figure.savefig(path, metadata={"Date": None})
    return None


def _panel(
    axis: Any,
    rows: Sequence[Mapping[str, Any]],
    replay: bool,
    bars: Sequence[str],
    colours: Mapping[str, str],
    intervals: Sequence[int],
) -> None:
    """Bars with p5 to p95 for the contenders, lines for what bounds them."""
    found = {(row["interval"], row["contender"]): row["ns"] for row in rows if row["replay"] == replay}

    def of(name: str) -> tuple[list[int], list[Mapping[str, float]]]:
        there = [place for place, interval in enumerate(intervals) if (interval, name) in found]
        return there, [found[intervals[place], name] for place in there]

    width = 0.8 / len(bars)
    for index, name in enumerate(bars):
        places, spreads = of(name)
        lower = [ns["median"] - ns["p5"] for ns in spreads]
        upper = [ns["p95"] - ns["median"] for ns in spreads]
        left = [place - 0.4 + (index + 0.5) * width for place in places]
        heights = [ns["median"] for ns in spreads]
        colour = colours.get(name, "#999999")
        axis.bar(left, heights, width, yerr=[lower, upper], error_kw={"lw": 0.8}, color=colour, label=name)
    for name, style in ((PASS, "solid"), (IN_CACHE, "dotted")):
        places, spreads = of(name)
        ends = [place - 0.45 for place in places], [place + 0.45 for place in places]
        if places:
            heights = [ns["median"] for ns in spreads]
            axis.hlines(heights, *ends, colors=colours[name], linestyles=style, label=name)
    axis.set_xticks(range(len(intervals)), [f"S = {interval}" for interval in intervals])
