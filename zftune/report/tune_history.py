"""The history of a search: the step time of each measurement, and of the incumbent."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

import plotly.graph_objects as go

from zftune.explain import words
from zftune.report.chart import Chart, axis, layout
from zftune.tuner.states import OF_INCUMBENT

Document = Mapping[str, Any]

KINDS = {
    "incumbent": ("#8C8C8C", "circle", 8),
    "not adopted": ("#56B4E9", "circle", 10),
    "adopted": ("#009E73", "circle", 12),
    "aborted": ("#D55E00", "triangle-up", 11),
    "crashed": ("#CC79A7", "x", 11),
    "did not count": ("#E69F00", "circle-open", 10),
}
"""What came of a measurement: colour, symbol, size."""
_LINE = "#1B7FC4"
_NO_HISTORY = "Single measurements were not kept: each point is a setting's time."


def history_chart(document: Document) -> Chart | None:
    """Step time of each measurement, and of the incumbent; None: nothing was measured."""
    rows = [row for row in measured(document) if row["step_ms"] is not None or row["kind"] == "crashed"]
    if not rows:
        return None
    look = axis("measurement", tickformat="d", nticks=13, range=[rows[0]["number"] - 0.6, rows[-1]["number"] + 0.6])
    figure = go.Figure(layout=layout(380, xaxis=look, yaxis=axis("ms a step"), hovermode="closest"))
    known = [row for row in rows if row["incumbent_step_ms"] is not None]
    figure.add_trace(
        go.Scatter(
            name="the incumbent's step time",
            x=[row["number"] for row in known],
            y=[row["incumbent_step_ms"] for row in known],
            mode="lines",
            line={"color": _LINE, "width": 2, "shape": "hv"},
            hoverinfo="skip",
        )
    )
    legend = {"the incumbent's step time": _LINE} if known else {}
    for kind, (colour, _, _) in KINDS.items():
        those = [row for row in rows if row["kind"] == kind]
        if those:
            figure.add_trace(_marks(document, kind, those))
            legend[kind] = colour
    _lines(figure, document)
    notes = [] if document.get("history") else [_NO_HISTORY]
    return Chart(figure, legend, notes)


def measured(document: Document) -> list[dict[str, Any]]:
    """Every measurement with what came of it as "kind"; a document without them has one for each setting."""
    decided = {number: note["kind"] for note in document["decisions"] for number in note.get("measured", ())}
    if document.get("history"):
        return [{**row, "kind": _kind(row, decided.get(row["number"]))} for row in document["history"]]
    adopted = {note["trial"] for note in document["decisions"] if note["kind"] == "adopt"}
    tried = [trial for trial in document["trials"] if trial["step_ms"] is not None or trial["state"] == "crashed"]
    nothing = dict.fromkeys(("error_ms", "noise", "incumbent_step_ms", "reason"))
    return [
        {
            **nothing,
            "number": order,
            "trial": trial["number"],
            "role": "explore" if trial["number"] else "start",
            "step_ms": trial["step_ms"],
            "kind": "adopted"
            if trial["number"] in adopted
            else _kind({"status": trial["state"], "role": "explore"}, ""),
        }
        for order, trial in enumerate(tried, 1)
    ]


def _kind(row: Mapping[str, Any], decision: str | None) -> str:
    if row["status"] != "measured":
        return {"aborted": "aborted", "crashed": "crashed"}.get(row["status"], "did not count")
    if row["role"] in OF_INCUMBENT:
        return "incumbent"
    return "adopted" if decision == "adopt" else "not adopted"


def _marks(document: Document, kind: str, rows: Sequence[Mapping[str, Any]]) -> go.Scatter:
    colour, symbol, size = KINDS[kind]
    return go.Scatter(
        name=kind,
        x=[row["number"] for row in rows],
        y=[row["incumbent_step_ms"] if row["step_ms"] is None else row["step_ms"] for row in rows],
        error_y={
            "type": "data",
            "array": [2 * (row["error_ms"] or 0.0) for row in rows],
            "color": colour,
            "thickness": 1.5,
            "width": 3,
        },
        mode="markers",
        marker={"color": colour, "symbol": symbol, "size": size, "line": {"width": 2 if "open" in symbol else 0.5}},
        customdata=[[_hover(document, row)] for row in rows],
        hovertemplate="%{customdata[0]}<extra>" + kind + "</extra>",
    )


def _hover(document: Document, row: Mapping[str, Any]) -> str:
    trial = document["trials"][row["trial"]]
    time = "no time" if row["step_ms"] is None else f"{row['step_ms']:.1f} ms a step"
    error = f" ± {2 * row['error_ms']:.1f}" if row["error_ms"] else ""
    lines = [f"{row['number']}: {row['role']}, {time}{error}", words.setting(trial["knobs"])]
    lines += [str(row["reason"])] if row["reason"] else []
    return "<br>".join(escape(line) for line in lines)


def _lines(figure: go.Figure, document: Document) -> None:
    """Where the incumbent changed, and where the search began again or was stopped by the guard."""
    for note in document["decisions"]:
        after = max(note.get("measured", ()), default=None)
        if after is not None and note["kind"] in ("adopt", "reopen", "guard"):
            colour = KINDS["adopted"][0] if note["kind"] == "adopt" else KINDS["aborted"][0]
            figure.add_vline(x=after + 0.5, line={"color": colour, "width": 1, "dash": "dot"})
