"""`zftune doctor`, and its screen of 80 columns or more. Nothing is told by colour alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.rule import Rule
from rich.table import Table
from rich.text import Text

from zftune.doctor.check import Area, Check, Status
from zftune.text import STANDARD_OUTPUT, check_output_path, write_json

if TYPE_CHECKING:
    from rich.console import Console

    from zftune.doctor.check import Area


def doctor(
    json_path: Annotated[
        str | None, typer.Option("--json", metavar="PATH", help="Write the checks as JSON; '-': standard output.")
    ] = None,
) -> None:
    """Show what works on this machine, what is missing, and the fix for each.

    Exit code 1 where something that zftune needs does not work, or where a training would hang.
    """
    check_output_path(json_path)
    from rich.console import Console

    import zftune
    from zftune.doctor.check import document

    console = Console(stderr=json_path == STANDARD_OUTPUT)
    areas = _examine(console)
    console.print(render(areas))
    found = document(areas, zftune.__version__)
    write_json(found, json_path)
    if not found["ok"]:
        raise typer.Exit(1)


def _examine(console: Console) -> list[Area]:
    """All areas, with a bar on a terminal: it takes some seconds."""
    from rich.progress import BarColumn, Progress, TextColumn

    from zftune.doctor.check import Examination

    examination = Examination()
    hidden = not console.is_terminal
    columns = (TextColumn("{task.description:24}"), BarColumn())
    with Progress(*columns, console=console, transient=True, disable=hidden) as bars:
        names = iter(examination.areas)
        bar = bars.add_task(f"looking at {next(names)}", total=len(examination.areas))
        areas = []
        for area in examination.run():
            areas.append(area)
            bars.update(bar, advance=1, description=f"looking at {next(names, 'the end')}")
    return areas


_MAX_WIDTH = 110
_STYLES: dict[Status, str] = {"ok": "green", "note": "yellow", "broken": "bold red", "absent": "bright_black"}


def render(areas: Sequence[Area]) -> RenderableType:
    """All areas and a last line that sums them up."""
    return _Screen(areas)


class _Screen:
    def __init__(self, areas: Sequence[Area]) -> None:
        self._areas = areas

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        width = min(options.max_width, _MAX_WIDTH)
        names = max((len(check.name) for area in self._areas for check in area.checks), default=0)
        parts: list[RenderableType] = []
        for area in self._areas:
            parts.append(Rule(Text(area.name, style="bold"), align="left", style="dim"))
            parts.append(_table(area, names))
        parts += [Text(), _sum(self._areas)]
        yield from console.render(Group(*parts), options.update_width(width))


def _table(area: Area, names: int) -> Table:
    table = Table.grid(padding=(0, 2, 0, 0), expand=True)
    table.add_column(no_wrap=True, width=max(len(status) for status in _STYLES))
    table.add_column(no_wrap=True, width=names)
    table.add_column(ratio=1, overflow="fold")
    for check in area.checks:
        table.add_row(Text(check.status, style=_STYLES[check.status]), Text(check.name), _finding(check))
    return table


def _finding(check: Check) -> Text:
    text = Text.assemble((check.finding, "dim" if check.status == "absent" else ""))
    if check.fix is not None:
        text.append("\nfix: ", style="bold")
        text.append(check.fix)
    return text


def _sum(areas: Sequence[Area]) -> Text:
    checks = [check for area in areas for check in area.checks]
    faults = [check.name for check in checks if check.is_fault and check.required]
    stopping = dict.fromkeys(check.name for check in checks if check.stops_training)
    broken = sum(check.status == "broken" for check in checks)
    if faults:
        return Text(f"zftune cannot work here: {', '.join(faults)}.", style="bold red")
    if stopping:
        return Text(f"zftune works here, but trainings would hang: {', '.join(stopping)}.", style="bold red")
    if broken:
        things = "1 thing that it can do without is" if broken == 1 else f"{broken} things that it can do without are"
        return Text(f"zftune works here; {things} broken.")
    return Text("zftune works here.", style="bold green")
