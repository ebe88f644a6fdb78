"""`zftune explain`."""

from __future__ import annotations

from typing import Annotated

import typer

from zftune.cli.outputs import Outputs, search_page, write_files
from zftune.text import STANDARD_OUTPUT


def explain(
    run: Annotated[
        str,
        typer.Argument(
            metavar="RUN",
            help="A run's id, or its beginning. Default: the last that trained and measured something.",
            show_default=False,
        ),
    ] = "last",
    json_path: Annotated[
        str | None, typer.Option("--json", metavar="PATH", help="Write it as JSON; '-': standard output.")
    ] = None,
    html_path: Annotated[
        str | None, typer.Option("--html", metavar="PATH", help="Write it as a page with plots.")
    ] = None,
    verbose: Annotated[
        bool, typer.Option("--verbose", "-v", help="With each decision of earlier parts of a long search.")
    ] = False,
) -> None:
    """Say what a tuned run did: every decision with its measurements and its reason, what that cost and won."""
    Outputs(json_path, html_path, None).check()
    from rich.console import Console

    from zftune.explain.screen import render
    from zftune.explain.summary import chosen_run, explain_document
    from zftune.store import open_store

    with open_store() as store:
        for notice in store.notices:
            typer.echo(f"zftune: {notice}", err=True)
        chosen, which = chosen_run(store, run)
        document = explain_document(store, chosen)
    document["notices"] += [] if which is None else [which]
    Console(stderr=json_path == STANDARD_OUTPUT, highlight=False).print(render(document, verbose=verbose))
    write_files(document, json_path, html_path, search_page)
