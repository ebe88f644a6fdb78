"""The measured steps on one time axis: what each was spent on, and samples of link, processors, power and memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import plotly.graph_objects as go
from plotly.subplots import make_subplots

from zftune.report.chart import Chart, axis, layout, reason
from zftune.report.lanes import steps_of
from zftune.report.palette import CAUSE_NAMES, CAUSES, PHASES, colour
from zftune.report.values import Document, device_of, samples

_BARS_PX, _PANEL_PX, _GAP_PX = 230, 96, 40
_TOP_PX, _BOTTOM_PX = 30, 46
_DASHES = {"solid": "solid", "dash": "dashed", "dot": "dotted", "dashdot": "dash-dotted"}
"""As plotly calls them, and as a reader does."""
_GREY = "#8C8C8C"
_REST, _EDGE = "rgba(140,140,140,0.28)", "rgba(128,128,128,0.5)"
_MANY_STEPS = 120

Line = tuple[str, str, str, float]
"""A field of the samples, its name, its colour, and what it is multiplied with."""

PANELS: tuple[tuple[str, tuple[tuple[str, Line], ...]], ...] = (
    (
        "PCIe, GB/s",
        (
            ("nvml", ("pcie_rx_gbps", "H2D", colour("h2d"), 1.0)),
            ("nvml", ("pcie_tx_gbps", "D2H", colour("d2h"), 1.0)),
        ),
    ),
    (
        "GPU busy, %",
        (
            ("nvml", ("utilisation_percent", "any kernel", colour("compute"), 1.0)),
            ("nvml", ("sm_utilisation_percent", "multiprocessors", colour("select"), 1.0)),
        ),
    ),
    ("CPU of the run, cores", (("system", ("cpu_percent", "busy cores", colour("host"), 0.01)),)),
    ("Power, W", (("nvml", ("power_w", "GPU", colour("comm"), 1.0)),)),
    (
        "Memory, GB",
        (
            ("nvml", ("memory_used_bytes", "GPU", colour("compute"), 1e-9)),
            ("system", ("rss_bytes", "run", colour("host"), 1e-9)),
            ("system", ("memory_used_bytes", "whole host", _GREY, 1e-9)),
        ),
    ),
)


def run_chart(document: Document) -> Chart:
    """The measured steps, and under them the samples that there are."""
    panels = [(title, lines) for title, lines in PANELS if any(_rows(document, *line) for line in lines)]
    figure = _grid(len(panels))
    legend = _steps(figure, document)
    for number, (title, lines) in enumerate(panels, start=2):
        shown = [line for line in lines if _rows(document, *line)]
        for source, line in shown:
            _samples(figure, number, _rows(document, source, line), line)
        _title(figure, number, _panel_title(title, shown))
    end_s = (document["per_step"][-1]["begin_ms"] + document["per_step"][-1]["step_ms"]) / 1e3
    figure.update_xaxes(**axis(), range=[0, end_s])
    figure.update_xaxes(title={"text": "s since the first measured step began", "standoff": 8}, row=1 + len(panels))
    figure.update_yaxes(**axis(), rangemode="tozero", nticks=5)
    _mark_window(figure, document)
    return Chart(figure, legend, [*_dashes(document), *_absent(document, [title for title, _ in panels])])


def _grid(panels: int) -> go.Figure:
    plot_px = _BARS_PX + panels * (_PANEL_PX + _GAP_PX)
    figure = make_subplots(
        rows=1 + panels,
        cols=1,
        shared_xaxes=True,
        vertical_spacing=_GAP_PX / plot_px if panels else 0.0,
        row_heights=[_BARS_PX, *([_PANEL_PX] * panels)],
    )
    margin = {"l": 8, "r": 12, "t": _TOP_PX, "b": _BOTTOM_PX}
    figure.update_layout(**layout(plot_px + _TOP_PX + _BOTTOM_PX, margin=margin, barmode="stack", hovermode="closest"))
    return figure


def _steps(figure: go.Figure, document: Document) -> dict[str, str]:
    """Bars of the steps: stall by cause and the rest, or the phases where there is no stall; returns the legend."""
    rows = document["per_step"]
    stalls = document["stall"] is not None
    field, kinds = ("stall_ms", CAUSES) if stalls else ("phases_ms", PHASES)
    names = {kind: CAUSE_NAMES[kind] if stalls else kind for kind in kinds}
    legend = {}
    for kind in kinds:
        values = [(row[field] or {}).get(kind) or 0.0 for row in rows]
        if any(values):
            figure.add_trace(_step_bars(rows, values, names[kind], colour(kind)), row=1, col=1)
            legend[names[kind]] = colour(kind)
    left = [max(0.0, row["step_ms"] - sum(v or 0.0 for v in (row[field] or {}).values())) for row in rows]
    if stalls or any(value > 0.001 * row["step_ms"] for value, row in zip(left, rows, strict=True)):
        rest = "compute and all else" if stalls else "not told apart"
        figure.add_trace(_step_bars(rows, left, rest, _REST), row=1, col=1)
        legend[rest] = _REST
    what = "stall by cause" if stalls else "phases"
    _title(figure, 1, f"Time of each step, ms: {what}")
    return legend


def _step_bars(rows: Sequence[Mapping[str, Any]], values: list[float], name: str, fill: str) -> go.Bar:
    return go.Bar(
        name=name,
        x=[row["begin_ms"] / 1e3 for row in rows],
        offset=0,
        width=[row["step_ms"] / 1e3 for row in rows],
        y=values,
        marker={"color": fill, "line": {"width": 0.5 if len(rows) <= _MANY_STEPS else 0, "color": _EDGE}},
        customdata=[[row["step"], row["step_ms"]] for row in rows],
        hovertemplate="step %{customdata[0]} of %{customdata[1]:.2f} ms<br>%{y:.2f} ms<extra>" + name + "</extra>",
    )


def _rows(document: Document, source: str, line: Line) -> list[Mapping[str, Any]]:
    """The samples in which a field was read."""
    return [row for row in samples(document, source) if row.get(line[0]) is not None]


def _samples(figure: go.Figure, number: int, rows: list[Mapping[str, Any]], line: Line) -> None:
    field, name, fill, factor = line
    for device in sorted({device_of(row) for row in rows}, key=lambda device: -1 if device is None else device):
        own = [row for row in rows if device_of(row) == device]
        label = name if device is None else f"{name}, GPU {device}"
        trace = go.Scatter(
            name=label,
            x=[row["at_ms"] / 1e3 for row in own],
            y=[row[field] * factor for row in own],
            mode="lines+markers" if len(own) < 3 else "lines",
            line={"color": fill, "width": 1.6, "dash": _dash(device or 0)},
            meta={"field": field, "factor": factor},
            hovertemplate="%{x:.2f} s<br>%{y:.3~g}<extra>" + label + "</extra>",
        )
        figure.add_trace(trace, row=number, col=1)


def _panel_title(title: str, lines: Sequence[tuple[str, Line]]) -> str:
    """The panel's title with the lines' names in their colours."""
    names = [f"<span style='color:{fill}'>━</span> {name}" for _, (_, name, fill, _) in lines]
    return f"<b>{title}</b>   {'  '.join(names)}"


def _dashes(document: Document) -> list[str]:
    """What the dashes mean, where there are several GPUs."""
    devices = sorted({device for row in samples(document, "nvml") if (device := device_of(row)) is not None})
    if len(devices) < 2:
        return []
    return [", ".join(f"GPU {device} {_DASHES[_dash(device)]}" for device in devices) + "."]


def _dash(device: int) -> str:
    return list(_DASHES)[device % len(_DASHES)]


def _title(figure: go.Figure, number: int, text: str) -> None:
    """A title above a panel, at its left."""
    top = figure.layout["yaxis" if number == 1 else f"yaxis{number}"].domain[1]
    bold = text if text.startswith("<b>") else f"<b>{text}</b>"
    place = {"xref": "paper", "yref": "paper", "x": 0, "y": top, "xanchor": "left", "yanchor": "bottom", "yshift": 4}
    figure.add_annotation({**place, "text": bold, "showarrow": False, "font": {"size": 12}, "align": "left"})


def _mark_window(figure: go.Figure, document: Document) -> None:
    """A band over the steps that the timeline shows."""
    rows = steps_of(document)
    if rows:
        begin_s, end_s = rows[0]["begin_ms"] / 1e3, (rows[-1]["begin_ms"] + rows[-1]["step_ms"]) / 1e3
        fill = {"fillcolor": "rgba(86,180,233,0.14)", "line": {"width": 0}, "layer": "below"}
        figure.add_shape(
            {"type": "rect", "xref": "x", "yref": "paper", "y0": 0, "y1": 1, "x0": begin_s, "x1": end_s} | fill
        )


def _absent(document: Document, shown: Sequence[str]) -> list[str]:
    """A sentence for each panel that there are no samples for."""
    notes = []
    for title, lines in PANELS:
        if title not in shown:
            names = dict.fromkeys(
                name for source, (field, *_) in lines for name in (f"series.{source}", f"{source}.{field}")
            )
            notes.append(f"{title.partition(',')[0]} is not shown: {reason(document, *names)}.")
    if document["stall"] is None:
        notes.append(f"Stall is not shown: {reason(document, 'stall')}. The bars show the phases instead.")
    return notes
