"""The roofs over a step: what link, host memory and compute need for it, whatever overlaps."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import plotly.graph_objects as go

from zftune.profile.units import ms
from zftune.report.chart import Chart, axis, layout
from zftune.report.palette import colour
from zftune.report.values import Document, rate

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
    """Where this run is on the axis, and what the axis is."""
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
