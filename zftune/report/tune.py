"""A search as one HTML file that needs nothing else: of a document of `zftune tune` or of `zftune explain`."""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping, Sequence
from html import escape
from typing import Any

import plotly.graph_objects as go
from plotly.subplots import make_subplots

from zftune.explain import words
from zftune.report.html import about_rig, details, foot, page, section
from zftune.report.tables import table, tiles
from zftune.report.tune_knobs import knobs_chart, plane_chart
from zftune.report.values import Chart, axis, layout
from zftune.text import amount, ms, number, percent
from zftune.tuner.states import OF_INCUMBENT
from zftune.words import DECISIONS, seconds

KINDS = {
    "best so far": ("#8C8C8C", "circle", 8),
    "not adopted": ("#56B4E9", "circle", 10),
    "adopted": ("#009E73", "circle", 12),
    "guard": ("#D55E00", "triangle-up", 11),
    "crashed": ("#CC79A7", "x", 11),
    "did not count": ("#E69F00", "circle-open", 10),
}
"""What came of a measurement: colour, symbol, size."""
_LINE = "#1B7FC4"


def history_chart(document: Document) -> Chart | None:
    """Step time of each measurement, and of the incumbent; None: nothing was measured."""
    rows = [row for row in measured(document) if row["step_ms"] is not None or row["kind"] == "crashed"]
    if not rows:
        return None
    look = axis("measurement", tickformat="d", nticks=13, range=[rows[0]["number"] - 0.6, rows[-1]["number"] + 0.6])
    figure = go.Figure(layout=layout(380, xaxis=look, yaxis=axis("ms a step"), hovermode="closest"))
    known = [row for row in rows if row["kind"] == "best so far"]
    figure.add_trace(
        go.Scatter(
            name="step time of the best so far",
            x=[row["number"] for row in known],
            y=[row["step_ms"] for row in known],
            mode="lines",
            line={"color": _LINE, "width": 2, "shape": "hv"},
            hoverinfo="skip",
        )
    )
    legend = {"step time of the best so far": _LINE} if known else {}
    for kind, (colour, _, _) in KINDS.items():
        those = [row for row in rows if row["kind"] == kind]
        if those:
            figure.add_trace(_marks(document, kind, those))
            legend[kind] = colour
    _lines(figure, document)
    return Chart(figure, legend, [])


def measured(document: Document) -> list[dict[str, Any]]:
    """Every measurement with what came of it as "kind"."""
    decided = {(note["kind"], note["trial"]) for note in document["decisions"]}
    return [{**row, "kind": _kind(row, decided)} for row in document["history"]]


def _kind(row: Mapping[str, Any], decided: Container[tuple[str, int]]) -> str:
    if row["status"] != "measured":
        return "crashed" if ("crash", row["trial"]) in decided else "did not count"
    if row["role"] in OF_INCUMBENT:
        return "best so far"
    return "adopted" if ("adopt", row["trial"]) in decided else "not adopted"


def _marks(document: Document, kind: str, rows: Sequence[Mapping[str, Any]]) -> go.Scatter:
    colour, symbol, size = KINDS[kind]
    return go.Scatter(
        name=kind,
        x=[row["number"] for row in rows],
        y=[row["step_ms"] or 0.0 for row in rows],
        mode="markers",
        marker={"color": colour, "symbol": symbol, "size": size, "line": {"width": 2 if "open" in symbol else 0.5}},
        customdata=[[_hover(document, row)] for row in rows],
        hovertemplate="%{customdata[0]}<extra>" + kind + "</extra>",
    )


def _hover(document: Document, row: Mapping[str, Any]) -> str:
    trial = document["trials"][row["trial"]]
    time = "no time" if row["step_ms"] is None else f"{row['step_ms']:.1f} ms a step"
    lines = [f"{row['number']}: {row['role']}, {time}", words.setting(trial["knobs"])]
    lines += [str(row["reason"])] if row["reason"] else []
    return "<br>".join(escape(line) for line in lines)


def _lines(figure: go.Figure, document: Document) -> None:
    for note in document["decisions"]:
        if note["kind"] in ("adopt", "guard"):
            after = sum(row["at_unix_s"] <= note["at_unix_s"] for row in document["history"])
            colour = KINDS["adopted"][0] if note["kind"] == "adopt" else KINDS["guard"][0]
            figure.add_vline(x=after + 0.5, line={"color": colour, "width": 1, "dash": "dot"})


# --- the training -----------------------------------------------------------------------------------------------------

