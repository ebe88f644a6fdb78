"""The timeline of one update window: a lane for each resource, and one for the stalls."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import plotly.graph_objects as go

from zftune.report.chart import Chart, axis, layout
from zftune.report.palette import CAUSE_NAMES, LANE_NAMES, PHASES, colour
from zftune.report.values import Document

Row = Sequence[Any]
"""A span: [begin_ms, end_ms, label]."""

_MANY_SPANS = 5000
"""More than a browser draws at ease: neighbours that no screen could tell apart are then drawn as one."""
_PIXELS = 2000
_MANY_STEPS = 24


def timeline_chart(document: Document) -> Chart | None:
    """The document's timeline; None where it has none."""
    timeline = document["timeline"]
    if timeline is None:
        return None
    lanes = {lane: timeline["lanes"][lane] for lane in LANE_NAMES if lane in timeline["lanes"]}
    drawn = _fewer(lanes, timeline["length_ms"])
    figure = go.Figure(layout=_layout(document, list(lanes)))
    legend: dict[str, str] = {}
    for lane, kind, rows in _kinds(drawn):
        figure.add_trace(_bars(lane, kind, rows))
        if lane in ("compute", "stall"):  # the others are named by their lane
            legend[CAUSE_NAMES.get(kind, kind) if lane == "stall" else kind] = colour(kind)
    notes = [] if lanes == drawn else ["Neighbouring spans that no screen could tell apart are drawn as one."]
    return Chart(figure, legend, notes)


def steps_of(document: Document) -> list[Mapping[str, Any]]:
    """The rows of `per_step` that the timeline is about; empty where the steps are not among them."""
    timeline = document["timeline"]
    if timeline is None:
        return []
    first, last = timeline["first_step"], timeline["first_step"] + timeline["steps"]
    return [row for row in document["per_step"] if first <= row["step"] < last]


def kind_of(lane: str, label: str) -> str:
    """What a span's colour follows from: the phase in the compute lane, the cause among stalls, else the lane."""
    if lane == "compute":
        return label if label in PHASES else "compute"
    if lane == "stall":
        return label if label in CAUSE_NAMES else "other"
    return lane


def _kinds(lanes: Mapping[str, Sequence[Row]]) -> Iterator[tuple[str, str, list[Row]]]:
    for lane, rows in lanes.items():
        found: dict[str, list[Row]] = defaultdict(list)
        for row in rows:
            found[kind_of(lane, row[2])].append(row)
        for kind, same in found.items():
            yield lane, kind, same


def _bars(lane: str, kind: str, rows: Sequence[Row]) -> go.Bar:
    return go.Bar(
        name=f"{lane}: {kind}",
        orientation="h",
        base=[row[0] for row in rows],
        x=[row[1] - row[0] for row in rows],
        y=[LANE_NAMES[lane]] * len(rows),
        width=0.66,
        marker={"color": colour(kind), "line": {"width": 0}},
        customdata=[[_escaped(row[2]), row[1]] for row in rows],
        hovertemplate="%{customdata[0]}<br>%{base:.3f} to %{customdata[1]:.3f} ms"
        "<br>%{x:.3f} ms<extra>" + LANE_NAMES[lane] + "</extra>",
    )


def _layout(document: Document, lanes: Sequence[str]) -> dict[str, Any]:
    timeline = document["timeline"]
    names = [LANE_NAMES[lane] for lane in lanes]
    shapes, annotations = _step_lines(document)
    return layout(
        96 + 40 * len(lanes),
        barmode="overlay",
        xaxis=axis("ms", range=[0, timeline["length_ms"]]),
        yaxis=axis(
            categoryorder="array", categoryarray=names, range=[len(names) - 0.5, -0.5], showgrid=False, ticks=""
        ),
        shapes=shapes,
        annotations=annotations,
    )


def _step_lines(document: Document) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """A line where each step begins, and its number."""
    rows = steps_of(document)
    shapes, annotations = [], []
    for row in rows if len(rows) <= _MANY_STEPS else ():
        at = row["begin_ms"] - rows[0]["begin_ms"]
        line = {"width": 1, "dash": "dot", "color": "rgba(128,128,128,0.9)"}
        shapes.append(
            {"type": "line", "xref": "x", "yref": "paper", "x0": at, "x1": at, "y0": 0, "y1": 1, "line": line}
        )
        text = f"step {row['step']}" if len(rows) <= 8 else str(row["step"])
        place = {"xref": "x", "yref": "paper", "x": at, "y": 1, "xanchor": "left", "yanchor": "bottom"}
        annotations.append({**place, "text": text, "showarrow": False, "font": {"size": 11}})
    return shapes, annotations


def _fewer(lanes: Mapping[str, Sequence[Row]], length_ms: float) -> Mapping[str, Sequence[Row]]:
    if sum(len(rows) for rows in lanes.values()) <= _MANY_SPANS:
        return lanes
    return {lane: _merged(lane, rows, length_ms / _PIXELS) for lane, rows in lanes.items()}


def _merged(lane: str, rows: Sequence[Row], gap_ms: float) -> list[Row]:
    merged: list[list[Any]] = []
    counts: list[int] = []
    for begin, end, label in rows:
        same = bool(merged) and kind_of(lane, merged[-1][2]) == kind_of(lane, label)
        if same and begin - merged[-1][1] < gap_ms and begin - merged[-1][0] < 4 * gap_ms:
            merged[-1][1] = max(merged[-1][1], end)
            counts[-1] += 1
        else:
            merged.append([begin, end, label])
            counts.append(1)
    named = zip(merged, counts, strict=True)
    keep = lane in ("compute", "stall")  # whose labels the colour follows from
    return [[b, e, label if keep or n == 1 else f"{label} and {n - 1} more"] for (b, e, label), n in named]


def _escaped(text: str) -> str:
    """Text of a figure, where plotly knows some HTML."""
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
