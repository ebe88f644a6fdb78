"""`zftune explain`."""

from __future__ import annotations

from typing import Annotated

import typer

from zftune.commands.output import Outputs
from zftune.json_output import STANDARD_OUTPUT, write_json, write_text


def explain(
    run: Annotated[
        str,
        typer.Argument(
            metavar="[RUN]",
            help="A run's id, or its beginning. Default: the newest with a measurement.",
            show_default=False,
        ),
    ] = "last",
    json_path: Annotated[
        str | None, typer.Option("--json", metavar="PATH", help="Write it as JSON; '-' is standard output.")
    ] = None,
    html_path: Annotated[
        str | None, typer.Option("--html", metavar="PATH", help="Write it as a page with plots.")
    ] = None,
) -> None:
    """Say what a tuned run did: every decision with its measurements and its reason, what that cost and won."""
    Outputs(json_path, html_path, None).check()
    from rich.console import Console

    from zftune.explain.choosing import chosen_run
    from zftune.explain.document import explain_document
    from zftune.explain.screen import render
    from zftune.store import open_store

    with open_store() as store:
        for notice in store.notices:
            typer.echo(f"zftune: {notice}", err=True)
        chosen, which = chosen_run(store, run)
        document = explain_document(store, chosen)
    document["notices"] += [] if which is None else [which]
    Console(stderr=json_path == STANDARD_OUTPUT, highlight=False).print(render(document))
    if json_path is not None:
        write_json(document, json_path)
    if html_path is not None:
        from zftune.report.tune import tune_page

        write_text(tune_page(document), html_path, option="--html")
