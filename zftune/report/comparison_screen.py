"""A comparison on the screen: verdict, figures, settings. Nothing is told by colour alone."""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from zftune.profile.units import number, percent
from zftune.report.compare import Comparison, Difference
from zftune.report.settings import Setting
from zftune.report.values import shown

_STYLES = {"beyond noise": "bold", "changed": "bold", "within noise": "dim"}

_ABOUT_NOISE = (
    "Noise is two standard errors of the difference, by resampling each run's own steps; two runs of one setting may "
    "differ by more."
)


def render(comparison: Comparison) -> RenderableType:
    """The whole screen, to be printed by a rich console."""
    return Group(*_parts(comparison))


def _parts(comparison: Comparison) -> Iterator[RenderableType]:
    sentences = [Text(sentence) for sentence in comparison.verdict]
    sentences[0].stylize("bold")
    yield Panel(Group(*sentences), title=Text("zftune compare", style="bold"), title_align="left")
    for warning in comparison.warnings:
        yield Text(f"warning: {warning}", style="yellow")
    yield _figures([one for one in comparison.differences if one.finding != "same" and _is_something(one)])
    same = sum(one.finding == "same" for one in comparison.differences)
    if same:
        yield Text(f"{same} more figure{'s are' if same > 1 else ' is'} the same in both.", style="dim")
    yield Text(_ABOUT_NOISE, style="dim")
    if comparison.settings:
        yield Text()
        yield _settings(comparison.settings)


def _is_something(one: Difference) -> bool:
    return bool(one.a or one.b)


def _figures(differences: list[Difference]) -> Table:
    table = Table(box=None, expand=False, padding=(0, 2, 0, 0), header_style="dim")
    table.add_column("figure", overflow="fold")
    for title in ("A", "B", "change"):
        table.add_column(title, justify="right", no_wrap=True)
    table.add_column("std. error", justify="right", no_wrap=True)
    table.add_column("", no_wrap=True)
    for one in differences:
        cells = (one.name, shown(one.name, one.a), shown(one.name, one.b), _change(one), _error(one), one.finding)
        table.add_row(*(Text(cell) for cell in cells), style=_STYLES.get(one.finding, ""))
    return table


def _change(one: Difference) -> str:
    if one.change is None:
        return "–"
    sign = "+" if one.change > 0 else "−" if one.change < 0 else ""
    return f"{sign}{percent(abs(one.relative))}" if one.relative is not None else f"{sign}{number(abs(one.change))}"


def _error(one: Difference) -> str:
    return "" if one.standard_error is None else f"{number(one.standard_error)} ms"


def _settings(settings: list[Setting]) -> Table:
    table = Table(box=None, expand=False, padding=(0, 2, 0, 0), header_style="dim")
    for title in ("setting", "A", "B"):
        table.add_column(title, overflow="fold")
    for one in settings:
        table.add_row(Text(one.name), Text(one.a), Text(one.b))
    return table
