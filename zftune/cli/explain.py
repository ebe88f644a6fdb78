"""`zftune explain`."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from zftune.cli.outputs import Outputs, search_page, write_files
from zftune.errors import BadInputError
from zftune.text import STANDARD_OUTPUT

if TYPE_CHECKING:
    from zftune.store.store import Store
    from zftune.store.types import RunRecord

LAST = "last"
_SHOWN = 8  # digits of an id
_MOST = 3


def explain(
    run: Annotated[
        str,
        typer.Argument(
            metavar="RUN",
            help="A run's id, or its beginning. Default: the last that trained and measured something.",
            show_default=False,
        ),
    ] = LAST,
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
    from zftune.explain.summary import RunSummary
    from zftune.store import open_store

    with open_store() as store:
        for notice in store.notices:
            typer.echo(f"zftune: {notice}", err=True)
        chosen, which = chosen_run(store, run)
        document = RunSummary.read(store, chosen).document()
    document["notices"] += [] if which is None else [which]
    Console(stderr=json_path == STANDARD_OUTPUT, highlight=False).print(render(document, verbose=verbose))
    write_files(document, json_path, html_path, search_page)


def chosen_run(store: Store, name: str) -> tuple[RunRecord, str | None]:
    """The run of an id or its beginning, or with "last" the one that trained last and measured something. Returns the
    run, and a sentence where others trained after it, although the last was asked for. Raises BadInputError: there is
    no such run, or there are several; names those that are near; StoreError: the store could not be read.
    """
    from zenflow.names import near_names
    from zftune.store.preset_file import escaped
    from zftune.store.store import goes_on

    now, shown = time.time(), escaped(name)[:80]

    def until(run: RunRecord) -> tuple[float, float]:
        """One that goes on before all, one that was resumed by its later end."""
        living = math.inf if run.ended_unix_s is None and goes_on(store, run, now) else run.began_unix_s
        return run.ended_unix_s or living, run.began_unix_s

    runs = sorted(store.runs(), key=until, reverse=True)
    if not runs:
        raise BadInputError(f"RUN '{shown}': the store has no runs yet, `zftune run --online` makes one")
    if name == LAST:
        measured = (run for run in runs if any(store.measurements(one.trial_id) for one in store.trials(run.run_id)))
        before = runs.index(next(measured, runs[0]))
        newer = f"run {_ids(runs[:1])}" if before == 1 else f"{before} runs"
        told = f"This is the last run with a measurement; {newer} after it measured nothing."
        return runs[before], told if before else None
    found = [run for run in runs if name and run.run_id.startswith(name)]
    if len(found) == 1:
        return found[0], None
    if found:
        raise BadInputError(f"RUN '{shown}': {len(found)} runs begin with that: {_ids(found)}")
    ids = [run.run_id[:_SHOWN] for run in runs]
    near = near_names(name[:_SHOWN], ids, 0.4) or ids
    raise BadInputError(
        f"RUN '{shown}' is not in the store; give an id, its beginning or 'last' (near: {', '.join(near[:_MOST])})"
    )


def _ids(runs: Sequence[RunRecord]) -> str:
    """Beginnings that tell the runs apart."""
    length = next(n for n in range(_SHOWN, 65) if len({run.run_id[:n] for run in runs}) == len(runs))
    ids = [run.run_id[:length] for run in runs]
    return ", ".join(ids[:_MOST]) + ("" if len(ids) <= _MOST else f" and {len(ids) - _MOST} more")
