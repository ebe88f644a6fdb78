"""A plan as one HTML file that needs nothing else: step time over the window's length, and the figures as tables."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import Any

import plotly.graph_objects as go

from zftune.report.html import details, foot, page, section
from zftune.report.values import Chart, axis, layout
from zftune.text import amount, ms, number, percent, size

# One colour for each k (after Okabe and Ito), one dash for each ratio.
_COLOURS = ("#D55E00", "#E69F00", "#009E73", "#1B7FC4", "#CC79A7", "#8C8C8C")
_DASHES = ("solid", "dash", "dot", "dashdot")
_MARK = "#7A7A7A"
_NAMES = {"proposal": "proposed", "no_offload": "no offloading", "zero_offload": "ZeRO-Offload"}


def plan_html(document: Mapping[str, Any]) -> str:
    """The page of a plan with curves."""
    chart = curves_chart(document)
    lead = (
        "Predicted by simulating the pipeline, with windows that overlap and a lag of S. k is topk_ratio, S is "
        "update_interval. Left of a curve's bend a step waits for the host or the link; right of it a longer window "
        "makes updates later, not steps shorter. In the table, least S is the shortest window with which the host "
        "keeps up. Memory is left out here."
    )
    parts = [
        _head(document),
        section("curves", "Step time over the update interval", lead, chart, ""),
        details("Settings", _settings(document), is_open=True),
        details("Memory of the proposal", _memory(document), is_open=True),
        details("The machine's figures and their sources", _sources(document), is_open=False),
        foot(document),
    ]
    title = f"zftune plan: {document['model']['name']} on {document['machine']['name']}"
    return page(title, "\n".join(parts), document, {"curves": chart.figure.to_plotly_json()})


def curves_chart(document: Mapping[str, Any]) -> Chart:
    """Step time over S, a curve for each k and ratio; the proposal and no offloading beside them."""
    curves: Sequence[Mapping[str, Any]] = document["curves"]
    ratios = list(dict.fromkeys(curve["offload_ratio"] for curve in curves))
    shares = list(dict.fromkeys(curve["topk_ratio"] for curve in curves))
    figure = go.Figure(
        layout=layout(
            430,
            xaxis=axis("update_interval S, steps"),
            yaxis=axis("ms a step", rangemode="tozero"),
            hovermode="closest",
        )
    )
    for curve in curves:
        colour = _COLOURS[shares.index(curve["topk_ratio"]) % len(_COLOURS)]
        dash = _DASHES[ratios.index(curve["offload_ratio"]) % len(_DASHES)]
        name = f"k = {curve['topk_ratio']:g}, ratio {curve['offload_ratio']:g}"
        figure.add_trace(
            go.Scatter(
                name=name,
                x=curve["update_interval"],
                y=curve["step_ms"],
                mode="lines+markers",
                line={"color": colour, "dash": dash, "width": 2},
                marker={"size": 5, "color": colour},
                hovertemplate="S = %{x}: %{y:.1f} ms<extra>" + name + "</extra>",
            )
        )
    _marks(figure, document, max(curves[0]["update_interval"]))
    legend = {f"k = {share:g}": _COLOURS[number_ % len(_COLOURS)] for number_, share in enumerate(shares)}
    notes = [", ".join(f"ratio {ratio:g}: {_DASHES[i % len(_DASHES)]} line" for i, ratio in enumerate(ratios)) + "."]
    return Chart(figure, legend, notes)


def _marks(figure: go.Figure, document: Mapping[str, Any], longest: int) -> None:
    without = document["baselines"]["no_offload"]["step_ms"]
    figure.add_trace(
        go.Scatter(
            name="no offloading",
            x=[1, longest],
            y=[without, without],
            mode="lines",
            line={"color": _MARK, "dash": "dot", "width": 1.5},
            hovertemplate="%{y:.1f} ms<extra>no offloading</extra>",
        )
    )
    proposal = document["proposal"]
    if proposal is None or proposal["knobs"]["offload_ratio"] == 0:
        return
    interval, step = proposal["knobs"]["update_interval"], proposal["step_ms"]
    figure.add_trace(
        go.Scatter(
            name="proposed",
            x=[interval],
            y=[step],
            mode="markers",
            marker={"size": 13, "symbol": "diamond-open", "color": _MARK, "line": {"width": 2.5, "color": _MARK}},
            hovertemplate="S = %{x}: %{y:.1f} ms<extra>proposed</extra>",
        )
    )


# --- text and tables -------------------------------------------------------------------------------------------------


def _head(document: Mapping[str, Any]) -> str:
    model, machine, job = document["model"], document["machine"], document["job"]
    subject = f"{model['name']}, {amount(model['parameters'])} parameters, {model['dtype']}"
    nodes = f"{job['nodes']} × " if job["nodes"] > 1 else ""
    gpus = f"{nodes}{job['gpus']} × {machine['gpu']}"
    place = f"{gpus} ({machine['name']}) · {job['micro_batch']} × {job['seq']} tokens"
    place += " · checkpointing" if job["checkpointing"] else ""
    sentences = "\n".join(f'<p class="verdict">{escape(sentence)}</p>' for sentence in document["verdict"])
    return (
        f'<header>\n<h1>zftune plan · {escape(subject)}</h1>\n<p class="place">{escape(place)}</p>\n'
        f"{sentences}\n</header>"
    )


def _table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    head = "".join(f"<th>{escape(text)}</th>" for text in heads)
    body = "\n".join(
        "<tr>" + "".join(f'<td class="value">{escape(cell)}</td>' for cell in row) + "</tr>" for row in rows
    )
    return f'<div class="scroll"><table><tr>{head}</tr>\n{body}</table></div>\n'


def _settings(document: Mapping[str, Any]) -> str:
    named = [] if document["proposal"] is None else [(_NAMES["proposal"], document["proposal"])]
    named += [(f"choice {place}", one) for place, one in enumerate(document["alternatives"], 2)]
    named += [(_NAMES[name], one) for name, one in document["baselines"].items()]
    heads = ("setting", "k", "S", "lag", "ratio", "step", "stall", "least S", "staleness", "GPU", "host", "fits")
    return _table(heads, (_row(name, one) for name, one in named))


def _row(name: str, one: Mapping[str, Any]) -> list[str]:
    knobs = one["knobs"]
    stall = sum(one["stall_ms_by_cause"].values()) / one["step_ms"]
    return [
        name,
        f"{knobs['topk_ratio']:g}",
        f"{knobs['update_interval']}" + ("" if knobs["overlap_step"] else ", synchronous"),
        str(knobs["apply_lag"]),
        f"{knobs['offload_ratio']:g}",
        ms(one["step_ms"]),
        percent(stall),
        "none" if one["s_min"] is None else str(one["s_min"]),
        number(one["staleness_steps"]),
        size(one["memory"]["device_bytes"]),
        size(one["memory"]["host_bytes"]),
        "yes" if one["fits"] else "no",
    ]


def _memory(document: Mapping[str, Any]) -> str:
    if document["proposal"] is None:
        return '<p class="empty">Nothing fits.</p>'
    memory = document["proposal"]["memory"]
    rows = [("GPU", use, size(value)) for use, value in memory["device_by_use"].items()]
    rows += [("host", use, size(value)) for use, value in memory["host_by_use"].items()]
    rows += [("host", "of it pinned", size(memory["pinned_bytes"]))]
    rows += [("host", "a reselection, for a moment", size(memory["migration_bytes"]))]
    return _table(("where", "what", "bytes"), rows)


def _sources(document: Mapping[str, Any]) -> str:
    machine = document["machine"]
    rows = ([name, f"{machine[name]:,}", source] for name, source in machine["source"].items())
    return _table(("figure", "value", "source"), rows)
