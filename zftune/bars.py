"""Horizontal stacked bars on one scale, readable without colour."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rich.console import Console, ConsoleOptions, RenderResult
from rich.segment import Segment
from rich.style import Style

from zftune.text import number


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of part: what it is called, and how it is filled."""

    name: str
    fill: str
    ascii_fill: str
    style: str


COMPUTE = Kind("compute", "█", "#", "green")
# Fills and letters tell the causes of waits apart where there is no colour.
CAUSE_KINDS = {
    "host": Kind("host", "▓", "H", "red"),
    "h2d": Kind("h2d", "▒", "U", "yellow"),
    "d2h": Kind("d2h", "░", "D", "magenta"),
    "select": Kind("select", "╱", "S", "cyan"),
    "comm": Kind("comm", "≈", "C", "blue"),
    "data": Kind("data", "·", "L", "bright_black"),
    "thread": Kind("thread", "+", "T", "bright_magenta"),
}


@dataclass(frozen=True, slots=True)
class Bar:
    """One bar: its parts from left to right, with their lengths on the common scale."""

    parts: Sequence[tuple[Kind, float]]

    @property
    def total(self) -> float:
        return sum(length for _, length in self.parts)


class StackedBar:
    """A bar as wide as the space that it gets, of which `scale` fills the whole."""

    def __init__(self, bar: Bar, scale: float) -> None:
        self._bar = bar
        self._scale = scale

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        ends = cells([length for _, length in self._bar.parts], self._scale, options.max_width)
        for (kind, length), width in zip(self._bar.parts, ends, strict=True):
            yield from _part(kind, length, width, ascii_only=options.ascii_only)
        yield Segment.line()


def cells(lengths: Sequence[float], scale: float, width: int) -> list[int]:
    """Characters for each part: rounded at the parts' ends, so that their sum is the rounded total."""
    taken, total, result = 0, 0.0, []
    for length in lengths:
        total += length
        end = min(width, round(width * total / scale)) if scale > 0 else 0
        result.append(end - taken)
        taken = end
    return result


def _part(kind: Kind, length: float, width: int, *, ascii_only: bool) -> RenderResult:
    """The part's fill, and in its middle its name and length, or its name, where they fit."""
    fill = kind.ascii_fill if ascii_only else kind.fill
    texts = (f" {kind.name} {number(length)} ", f" {kind.name} ")
    label = next((text for text in texts if len(text) + 2 <= width), "")
    left = (width - len(label)) // 2
    style = Style.parse(kind.style)
    yield Segment(fill * left, style)
    if label:
        yield Segment(label, style + Style(bold=True, reverse=True))
    yield Segment(fill * (width - left - len(label)), style)
