"""Figures of a document as rows (dotted name, value with its unit, source), and a chart with its accessible table."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from zftune.profile.schema import SOURCED
from zftune.text import ms, number, percent, size

if TYPE_CHECKING:  # comparisons and traces need no Plotly
    import plotly.graph_objects as go

FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, 'Noto Sans', sans-serif"


@dataclass(frozen=True, slots=True)
class Chart:
    """A figure for the page."""

    figure: go.Figure
    legend: Mapping[str, str]
    notes: list[str] = field(default_factory=list)


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
    shape = {
        "automargin": True,
        "zeroline": False,
        "showgrid": True,
        "separatethousands": True,
        "exponentformat": "none",
        "ticklabelstandoff": 4,
    }
    return {**shape, **named, **more}


def reason(document: Document, *names: str) -> str:
    """Why the first of these fields that has a reason is null."""
    return next(filter(None, (_nearest(document["missing"], name) for name in names)), "it was not recorded")


def _nearest(table: Mapping[str, Any], name: str) -> str:
    """What a table says of the longest name that a dotted one lies in; "": nothing."""
    parts = name.split(".")
    longest_first = (".".join(parts[:length]) for length in range(len(parts), 0, -1))
    return next((str(table[part]) for part in longest_first if table.get(part) is not None), "")


Document = Mapping[str, Any]
_TABLES = ("ranks", "per_step", "timeline")  # shown otherwise than as rows of figures
FIGURES = tuple(name for name in SOURCED if name not in _TABLES)


def rate(gbps: float) -> str:
    """A rate in 10^9 bytes a second, in the unit that suits it."""
    return f"{size(1e9 * gbps)}/s"


_SHARES = ("fraction", "coverage", "churn", "practicality", "throttled_fraction", "overhead_fraction")
_IN_MS = ("step_ms", "phases_ms", "waits_ms", "by_cause", "stall_ms")
_ENDINGS: tuple[tuple[str, Callable[[float], str]], ...] = (
    ("_ms", ms),
    ("ms_per_step", ms),
    ("over_model_bytes", lambda value: f"{number(value)} × the model"),
    ("_bytes", size),
    ("bytes_per_element", lambda value: f"{number(value)} bytes"),
    ("bytes_per_step", size),
    ("steps_per_s", lambda value: f"{number(value)} steps/s"),
    ("tokens_per_s", lambda value: f"{number(value)} tokens/s"),
    ("gbps", rate),
    ("_percent", lambda value: f"{number(value)}%"),
    ("_mhz", lambda value: f"{number(value)} MHz"),
    ("_w", lambda value: f"{number(value)} W"),
    ("_j", lambda value: f"{number(value)} J"),
    ("_c", lambda value: f"{number(value)} °C"),
)


def leaves(value: Any, path: str) -> Iterator[tuple[str, Any]]:
    """Every value that holds no others, with its dotted name; knobs are not figures."""
    if isinstance(value, Mapping):
        for key, child in value.items():
            if key != "knobs":
                yield from leaves(child, f"{path}.{key}")
    else:
        yield path, value


def figures(document: Document) -> Iterator[tuple[str, Any]]:
    """All figures that are known, by dotted name."""
    for name_of in FIGURES:
        yield from ((name, value) for name, value in leaves(document.get(name_of), name_of) if value is not None)


def shown(name: str, value: Any) -> str:
    """A value with the unit that its name says."""
    if isinstance(value, bool) or value is None:
        return {True: "yes", False: "no", None: "–"}[value]
    if isinstance(value, (list, tuple)):
        return ", ".join(str(item) for item in value) or "none"
    if not isinstance(value, (int, float)):
        return str(value)
    parts = name.split(".")
    if parts[-1] in _SHARES:
        return percent(value)
    if any(part in _IN_MS for part in parts[:-1]):
        return ms(value)
    return next((unit(value) for ending, unit in _ENDINGS if parts[-1].endswith(ending)), number(value))


def source_of(document: Document, name: str) -> str:
    """Where a figure comes from: the entry of the longest name that it lies in."""
    return _nearest(document["sources"], name)


def samples(document: Document, source: str) -> list[Mapping[str, Any]]:
    """The rows of a series, none where it was not recorded."""
    return document["series"][source] or []


def device_of(row: Mapping[str, Any]) -> int | None:
    """The GPU that a row of samples is about; None for one about the host."""
    device = row.get("device")
    return None if device is None else int(device)
