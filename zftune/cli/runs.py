"""`zftune runs`: lists, shows and steers the runs that the daemon tunes."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any

import typer

from zftune.daemon import SHOWN
from zftune.daemon.client import http
from zftune.daemon.client.http import DaemonClient
from zftune.errors import NoDaemonError
from zftune.store.location import meant_by
from zftune.store.preset_file import escaped
from zftune.text import STANDARD_OUTPUT, check_output_path, write_json
from zftune.words import RUN_STATES, seconds

if TYPE_CHECKING:
    from zftune.store.store import Store
    from zftune.store.types import RunRecord

RUN_SCHEMA = "zftune.daemon.run/1"
RUNS_SCHEMA = "zftune.daemon.runs/1"
STORED_SCHEMA = "zftune.store.runs/1"
_FOLLOW_S = 1.0

runs = typer.Typer(
    name="runs",
    help="List, show and steer the runs that the daemon tunes; the trainings themselves go on.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

_Run = Annotated[
    str | None,
    typer.Argument(
        metavar="RUN", help="A run's id, or its beginning. Default: the only one there is.", show_default=False
    ),
]
_Json = Annotated[str | None, typer.Option("--json", metavar="PATH", help="Write JSON; '-': standard output.")]


@runs.command("list")
def list_runs(
    json_path: _Json = None,
    every: Annotated[
        bool,
        typer.Option("--all", help="List all runs of the store, newest first, also those that no daemon has followed."),
    ] = False,
) -> None:
    """List the runs that the daemon follows, and the last that have ended, a line each."""
    check_output_path(json_path)
    if every:
        _list_stored(json_path)
        return
    with DaemonClient() as client:
        try:
            found = http.all_runs(client)
        except NoDaemonError as error:
            alone = _trained_alone()
            if not alone:
                raise
            raise NoDaemonError(f"{error}; {alone}") from error
    write_json({"schema": RUNS_SCHEMA, "runs": found}, json_path)
    if json_path != STANDARD_OUTPUT:
        from zftune.cli.top import line

        for one in found:
            typer.echo(line(one))
        if not found:
            alone = _trained_alone()
            told = f"No run is followed, but {alone}" if alone else f"No run is followed; {http.PAST_RUNS}"
            typer.echo(told)


def _list_stored(json_path: str | None) -> None:
    from zftune.store import open_store

    with open_store() as store:
        found = [_stored(store, run) for run in store.runs()]
        notices = store.notices
    write_json({"schema": STORED_SCHEMA, "runs": found}, json_path)
    for notice in notices:
        typer.echo(f"zftune: {notice}", err=True)
    if json_path == STANDARD_OUTPUT:
        return
    for one in found:
        began = time.strftime("%Y-%m-%d %H:%M", time.localtime(one["began_unix_s"]))
        took = f"{one['steps']:,} steps in {seconds(one['elapsed_s'])}" if one["steps"] else "no step counted"
        what = f"{escaped(one['model'])}, quality {one['quality']}, {took}"
        typer.echo(f"{one['run_id'][:SHOWN]}  {began}  {RUN_STATES[one['state']]:<17}  {what}")
    if not (found or notices):
        typer.echo("The store has no runs yet; zftune run --online -- CMD makes one.")


def _stored(store: Store, run: RunRecord) -> dict[str, Any]:
    from zftune.store.account import Account
    from zftune.store.store import facts_of, goes_on
    from zftune.store.types import RunState

    lives, total = goes_on(store, run, time.time()), (store.account(run.run_id) or Account()).total
    return {
        "run_id": run.run_id,
        "state": "running" if lives else "finished" if run.state is RunState.FINISHED else "ended",
        "model": facts_of(store, run.key)[0].name or run.key.model_id,
        "quality": run.key.quality,
        "began_unix_s": run.began_unix_s,
        "steps": total.steps,
        "elapsed_s": total.seconds,
    }


def _trained_alone() -> str:
    """Which trainings live that no daemon follows, by the store, as after a daemon was killed; "": none is known."""
    location = meant_by(os.environ)
    if location.path is None or not location.path.exists():
        return ""
    from zftune.store import open_store
    from zftune.store.store import is_written_to

    with open_store() as store:
        alone = (one for one in store.runs() if not is_written_to(store, one, time.time()))  # nor by its own search
        trained = [one.run_id for one in alone if store.is_trained(one.run_id)]
        heard = [(run, store.heard_of_unix_s(run)) for run in trained]
    names = [
        run[:SHOWN] if at is None else f"{run[:SHOWN]} (last heard of {max(0.0, time.time() - at):.0f} s ago)"
        for run, at in heard
    ]
    if not names:
        return ""
    what = "a training goes on" if len(names) == 1 else f"{len(names)} trainings go on"
    return f"{what} under the best settings so far and will look for a daemon again: {', '.join(names)}"


@runs.command()
def show(run: _Run = None, json_path: _Json = None) -> None:
    """Show a run in full: its account, settings, trials and decisions."""
    check_output_path(json_path)
    with DaemonClient() as client:
        found = http.details(client, http.among(http.all_runs(client), run)["run"])
    write_json({"schema": RUN_SCHEMA, **found}, json_path)
    if json_path != STANDARD_OUTPUT:
        from rich.console import Console

        from zftune.cli.top import whole

        console = Console(highlight=False)
        console.print(whole(found, console.width))


@runs.command()
def logs(
    run: _Run = None,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on until the run ends.")] = False,
    json_path: _Json = None,
) -> None:
    """Print what was decided in a run, and why, one line a decision."""
    check_output_path(json_path)
    with DaemonClient() as client:
        which = http.among(http.all_runs(client), run)["run"]
        found = http.details(client, which)
        write_json({"schema": RUN_SCHEMA, **found}, json_path)
        if json_path == STANDARD_OUTPUT:
            return
        from zftune.cli.top import decision

        for one in _decisions(client, which, found, follow=follow):
            typer.echo(decision(one))


@runs.command()
def pause(run: _Run = None, json_path: _Json = None) -> None:
    """Keep the best settings so far, without trying others, until `resume`."""
    _tell("pause", run, json_path)


@runs.command()
def resume(run: _Run = None, json_path: _Json = None) -> None:
    """Go on with the search after a pause."""
    _tell("resume", run, json_path)


@runs.command()
def rollback(run: _Run = None, json_path: _Json = None) -> None:
    """End the search, with the settings before the last adoption; those that were adopted are never tried again."""
    _tell("rollback", run, json_path)


@runs.command()
def stop(run: _Run = None, json_path: _Json = None) -> None:
    """End the search of a run; the training goes on under the best settings so far."""
    _tell("stop", run, json_path)


def _tell(command: str, run: str | None, json_path: str | None) -> None:
    check_output_path(json_path)
    with DaemonClient() as client:
        found = http.told(client, http.among(http.all_runs(client), run)["run"], command)
    write_json({"schema": RUN_SCHEMA, "run": found}, json_path)
    if json_path != STANDARD_OUTPUT:
        from zftune.cli.top import state

        rests = (
            " Nothing is tried unless step times change." if (command, found["state"]) == ("resume", "frozen") else ""
        )
        typer.echo(f"{state(found)}{rests}")


def _decisions(client: DaemonClient, run: str, found: dict[str, Any], *, follow: bool) -> Iterator[dict[str, Any]]:
    seen = 0
    while True:
        yield from found["decisions"][seen:]
        seen = len(found["decisions"])
        if not follow or found["run"]["state"] == "ended":
            return
        time.sleep(_FOLLOW_S)
        found = http.details(client, run)
