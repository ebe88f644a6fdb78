"""`zftune top`."""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING, Annotated, Any

import typer

from zftune.daemon import runs_asked
from zftune.daemon.client import DaemonClient
from zftune.daemon.errors import DaemonError
from zftune.errors import BadInputError
from zftune.json_output import STANDARD_OUTPUT, check_output_path, write_json

if TYPE_CHECKING:
    from zftune.daemon.top.screen import Frame

SCHEMA = "zftune.top/1"
_LEAST_S, _MOST_S = 0.1, 3600.0


def top(
    run: Annotated[
        str | None,
        typer.Argument(
            metavar="[RUN]",
            help="The run that is looked at: its id, or its beginning. Default: the newest that trains.",
            show_default=False,
        ),
    ] = None,
    once: Annotated[bool, typer.Option("--once", help="Print it once; in a pipe that is the default.")] = False,
    interval_s: Annotated[float, typer.Option("--interval-s", metavar="SECONDS", help="Between two looks.")] = 1.0,
    json_path: Annotated[
        str | None, typer.Option("--json", metavar="PATH", help="Write what is shown once; '-' is standard output.")
    ] = None,
) -> None:
    """Watch the runs that the daemon tunes: waiting by cause, knobs, gain, decisions. Ctrl-C ends it."""
    if not _LEAST_S <= interval_s <= _MOST_S:
        raise BadInputError(f"--interval-s {interval_s:g}: allowed is {_LEAST_S:g} to {_MOST_S:g}")
    if json_path is not None:
        check_output_path(json_path)
    with DaemonClient() as client:
        if json_path is not None:
            _write(client, run, json_path)
        if json_path == STANDARD_OUTPUT:
            return
        if once or json_path is not None or not sys.stdout.isatty():
            _print(client, run)
        else:
            _watch(client, run, interval_s)


def look(client: DaemonClient, run: str | None, height: int) -> Frame:
    """What there is to see now.

    Args:
        client: of the daemon.
        run: the one that is looked at; None: the newest that trains.
        height: of the screen.

    Raises:
        BadInputError: there is no such run, or more than one.
        DaemonError: the daemon cannot be asked.
    """
    from zftune.daemon.top.screen import Frame, most_rows

    runs = sorted(runs_asked.all_runs(client), key=lambda one: one["state"] == "ended")  # those that train first
    if run is not None:
        wanted = runs_asked.among(runs, run)["run"]
    else:
        wanted = max(runs, key=lambda one: (one["state"] != "ended", one["began_unix_s"]))["run"] if runs else None
    rows = runs[: most_rows(height)]
    found = {one["run"]: runs_asked.details(client, one["run"]) for one in rows}
    looked_at = None if wanted is None else found.get(wanted) or runs_asked.details(client, wanted)
    return Frame(source=str(client.path), runs=runs, shown=tuple(found.values()), looked_at=looked_at)


def _write(client: DaemonClient, run: str | None, json_path: str) -> None:
    runs = runs_asked.all_runs(client)
    wanted = runs if run is None else [runs_asked.among(runs, run)]
    documents: list[dict[str, Any]] = [runs_asked.details(client, one["run"]) for one in wanted]
    write_json({"schema": SCHEMA, "runs": documents}, json_path)


def _print(client: DaemonClient, run: str | None) -> None:
    from rich.console import Console

    from zftune.daemon.top.screen import frame

    console = Console(highlight=False)
    console.print(frame(look(client, run, console.height), console.width, console.height))


def _watch(client: DaemonClient, run: str | None, interval_s: float) -> None:
    """Until Ctrl-C; the terminal is then as it was."""
    from dataclasses import replace

    from rich.console import Console
    from rich.live import Live

    from zftune.daemon.top.screen import frame

    console = Console(highlight=False)
    found = look(client, run, console.height)  # what is wrong now is said on the terminal as it is
    try:
        with Live(console=console, screen=True, auto_refresh=False, redirect_stderr=False) as live:
            while True:
                live.update(frame(found, console.width, console.height), refresh=True)
                time.sleep(interval_s)
                try:
                    found = look(client, run, console.height)
                except DaemonError as error:  # it may come back
                    found = replace(found, trouble=f"what is below is old: {error}")
    except KeyboardInterrupt:
        return