_CURVES = (("step_ms", "ms a step", _LINE), ("loss", "loss", "#D55E00"), ("coverage", "coverage", "#009E73"))
_MOST_CHANGES = 200
_CURVE_PX = 130


def curve_chart(document: Document) -> Chart | None:
    """Step time, loss and coverage over the steps of the training, and where knobs changed; None: none is known."""
    curve = document["curve"] or {"points": (), "changes": ()}
    known = {name: [one for one in curve["points"] if one[name] is not None] for name, _, _ in _CURVES}
    rows = [row for row in _CURVES if known[row[0]]]
    if not rows:
        return None
    figure = make_subplots(rows=len(rows), cols=1, shared_xaxes=True, vertical_spacing=0.06)
    figure.update_layout(**layout(90 + _CURVE_PX * len(rows), hovermode="x unified"))
    for place, (name, title, colour) in enumerate(rows, 1):
        points = known[name]
        figure.add_trace(
            go.Scatter(
                name=title,
                x=[one["step"] for one in points],
                y=[one[name] for one in points],
                mode="lines" if len(points) > 1 else "markers",
                line={"color": colour, "width": 2},
                hovertemplate="%{y:.4~g}",
            ),
            row=place,
            col=1,
        )
        figure.update_yaxes(**axis(title, nticks=5), row=place, col=1)
    figure.update_xaxes(**axis())
    figure.update_xaxes(title={"text": "step", "standoff": 8}, row=len(rows))
    for change in curve["changes"][1:][-_MOST_CHANGES:]:
        figure.add_vline(x=change["step"], line={"color": KINDS["best so far"][0], "width": 1, "dash": "dot"})
    return Chart(figure, {title: colour for _, title, colour in rows})


Document = Mapping[str, Any]


def tune_page(document: Document) -> str:
    """The page of a search."""
    charts = _charts(document)
    body = [_head(document), *(text for text, _ in charts.values()), *_tables(document), foot(document)]
    figures = {name: chart.figure.to_plotly_json() for name, (_, chart) in charts.items() if chart is not None}
    return page(_title(document), "\n".join(body), document, figures)


def _title(document: Document) -> str:
    run = document["run"]
    command = "tune" if run is None else f"explain {run['run_id'][:8]}"
    return f"zftune {command}: {_subject(document)}"


def _subject(document: Document) -> str:
    work = document["workload"]
    name = work.get("model") or "a model"
    return f"{name}, {amount(work['parameters'])} parameters" if work.get("parameters") else str(name)


# --- the head ---------------------------------------------------------------------------------------------------------


def _head(document: Document) -> str:
    work = document["workload"]
    sentences = document["verdict"]
    stopped = [document["stopped"]] if document["stopped"] else []
    place = [document["device"], f"quality {document['quality']}"]
    if work.get("micro_batch") and work.get("sequence"):
        place.insert(1, f"{work['micro_batch']} × {work['sequence']} tokens")
    place += [str(document["run"]["backend"])] if document["run"] is not None else []
    place += [work["ranks"]] if (work.get("world_size") or 1) > 1 else []
    lines = "\n".join(f'<p class="verdict">{escape(sentence)}</p>' for sentence in (*sentences, *stopped))
    title = escape(_title(document).replace(": ", " · ", 1))
    return (
        f'<header>\n<h1>{title}</h1>\n<p class="place">{escape(" · ".join(map(str, place)))}</p>\n'
        f"{lines}\n{about_rig(document['rig'])}{tiles(_figures(document))}\n</header>"
    )


def _figures(document: Document) -> Iterator[tuple[str, str, str]]:
    best, start, gain, cost = (document[name] for name in ("best", "start", "gain", "cost"))
    if best is None or cost is None:
        return
    now = best["step_ms"]
    if now is not None:
        at_start = "" if start["step_ms"] is None or best == start else f"{ms(start['step_ms'])} at the start"
        yield "Step", ms(now), at_start
    if gain is not None:
        given_up = -gain["share"] > (gain["error"] or 0.0)
        error = "" if gain["error"] is None else f"± {100 * gain['error']:.1f}% of the step time"
        error += f" over {words.over(gain)}" if gain.get("reference") else ""
        yield "Given up" if given_up else "Gained", f"{100 * (-1 if given_up else 1) * gain['share']:.1f}%", error
    yield from _paid(cost)
    yield "Measurements", *_counts(document)


