"""What all charts share: a figure, the legend that stands above it, and sentences about what it cannot show."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import plotly.graph_objects as go

from zftune.report.values import Document

FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, 'Noto Sans', sans-serif"


@dataclass(frozen=True, slots=True)
class Chart:
    """A figure for the page."""

    figure: go.Figure
    legend: Mapping[str, str]
    """Names and their colours."""
    notes: list[str] = field(default_factory=list)
    """Why something is not in the figure."""


def layout(height: int, **more: Any) -> dict[str, Any]:
    """The layout of every figure; the page's style sheet colours text and grid lines."""
    return {
        "template": {},
        "height": height,
        "margin": {"l": 8, "r": 12, "t": 34, "b": 44},
        "paper_bgcolor": "rgba(0,0,0,0)",
        "plot_bgcolor": "rgba(0,0,0,0)",
        "font": {"family": FONT, "size": 12},
        "hoverlabel": {"font": {"family": FONT, "size": 12}},
        "showlegend": False,
        "dragmode": "zoom",
        **more,
    }


def axis(title: str | None = None, **more: Any) -> dict[str, Any]:
    """An axis that makes room for its labels."""
    named = {} if title is None else {"title": {"text": title, "standoff": 8}}
    shape = {"automargin": True, "zeroline": False, "showgrid": True, "separatethousands": True, "ticklabelstandoff": 4}
    return {**shape, **named, **more}


def reason(document: Document, *names: str) -> str:
    """Why the first of these fields that has a reason is null."""
    for name in names:
        parts = name.split(".")
        for length in range(len(parts), 0, -1):
            found = document["missing"].get(".".join(parts[:length]))
            if found is not None:
                return str(found)
    return "it was not recorded"
