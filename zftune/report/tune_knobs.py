"""Step time over the knobs of a search."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

import plotly.graph_objects as go
from plotly.subplots import make_subplots

from zftune.explain import words
from zftune.report.values import Chart, axis, layout
from zftune.words import value

Document = Mapping[str, Any]

_EDGE, _UNSEEN = "rgba(128,128,128,0.9)", "rgba(140,140,140,0.75)"
_CHOSEN, _START = "#D55E00", "#CC79A7"
_POINT = "#1B7FC4"
_SHARES = (0.0, 0.01, 0.02, 0.05, 0.1, 0.2, 0.3, 0.4, 0.6, 0.8, 1.0)
_INTERVALS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128)
_SLOWEST = 1.5  # times the fastest: slower ones share a colour
_DODGE, _WIDEST = 0.015, 0.036  # of sqrt(k): settings that differ in other knobs stand beside each other
_STRIP_PX, _GAP_PX, _TOP_PX, _BOTTOM_PX = 120, 58, 34, 30


def plane_chart(document: Document) -> Chart | None:
    """Settings over k and S, coloured by step time; None: one of both did not vary."""
    trials = [trial for trial in document["trials"] if _is_placed(trial)]
    shares, intervals = ({trial["knobs"][name] for trial in trials} for name in ("topk_ratio", "update_interval"))
    if len(shares) < 2 or len(intervals) < 2:
        return None
    right, top = math.sqrt(max(shares)) + 0.035, math.log2(max(intervals)) + 0.4
    ticks_x = [one for one in _SHARES if one <= max(shares)]
    ticks_y = [one for one in _INTERVALS if one <= max(intervals)]
    figure = go.Figure(
        layout=layout(
            460,
            xaxis=axis(
                "topk_ratio k", range=[-0.035, right], tickvals=[math.sqrt(one) for one in ticks_x],
                ticktext=[f"{one:g}" for one in ticks_x],
            ),
            yaxis=axis(
                "update_interval S, steps", range=[-0.4, top], tickvals=[math.log2(one) for one in ticks_y],
                ticktext=[str(one) for one in ticks_y],
            ),
            hovermode="closest",
        )
    )  # fmt: skip
    return Chart(figure, _placed(figure, document, trials), [])


def _is_placed(trial: Mapping[str, Any]) -> bool:
    k, interval = (trial["knobs"].get(name) for name in ("topk_ratio", "update_interval"))
    return isinstance(k, int | float) and k >= 0 and isinstance(interval, int) and interval >= 1


def _placed(figure: go.Figure, document: Document, trials: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    places = _places(trials)
    unseen = [trial for trial in trials if trial["step_ms"] is None]
    timed = sorted((trial for trial in trials if trial["step_ms"] is not None), key=lambda trial: -trial["step_ms"])
    legend = {}
    if unseen:
        mark = {"color": _UNSEEN, "symbol": "square-open", "size": 7}
        figure.add_trace(_dots("not measured", unseen, places, mark))
        legend["not measured"] = _UNSEEN
    if timed:
        fastest, slowest = timed[-1]["step_ms"], timed[0]["step_ms"]
        mark = {
            "color": [trial["step_ms"] for trial in timed],
            "colorscale": "Viridis",
            "cmin": fastest,
            "cmax": min(slowest, _SLOWEST * fastest) if slowest > fastest else fastest + 1,
            "colorbar": {"title": {"text": "ms a step"}, "thickness": 12, "outlinewidth": 0, "len": 0.9},
            "size": 15,
            "line": {"width": 1.5, "color": _EDGE},
        }
        figure.add_trace(_dots("measured", timed, places, mark))
    for name, colour, size, trial in (
        ("start", _START, 24, document["start"]),
        ("kept", _CHOSEN, 30, document["best"]),
    ):
        if trial is not None and trial["number"] in places:
            mark = {"color": colour, "symbol": "circle-open", "size": size, "line": {"width": 2.5, "color": colour}}
            figure.add_trace(_dots(name, [trial], places, mark))
            legend[name] = colour
    return legend


def _places(trials: Sequence[Mapping[str, Any]]) -> dict[int, tuple[float, float]]:
    """By number: measured settings of the same k and S stand beside each other, the others lie in the middle."""
    cells: dict[tuple[float, int], list[int]] = defaultdict(list)
    for trial in trials:
        if trial["step_ms"] is not None:
            cells[trial["knobs"]["topk_ratio"], trial["knobs"]["update_interval"]].append(trial["number"])
    places = {}
    for trial in trials:
        k, interval = trial["knobs"]["topk_ratio"], trial["knobs"]["update_interval"]
        those = cells[k, interval]
        aside = those.index(trial["number"]) - (len(those) - 1) / 2 if trial["number"] in those else 0.0
        aside *= min(_DODGE, _WIDEST / max(1, len(those) - 1))
        places[trial["number"]] = math.sqrt(k) + aside, math.log2(interval)
    return places


def _dots(
    name: str,
    trials: Sequence[Mapping[str, Any]],
    places: Mapping[int, tuple[float, float]],
    marker: Mapping[str, Any],
) -> go.Scatter:
    return go.Scatter(
        name=name,
        x=[places[trial["number"]][0] for trial in trials],
        y=[places[trial["number"]][1] for trial in trials],
        mode="markers",
        marker=dict(marker),
        customdata=[[trial["number"], _about(trial)] for trial in trials],
        hovertemplate="%{customdata[1]}<extra>" + name + "</extra>",
        cliponaxis=False,
    )


def _about(trial: Mapping[str, Any]) -> str:
    lines = [f"{trial['number']}: {words.setting(trial['knobs'])}"]
    if trial["step_ms"] is not None:
        lines.append(f"measured {trial['step_ms']:.1f} ms a step")
    if trial["predicted_step_ms"] is not None:
        lines.append(f"the planner predicts {trial['predicted_step_ms']:.1f} ms")
    lines += [f"{trial['state']}: {trial['reason']}"] if trial["reason"] else []
    return "<br>".join(escape(line) for line in lines)


def knobs_chart(document: Document) -> Chart | None:
    """Step time over each knob that varied and has no axis of its own; None: there is none."""
    timed = [trial for trial in document["trials"] if trial["step_ms"] is not None]
    placed = ("topk_ratio", "update_interval") if plane_chart(document) is not None else ()
    names = [name for name in _varied(timed) if name not in placed]
    if not names:
        return None
    plot_px = len(names) * _STRIP_PX + (len(names) - 1) * _GAP_PX
    figure = make_subplots(rows=len(names), cols=1, vertical_spacing=_GAP_PX / plot_px if len(names) > 1 else 0.0)
    margin = {"l": 8, "r": 12, "t": _TOP_PX, "b": _BOTTOM_PX}
    figure.update_layout(**layout(plot_px + _TOP_PX + _BOTTOM_PX, margin=margin, hovermode="closest"))
    best = document["best"]["number"]
    for row, name in enumerate(names, 1):
        labels = _labels([trial["knobs"].get(name) for trial in timed])
        figure.add_trace(_strip(timed, name, best), row=row, col=1)
        figure.update_xaxes(**axis(type="category", categoryorder="array", categoryarray=labels), row=row, col=1)
        figure.update_yaxes(**axis(nticks=5), row=row, col=1)
        _title(figure, row, f"{escape(name)}: ms a step")
    return Chart(figure, {"measured": _POINT, "kept": _CHOSEN})


def _varied(trials: Sequence[Mapping[str, Any]]) -> list[str]:
    names = dict.fromkeys(name for trial in trials for name in trial["knobs"])
    return [name for name in names if len({value(trial["knobs"].get(name)) for trial in trials}) > 1]


def _labels(values: Sequence[object]) -> list[str]:
    numbers = {value(one): one if isinstance(one, int | float) else math.inf for one in values}
    return [escape(label) for label in sorted(numbers, key=lambda label: (numbers[label], label))]


def _strip(trials: Sequence[Mapping[str, Any]], name: str, best: int) -> go.Scatter:
    return go.Scatter(
        name=escape(name),
        x=[escape(value(trial["knobs"].get(name))) for trial in trials],
        y=[trial["step_ms"] for trial in trials],
        mode="markers",
        marker={
            "color": [_strip_colour(trial, best) for trial in trials],
            "size": [12 if trial["number"] == best else 9 for trial in trials],
            "opacity": 0.85,
        },
        customdata=[[trial["number"], _about(trial)] for trial in trials],
        hovertemplate="%{customdata[1]}<extra></extra>",
    )


def _strip_colour(trial: Mapping[str, Any], best: int) -> str:
    return _CHOSEN if trial["number"] == best else _POINT


def _title(figure: go.Figure, row: int, text: str) -> None:
    suffix = "" if row == 1 else str(row)
    figure.add_annotation(
        text=text, xref="paper", yref=f"y{suffix} domain", x=0, y=1, yshift=4, xanchor="left", yanchor="bottom",
        showarrow=False, font={"size": 12},
    )  # fmt: skip
