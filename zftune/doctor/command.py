"""`zftune doctor`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from zftune.json_output import STANDARD_OUTPUT, check_output_path, write_json

if TYPE_CHECKING:
    from rich.console import Console

    from zftune.doctor.check import Area


def doctor(
    json_path: Annotated[
        str | None, typer.Option("--json", metavar="PATH", help="Write the checks as JSON; '-' is standard output.")
    ] = None,
) -> None:
    """Show what works on this machine, what is missing, and the fix for each."""
    if json_path is not None:
        check_output_path(json_path)
    from rich.console import Console

    import zftune
    from zftune.doctor.check import document
    from zftune.doctor.screen import render

    console = Console(stderr=json_path == STANDARD_OUTPUT)
    areas = _examine(console)
    console.print(render(areas))
    found = document(areas, zftune.__version__)
    if json_path is not None:
        write_json(found, json_path)
    if not found["ok"]:
        raise typer.Exit(1)


def _examine(console: Console) -> list[Area]:
    """All areas, with a bar on a terminal: it takes some seconds."""
    from rich.progress import BarColumn, Progress, TextColumn

    from zftune.doctor.examine import Examination

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
