"""`zftune daemon`: serves the training runs of this machine; `status`, `stop` and `open` ask one that does."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Annotated, Any

import typer

from zftune.daemon import runs_command
from zftune.daemon.client import DaemonClient
from zftune.daemon.errors import DaemonError
from zftune.daemon.runs_command import Json
from zftune.errors import BadInputError
from zftune.json_output import STANDARD_OUTPUT, check_output_path, write_json

SCHEMA = "zftune.daemon/1"
_STOP_S = 30.0
_POLL_S = 0.05

daemon = typer.Typer(
    name="daemon",
    help="Serve the training runs of this machine, until a signal ends it.",
    invoke_without_command=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


@daemon.callback()
def serve_here(
    context: typer.Context,
    private: Annotated[bool, typer.Option("--private", help="End with the last run.")] = False,
    idle_exit_s: Annotated[
        float | None, typer.Option("--idle-exit-s", metavar="SECONDS", help="End after so long without a run.")
    ] = None,
    port: Annotated[
        int | None, typer.Option(metavar="PORT", help="Serve page and /metrics on it from the start; 0: a free one.")
    ] = None,
    metrics_textfile: Annotated[
        str | None, typer.Option(metavar="PATH", help="Keep the metrics in a file for Prometheus' node exporter.")
    ] = None,
) -> None:
    """Serve the training runs of this machine, until a signal ends it."""
    given = private or idle_exit_s is not None or port is not None or metrics_textfile is not None
    if context.invoked_subcommand is not None:
        if given:
            raise BadInputError(
                f"the options before '{context.invoked_subcommand}' are those of a daemon that starts, allowed is none"
            )
        return
    if idle_exit_s is not None and not 0 < idle_exit_s < float("inf"):
        raise BadInputError(f"--idle-exit-s {idle_exit_s:g}: allowed is a number above 0")
    if port is not None and not 0 <= port < 1 << 16:
        raise BadInputError(f"--port {port}: allowed is 0 to 65535")
    if metrics_textfile is not None:
        check_output_path(metrics_textfile, "--metrics-textfile", standard_output=False)
    from zftune.daemon.hosting import hosted
    from zftune.daemon.process import Options, serve

    textfile = None if metrics_textfile is None else Path(metrics_textfile)
    serve(Options(private=private, idle_exit_s=idle_exit_s, port=port, metrics_textfile=textfile), hosted)


for _command in (runs_command.runs, runs_command.pause, runs_command.resume, runs_command.rollback, runs_command.logs):
    daemon.command()(_command)


@daemon.command()
def status(
    run: Annotated[
        str | None,
        typer.Argument(metavar="[RUN]", help="Say it of a run: its id, or its beginning.", show_default=False),
    ] = None,
    json_path: Json = None,
) -> None:
    """Say what the daemon serves, or what it does for a run; exit code 1 where there is no daemon."""
    if json_path is not None:
        check_output_path(json_path)
    if run is not None:
        runs_command.show(run, json_path)
        return
    with DaemonClient() as client:
        health = client.get("/v1/health")
        if json_path is not None:
            write_json({"schema": SCHEMA, "socket": str(client.path), **health}, json_path)
        if json_path != STANDARD_OUTPUT:
            typer.echo(_told(health, client.path))


@daemon.command()
def stop(
    run: Annotated[
        str | None,
        typer.Argument(metavar="[RUN]", help="End the tuning of a run instead; its knobs stay.", show_default=False),
    ] = None,
    json_path: Json = None,
) -> None:
    """End the daemon, after the requests that are under way; or the tuning of one run."""
    if run is not None:
        runs_command.tell("stop", run, json_path)
        return
    if json_path is not None:
        check_output_path(json_path)
    with DaemonClient() as client:
        client.post("/v1/stop")
        client.close()
        until_s = time.monotonic() + _STOP_S
        while client.path.exists():  # it removes the socket last
            if time.monotonic() > until_s:
                raise DaemonError(f"the daemon at '{client.path}' still drains after {_STOP_S:g} s")
            time.sleep(_POLL_S)
    if json_path is not None:
        write_json({"schema": SCHEMA, "stopped": True}, json_path)
    if json_path != STANDARD_OUTPUT:
        typer.echo("The daemon has ended.")


@daemon.command("open")
def open_page(
    browser: Annotated[
        bool | None, typer.Option("--browser/--no-browser", help="Open a browser; on a terminal that is the default.")
    ] = None,
) -> None:
    """Serve the page on a port of this machine, and print the link that opens it once."""
    with DaemonClient() as client:
        url = client.post("/v1/page")["url"]
    typer.echo(url)
    if browser or (browser is None and sys.stdout.isatty()):
        import webbrowser

        webbrowser.open(url)


def _told(health: dict[str, Any], path: Path) -> str:
    runs = health["runs"]
    private = " for its own runs" if health["private"] else ""
    count = "no run" if runs == 0 else f"{runs} run{'s' if runs > 1 else ''}"
    since = f"since {_ago(health['uptime_s'])} (pid {health['pid']})"
    return f"zftune {health['zftune']} serves {count}{private} on {path} {since}"


def _ago(uptime_s: float) -> str:
    minutes = int(uptime_s) // 60
    if minutes < 2:
        return f"{uptime_s:.0f} s"
    return f"{minutes} min" if minutes < 120 else f"{minutes // 60} h"
