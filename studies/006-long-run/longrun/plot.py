"""The run as a page: time a token, knobs and memory over the run, beside the oracle and the best fixed setting."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

import plotly.graph_objects as go
from plotly.subplots import make_subplots

from longrun.figures import Fixed
from longrun.grid import Grid
from longrun.scene import PHASES, START
from zftune.report.html import page, section
from zftune.report.values import Chart, axis, layout

_SMOOTH = 24  # steps: a multiple of most windows
_COLOURS = {"daemon": "#1B7FC4", "oracle": "#009E73", "best fixed setting": "#D55E00"}
_KNOBS = {"offload_ratio": "#CC79A7", "topk_ratio": "#E69F00"}
_INTERVAL = "#56B4E9"


def write_page(document: Mapping[str, Any], runs: Sequence[Mapping[str, Any]], of: Fixed, grid: Grid) -> str:
    """The page; one chart for each seed.

    Args:
        document: what the study found, embedded.
        runs: of the daemon, by seed.
        of: oracle and best fixed setting.
        grid: measured.
    """
    lead = (
        f"An emulated accelerator (rig long-run): times are of it. Above: time a token (of {_SMOOTH} steps); below, "
        "the knobs that held and the peak of device memory. Lines across are the phases' begins."
    )
    parts, figures = [f"<h1>{escape('Study 006: a long run')}</h1>"], {}
    for seed, run in enumerate(runs):
        chart = Chart(_figure(run, of, grid), {**_COLOURS, **_KNOBS, "update_interval": _INTERVAL})
        figures[f"seed-{seed}"] = chart.figure.to_plotly_json()
        parts.append(section(f"seed-{seed}", f"Seed {seed}", lead, chart, ""))
    return page("zftune study 006: a long run", "\n".join(parts), document, figures)


def _figure(run: Mapping[str, Any], of: Fixed, grid: Grid) -> go.Figure:
    figure = make_subplots(rows=3, cols=1, shared_xaxes=True, vertical_spacing=0.06, row_heights=[0.5, 0.3, 0.2])
    figure.update_layout(layout(640, hovermode="x unified"))
    _times(figure, run, of, grid)
    _knobs(figure, run)
    # A peak holds until the next; just after it was reset it is nothing.
    seen = [(step, peak / 2**20) for step, peak in run["peaks"] if peak]
    steps, peaks = zip(*seen, (len(run["step_ms"]), seen[-1][1]), strict=True)
    _line(figure, 3, "peak", steps, peaks, "#8C8C8C", shape="hv")
    titles = ("us a token", "ratio; S / 20", "peak, MiB")
    for row, title in enumerate(titles, 1):
        figure.update_yaxes(axis(title), row=row, col=1)
    figure.update_xaxes(axis("step"), row=3, col=1)
    for begin in run["begins"][1:]:
        figure.add_vline(x=begin, line={"color": "#7A7A7A", "width": 1, "dash": "dot"})
    return figure


def _times(figure: go.Figure, run: Mapping[str, Any], of: Fixed, grid: Grid) -> None:
    token_us = [1e3 * ms / tokens for ms, tokens in zip(run["step_ms"], run["tokens"], strict=True)]
    cuts = range(0, len(token_us) - _SMOOTH + 1, _SMOOTH)
    means = [sum(token_us[at : at + _SMOOTH]) / _SMOOTH for at in cuts]
    _line(figure, 1, "daemon", [at + _SMOOTH / 2 for at in cuts], means, _COLOURS["daemon"])
    ends = [*run["begins"][1:], len(token_us)]
    for name, setting_of in (("oracle", of.oracle), ("best fixed setting", dict.fromkeys(of.oracle, of.best))):
        x: list[float] = []
        y: list[float] = []
        for phase, begin, end in zip(PHASES, run["begins"], ends, strict=True):
            cell = grid.cells[phase.name][setting_of[phase.name]]
            x += [begin, end]
            y += [1e3 * cell.step_ms / phase.tokens] * 2
        _line(figure, 1, name, x, y, _COLOURS[name], dash="dash")


def _knobs(figure: go.Figure, run: Mapping[str, Any]) -> None:
    changes = [(0, START.knobs()), *run["changes"], (len(run["step_ms"]), None)]
    changes[-1] = (changes[-1][0], changes[-2][1])
    steps = [step for step, _ in changes]
    for name, colour in _KNOBS.items():
        _line(figure, 2, name, steps, [knobs[name] for _, knobs in changes], colour, shape="hv")
    windows = [knobs["update_interval"] / 20 for _, knobs in changes]
    _line(figure, 2, "update_interval", steps, windows, _INTERVAL, shape="hv")


def _line(
    figure: go.Figure,
    row: int,
    name: str,
    x: Sequence[float],
    y: Sequence[float],
    colour: str,
    *,
    dash: str = "solid",
    shape: str = "linear",
) -> None:
    line = {"color": colour, "width": 1.6, "dash": dash, "shape": shape}
    figure.add_trace(go.Scatter(name=name, x=list(x), y=list(y), mode="lines", line=line), row=row, col=1)
