"""The measured steps on one time axis with their samples, and lower bounds beside them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import plotly.graph_objects as go
from plotly.subplots import make_subplots

from zftune.profile.schema import CAUSES, PHASES
from zftune.profile.verdict import phase_names
from zftune.report.trace import steps_of
from zftune.report.values import Chart, Document, axis, device_of, layout, rate, reason, samples
from zftune.text import ms
from zftune.words import CAUSE_NAMES, colour

_ROOFS = {
    "d2h": ("link down (D2H)", "d2h_ms", "d2h_gbps"),
    "h2d": ("link up (H2D)", "h2d_ms", "h2d_gbps"),
    "host": ("host memory", "host_ms", "host_gbps"),
}
_SHADE = "rgba(140,140,140,0.16)"
_POINTS = 101


def roofs_chart(document: Document) -> Chart | None:
    """Time per step against the share of the state that is deferred; None where the document has no roofs.

    Link and host roofs grow in proportion to the deferred share, compute does not; below the highest of them no step
    can be. None of them counts waits that follow from the order of the work, so a measured step lies on or above.
    """
    roofs = document["roofs"]
    if roofs is None:
        return None
    now, unit = _deferred_now(document)
    slopes = {key: (roofs[field] or 0.0) / now for key, (_, field, _) in _ROOFS.items()}
    floor = roofs["compute_ms"] or 0.0
    highest = max([floor, *slopes.values(), document["step_ms"]["mean"]]) * 1.12
    figure = go.Figure(layout=_layout(unit, highest))
    xs = [index / (_POINTS - 1) for index in range(_POINTS)]
    least = [max([floor, *(slope * x for slope in slopes.values())]) for x in xs]
    shade = {"fill": "tozeroy", "fillcolor": _SHADE, "line": {"width": 0}, "hoverinfo": "skip"}
    figure.add_trace(go.Scatter(name="no step can be here", x=xs, y=least, mode="lines", **shade))
    if roofs["compute_ms"] is not None:
        figure.add_trace(_line("compute", [0.0, 1.0], [floor, floor], colour("compute"), "solid"))
    for key, slope in slopes.items():
        if slope:
            dash = "dash" if key == "h2d" else "solid"
            figure.add_trace(_line(_ROOFS[key][0], [0.0, now, 1.0], [0.0, slope * now, slope], colour(key), dash))
    _points(figure, document, now)
    return Chart(figure, _legend(roofs))


def _deferred_now(document: Document) -> tuple[float, str]:
    knobs = document["knobs"]
    if knobs is not None:
        share = knobs["offload_ratio"] * (1 - knobs["topk_ratio"])
        if share > 0:
            return share, "deferred share of the state"
    return 1.0, "bytes per step, over this run's"


def _layout(unit: str, highest: float) -> dict[str, Any]:
    return layout(340, xaxis=axis(unit, range=[0, 1]), yaxis=axis("ms a step", range=[0, highest]), hovermode="closest")


def _line(name: str, xs: list[float], ys: list[float], fill: str, dash: str) -> go.Scatter:
    hover = "%{x:.2f}: %{y:.1f} ms<extra>" + name + "</extra>"
    return go.Scatter(
        name=name, x=xs, y=ys, mode="lines", line={"color": fill, "dash": dash, "width": 2.5}, hovertemplate=hover
    )


def _points(figure: go.Figure, document: Document, now: float) -> None:
    least, measured = document["roofs"]["least_step_ms"], document["step_ms"]["mean"]
    side = "right" if now > 0.5 else "left"
    for name, value, symbol, place in (
        ("measured step", measured, "circle", "top"),
        ("least possible step", least, "diamond-open", "bottom"),
    ):
        figure.add_trace(
            go.Scatter(
                name=name,
                x=[now],
                y=[value],
                mode="markers",
                marker={"size": 12, "symbol": symbol, "color": "#7A7A7A", "line": {"width": 2, "color": "#7A7A7A"}},
                hovertemplate="%{y:.1f} ms<extra>" + name + "</extra>",
            )
        )
        figure.add_annotation(
            x=now,
            y=value,
            text=f"<b>{name} {ms(value)}</b>",
            showarrow=False,
            xanchor=side,
            yanchor="bottom" if place == "top" else "top",
            xshift=-4 if side == "right" else 4,
            yshift=8 if place == "top" else -8,
        )


def _legend(roofs: Mapping[str, Any]) -> dict[str, str]:
    named = {}
    if roofs["compute_ms"] is not None:
        named[f"compute {ms(roofs['compute_ms'])}"] = colour("compute")
    for key, (name, field, limit) in _ROOFS.items():
        if roofs[field]:
            at = "" if roofs[limit] is None else f" at {rate(roofs[limit])}"
            named[f"{name} {ms(roofs[field])}{at}"] = colour(key)
    return {**named, "no step can be here": _SHADE}


_BARS_PX, _PANEL_PX, _GAP_PX = 230, 96, 40
_TOP_PX, _BOTTOM_PX = 30, 46
_DASHES = {"solid": "solid", "dash": "dashed", "dot": "dotted", "dashdot": "dash-dotted"}
_GREY = "#8C8C8C"
_REST, _EDGE = "rgba(140,140,140,0.28)", "rgba(128,128,128,0.5)"
_MANY_STEPS = 120
_FEWEST_SAMPLES = 2

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
    drawn = [(title, [line for line in lines if _is_curve(_rows(document, *line))]) for title, lines in PANELS]
    panels = [(title, lines) for title, lines in drawn if lines]
    figure = _grid(len(panels))
    legend = _steps(figure, document)
    for number, (title, shown) in enumerate(panels, start=2):
        for source, line in shown:
            _samples(figure, number, _rows(document, source, line), line)
        _title(figure, number, _panel_title(title, shown))
    last = document["per_step"][-1]
    figure.update_xaxes(**axis(), range=[0, last["begin_ms"] + last["step_ms"]])
    figure.update_xaxes(title={"text": "ms since the first measured step began", "standoff": 8}, row=1 + len(panels))
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
    names = CAUSE_NAMES if stalls else {kind: phase_names(document).get(kind, kind) for kind in kinds}
    legend = {}
    for kind in kinds:
        values = [(row[field] or {}).get(kind) or 0.0 for row in rows]
        if any(values):
            figure.add_trace(_step_bars(rows, values, names[kind], colour(kind)), row=1, col=1)
            legend[names[kind]] = colour(kind)
    left = [max(0.0, row["step_ms"] - sum(v or 0.0 for v in (row[field] or {}).values())) for row in rows]
    if stalls or any(value > 0.001 * row["step_ms"] for value, row in zip(left, rows, strict=True)):
        rest = "compute and all else" if stalls else "not distinguished"
        figure.add_trace(_step_bars(rows, left, rest, _REST), row=1, col=1)
        legend[rest] = _REST
    what = "stall by cause" if stalls else "phases"
    _title(figure, 1, f"Time of each step, ms: {what}")
    return legend


def _step_bars(rows: Sequence[Mapping[str, Any]], values: list[float], name: str, fill: str) -> go.Bar:
    return go.Bar(
        name=name,
        x=[row["begin_ms"] for row in rows],
        offset=0,
        width=[row["step_ms"] for row in rows],
        y=values,
        marker={"color": fill, "line": {"width": 0.5 if len(rows) <= _MANY_STEPS else 0, "color": _EDGE}},
        customdata=[[row["step"], row["step_ms"]] for row in rows],
        hovertemplate="step %{customdata[0]} of %{customdata[1]:.2f} ms<br>%{y:.2f} ms<extra>" + name + "</extra>",
    )


def _rows(document: Document, source: str, line: Line) -> list[Mapping[str, Any]]:
    return [row for row in samples(document, source) if row.get(line[0]) is not None]


def _is_curve(rows: Sequence[Mapping[str, Any]]) -> bool:
    return max(Counter(map(device_of, rows)).values(), default=0) >= _FEWEST_SAMPLES


def _samples(figure: go.Figure, number: int, rows: list[Mapping[str, Any]], line: Line) -> None:
    field, name, fill, factor = line
    for device in sorted({device_of(row) for row in rows}, key=lambda device: -1 if device is None else device):
        own = [row for row in rows if device_of(row) == device]
        label = name if device is None else f"{name}, GPU {device}"
        trace = go.Scatter(
            name=label,
            x=[row["at_ms"] for row in own],
            y=[row[field] * factor for row in own],
            mode="lines+markers" if len(own) < 3 else "lines",
            line={"color": fill, "width": 1.6, "dash": _dash(device or 0)},
            meta={"field": field, "factor": factor},
            hovertemplate="%{x:,.0f} ms<br>%{y:.3~g}<extra>" + label + "</extra>",
        )
        figure.add_trace(trace, row=number, col=1)


def _panel_title(title: str, lines: Sequence[tuple[str, Line]]) -> str:
    names = [f"<span style='color:{fill}'>━</span> {name}" for _, (_, name, fill, _) in lines]
    return f"<b>{title}</b>   {'  '.join(names)}"


def _dashes(document: Document) -> list[str]:
    devices = sorted({device for row in samples(document, "nvml") if (device := device_of(row)) is not None})
    if len(devices) < 2:
        return []
    return [", ".join(f"GPU {device} {_DASHES[_dash(device)]}" for device in devices) + "."]


def _dash(device: int) -> str:
    return list(_DASHES)[device % len(_DASHES)]


def _title(figure: go.Figure, number: int, text: str) -> None:
    top = figure.layout["yaxis" if number == 1 else f"yaxis{number}"].domain[1]
    bold = text if text.startswith("<b>") else f"<b>{text}</b>"
    place = {"xref": "paper", "yref": "paper", "x": 0, "y": top, "xanchor": "left", "yanchor": "bottom", "yshift": 4}
    figure.add_annotation({**place, "text": bold, "showarrow": False, "font": {"size": 12}, "align": "left"})


def _mark_window(figure: go.Figure, document: Document) -> None:
    """A band over the steps that the timeline shows."""
    rows = steps_of(document)
    if rows:
        begin_ms, end_ms = rows[0]["begin_ms"], rows[-1]["begin_ms"] + rows[-1]["step_ms"]
        fill = {"fillcolor": "rgba(86,180,233,0.14)", "line": {"width": 0}, "layer": "below"}
        figure.add_shape(
            {"type": "rect", "xref": "x", "yref": "paper", "y0": 0, "y1": 1, "x0": begin_ms, "x1": end_ms} | fill
        )


def _absent(document: Document, shown: Sequence[str]) -> list[str]:
    notes, few = [], []
    for title, lines in PANELS:
        if title not in shown and any(_rows(document, *line) for line in lines):
            few.append(title.partition(",")[0])
        elif title not in shown:
            names = dict.fromkeys(
                name for source, (field, *_) in lines for name in (f"series.{source}", f"{source}.{field}")
            )
            notes.append(f"{title.partition(',')[0]} is not shown: {reason(document, *names)}.")
    if few:
        last = document["per_step"][-1]
        those = f"{', '.join(few[:-1])} and {few[-1]} are" if len(few) > 1 else f"{few[0]} is"
        notes.append(f"{those} not shown: {ms(last['begin_ms'] + last['step_ms'])} have fewer than two samples.")
    if document["stall"] is None:
        notes.append(f"Stall is not shown: {reason(document, 'stall')}. The bars show the phases instead.")
    return notes
