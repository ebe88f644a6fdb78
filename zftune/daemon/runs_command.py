"""What `zftune daemon` says to the runs: `runs pause resume rollback logs`, and `status` and `stop` with a RUN."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Annotated, Any

import typer

from zftune.daemon import runs_asked
from zftune.daemon.client import DaemonClient
from zftune.json_output import STANDARD_OUTPUT, check_output_path, write_json

RUN_SCHEMA = "zftune.daemon.run/1"
RUNS_SCHEMA = "zftune.daemon.runs/1"
_FOLLOW_S = 1.0

Run = Annotated[
    str | None,
    typer.Argument(
        metavar="[RUN]", help="A run's id, or its beginning. Default: the only one there is.", show_default=False
    ),
]
Json = Annotated[str | None, typer.Option("--json", metavar="PATH", help="Write JSON; '-' is standard output.")]


def runs(json_path: Json = None) -> None:
    """List the runs that are followed, and the last that have ended."""
    if json_path is not None:
        check_output_path(json_path)
    with DaemonClient() as client:
        found = runs_asked.all_runs(client)
    if json_path is not None:
        write_json({"schema": RUNS_SCHEMA, "runs": found}, json_path)
    if json_path != STANDARD_OUTPUT:
        from zftune.daemon.top.words import line

        for one in found:
            typer.echo(line(one))
        if not found:
            typer.echo("No run is followed.")


def show(run: str, json_path: str | None) -> None:
    """Print a run with its trials and decisions.

    Args:
        run: its identity or the beginning of it.
        json_path: where JSON goes; None: nowhere.

    Raises:
        BadInputError: there is no such run, or more than one.
        DaemonError: the daemon cannot be asked.
    """
    with DaemonClient() as client:
        found = runs_asked.details(client, runs_asked.chosen(client, run)["run"])
    if json_path is not None:
        write_json({"schema": RUN_SCHEMA, **found}, json_path)
    if json_path != STANDARD_OUTPUT:
        from rich.console import Console

        from zftune.daemon.top.screen import whole

        console = Console(highlight=False)
        console.print(whole(found, console.width))


def pause(run: Run = None, json_path: Json = None) -> None:
    """Let the incumbent's knobs run undisturbed until `resume`."""
    tell("pause", run, json_path)


def resume(run: Run = None, json_path: Json = None) -> None:
    """Go on after a pause."""
    tell("resume", run, json_path)


def rollback(run: Run = None, json_path: Json = None) -> None:
    """Pin the setting before the last that was adopted, and never try that one again."""
    tell("rollback", run, json_path)


def tell(command: str, run: str | None, json_path: str | None) -> None:
    """Tell a run something, and print what became of it.

    Args:
        command: "pause", "resume", "rollback" or "stop".
        run: its identity or the beginning of it; None: the only one.
        json_path: where JSON goes; None: nowhere.

    Raises:
        BadInputError: there is no such run, or more than one.
        DaemonError: the daemon cannot be asked, or the run's state does not allow it.
    """
    if json_path is not None:
        check_output_path(json_path)
    with DaemonClient() as client:
        found = runs_asked.told(client, runs_asked.chosen(client, run)["run"], command)
    if json_path is not None:
        write_json({"schema": RUN_SCHEMA, "run": found}, json_path)
    if json_path != STANDARD_OUTPUT:
        from zftune.daemon.top.words import state

        typer.echo(state(found))


def logs(
    run: Run = None,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on until the run ends.")] = False,
    json_path: Json = None,
) -> None:
    """Print what was decided in a run, and why, one line a decision."""
    if json_path is not None:
        check_output_path(json_path)
    with DaemonClient() as client:
        which = runs_asked.chosen(client, run)["run"]
        found = runs_asked.details(client, which)
        if json_path is not None:
            write_json({"schema": RUN_SCHEMA, **found}, json_path)
        if json_path == STANDARD_OUTPUT:
            return
        from zftune.daemon.top.words import decision

        for one in _decisions(client, which, found, follow=follow):
            typer.echo(decision(one))


def _decisions(client: DaemonClient, run: str, found: dict[str, Any], *, follow: bool) -> Iterator[dict[str, Any]]:
    """Those that there are, and where they are followed those to come."""
    seen = 0
    while True:
        yield from found["decisions"][seen:]
        seen = len(found["decisions"])
        if not follow or found["run"]["state"] == "ended":
            return
        time.sleep(_FOLLOW_S)
        found = runs_asked.details(client, run)