def _paid(cost: Mapping[str, Any]) -> Iterator[tuple[str, str, str]]:
    share = percent(cost["spent_s"] / cost["elapsed_s"]) if cost["elapsed_s"] else "0%"
    yield "Spent on exploring", share, f"{seconds(cost['spent_s'])} of {seconds(cost['elapsed_s'])}"
    if cost["break_even_s"] is not None and cost["spent_s"] > 0:
        after = seconds(cost["break_even_s"]) if cost["break_even_s"] > 0 else "at once"
        yield "Broke even", after, "of training since the search began"
    elif cost["remaining_s"] is not None:
        yield "Breaks even in", seconds(cost["remaining_s"]), "of training with these settings"


def _counts(document: Document) -> tuple[str, str]:
    trials, made = document["trials"], document["measurements"]
    counted = (one for one in document["history"] if one["role"] != "hold" and one["status"] == "measured")
    tried = len({words.identity(trials[one["trial"]]["knobs"]) for one in counted})
    unseen = len(words.unseen(trials))
    return str(made), f"of {tried} settings; {unseen} more rejected unseen"


# --- charts -----------------------------------------------------------------------------------------------------------


def _charts(document: Document) -> dict[str, tuple[str, Chart | None]]:
    found = (
        ("history", "Search history", _HISTORY, history_chart(document), "Nothing was measured."),
        ("curve", "The training meanwhile", _CURVE, curve_chart(document), ""),
        ("plane", "Step time over k and S", _PLANE, plane_chart(document), _flat(document)),
        (
            "knobs",
            "Step time over the other values",
            _KNOBS,
            knobs_chart(document) if document["best"] else None,
            _SAME,
        ),
    )
    return {
        name: (section(name, title, lead, chart, empty), chart)
        for name, title, lead, chart, empty in found
        if chart is not None or empty
    }


_HISTORY = (
    "Each measurement in order. A setting is adopted when its comparisons with the best so far, measured before and "
    "after it, are enough; dotted lines mark where that happened."
)
_CURVE = "Means of some steps each, over the whole training; dotted lines mark where settings changed."
_PLANE = (
    "k is topk_ratio, S is update_interval. Circles were measured, fast ones dark; small squares were not measured. "
    "Settings that differ otherwise stand beside each other."
)
_KNOBS = "Measured settings, whatever their other values were."
_SAME = "No other value was varied."


def _flat(document: Document) -> str:
    budget = document["budget"]
    why = f": {budget['fixed_because']}" if budget is not None and budget["fixed_because"] else ""
    return f"k and S were not both searched{why}."


# --- tables -----------------------------------------------------------------------------------------------------------


def _tables(document: Document) -> Iterator[str]:
    tried = [trial for trial in document["trials"] if trial["state"] != "rejected"]
    unseen = [trial for trial in document["trials"] if trial["state"] == "rejected"]
    if document["decisions"]:
        yield details("Decisions", _decisions(document), is_open=True)
    if tried:
        yield details("Settings", _trials(tried), is_open=True)
    if unseen:
        reasons = table(
            ("settings", "why"), [(str(one["count"]), one["reason"]) for one in document["rejected"]], ("value",)
        )
        if document["rejected"]:
            yield details("Why settings were rejected unseen", reasons, is_open=True)
        yield details("Settings that were rejected unseen", _trials(unseen), is_open=False)
    if document["notices"]:
        lines = "".join(f'<p class="note">{escape(notice)}</p>' for notice in document["notices"])
        yield details("Notices", lines, is_open=True)


def _decisions(document: Document) -> str:
    rows: list[Sequence[str]] = []
    for note in document["decisions"]:
        setting = "" if note["trial"] is None else str(note["trial"])
        rows.append((seconds(note["at_s"]), DECISIONS.get(note["kind"], note["kind"]), setting, note["reason"]))
    return table(("at", "decision", "setting", "reason"), rows, ("value", "", "value", ""))


def _trials(trials: Sequence[Mapping[str, Any]]) -> str:
    heads = ("", "setting", "by", "measured", "planner", "mean staleness", "weighted staleness", "state", "why")
    rows = [_trial(trial) for trial in trials]
    return table(heads, rows, ("value", "", "", "value", "value", "value", "value", "", "source"))


def _trial(trial: Mapping[str, Any]) -> Sequence[str]:
    return (
        str(trial["number"]),
        words.setting(trial["knobs"]),
        str(trial["source"]),
        _ms(trial["step_ms"]),
        _ms(trial["predicted_step_ms"]),
        _steps(trial["staleness_steps"]),
        _steps(trial["quality_cost_steps"]),
        str(trial["fate"]),
        trial["reason"] or "",
    )


def _ms(value: float | None) -> str:
    return "" if value is None else ms(value)


def _steps(value: float | None) -> str:
    return "" if value is None else f"{number(value)} steps"
