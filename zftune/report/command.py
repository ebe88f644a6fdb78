"""`zftune compare`."""

from __future__ import annotations

from typing import Annotated

import typer

from zftune.json_output import STANDARD_OUTPUT, check_output_path, write_json


def compare(
    a: Annotated[str, typer.Argument(metavar="A.json", help="A profile.", show_default=False)],
    b: Annotated[str, typer.Argument(metavar="B.json", help="The profile to see beside it.", show_default=False)],
    json_path: Annotated[
        str | None, typer.Option("--json", metavar="PATH", help="Write the comparison as JSON; '-' is standard output.")
    ] = None,
) -> None:
    """Show what changed from one profile to another, and what of it is more than noise."""
    from rich.console import Console

    from zftune.report.compare import compare as compared
    from zftune.report.comparison_screen import render
    from zftune.report.load import read_profile

    if json_path is not None:
        check_output_path(json_path)
    comparison = compared(read_profile(a), read_profile(b))
    Console(stderr=json_path == STANDARD_OUTPUT).print(render(comparison))
    if json_path is not None:
        write_json(comparison.document(), json_path)
