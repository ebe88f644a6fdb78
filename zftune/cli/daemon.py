"""`zftune daemon`: starts, shows, opens and stops the process that serves this machine's training runs."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Annotated, Any

import typer

from zftune.daemon.client.http import DaemonClient
from zftune.errors import BadInputError, DaemonError, SocketHeldError
from zftune.text import STANDARD_OUTPUT, check_output_path, write_json

SCHEMA = "zftune.daemon/1"
_STOP_S = 30.0
_ASK_S = 2.0
_POLL_S = 0.05

_Json = Annotated[str | None, typer.Option("--json", metavar="PATH", help="Write JSON; '-': standard output.")]
daemon = typer.Typer(
    name="daemon",
    help="Start, show, open and stop the process that serves this machine's training runs.",
    add_completion=False,
    pretty_exceptions_enable=False,
)


@daemon.command()
def start(
    private: Annotated[bool, typer.Option("--private", help="End a minute after the last run.")] = False,
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
    """Serve the training runs of this machine, in the foreground, until Ctrl-C or another signal."""
    if idle_exit_s is not None and not 0 < idle_exit_s < float("inf"):
        raise BadInputError(f"--idle-exit-s is {idle_exit_s:g}; it must be a number above 0")
    if port is not None and not 0 <= port < 1 << 16:
        raise BadInputError(f"--port is {port}; it must be from 0 to 65535")
    check_output_path(metrics_textfile, "--metrics-textfile", standard_output=False)
    from zftune.daemon.process import Options, hosted, serve

    textfile = None if metrics_textfile is None else Path(metrics_textfile)
    options = Options(private=private, idle_exit_s=idle_exit_s, port=port, metrics_textfile=textfile)
    try:
        serve(options, hosted)
    except SocketHeldError as error:
        raise DaemonError(str(error) if private else f"{error}{_way_out(error.pid)}") from error


@daemon.command()
def status(json_path: _Json = None) -> None:
    """Show the daemon's version, socket, stores and number of runs; exit code 1 if there is no daemon."""
    check_output_path(json_path)
    with DaemonClient() as client:
        health = client.get("/v1/health")
        write_json({"schema": SCHEMA, "socket": str(client.path), **health}, json_path)
        if json_path != STANDARD_OUTPUT:
            typer.echo(_told(health, client.path))


@daemon.command()
def stop(json_path: _Json = None) -> None:
    """End the daemon, after the requests that are under way. Trainings go on, under the settings that they have."""
    check_output_path(json_path)
    with DaemonClient() as client:
        client.post("/v1/stop")
        client.close()
        until_s = time.monotonic() + _STOP_S
        while client.path.exists():  # it removes the socket last
            if time.monotonic() > until_s:
                raise DaemonError(f"the daemon at '{client.path}' still drains after {_STOP_S:g} s")
            time.sleep(_POLL_S)
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


def _way_out(pid: str) -> str:
    """What the daemon that holds the socket is there for, and the command that ends it."""
    try:
        with DaemonClient(timeout_s=_ASK_S) as client:
            health = client.get("/v1/health")
    except DaemonError:
        return f", but does not answer; if that does not change, end it with: kill {pid}" if pid else ""
    if not health["private"]:
        return f" ({_count(health['runs'])}); end it with: zftune daemon stop"
    ends = "it ends a minute after its last run, or now with: zftune daemon stop (trainings go on)"
    return f": a private one, which a training started for itself ({_count(health['runs'])}); {ends}"


def _count(runs: int) -> str:
    return "no run" if runs == 0 else f"{runs} run{'s' if runs > 1 else ''}"


def _told(health: dict[str, Any], path: Path) -> str:
    count = _count(health["runs"])
    private = " (private: it ends after its last run)" if health["private"] else ""
    since = f"and began {_ago(health['uptime_s'])} ago (pid {health['pid']})"
    kept = f"its runs are kept in {', '.join(health['stores'])}" if health["stores"] else "no run has named a store yet"
    told = f"zftune {health['zftune']} serves {count} on {path} {since}, {kept}{private}"
    return "\n".join((told, *health["notices"]))


def _ago(uptime_s: float) -> str:
    minutes = int(uptime_s) // 60
    if minutes < 2:
        return f"{uptime_s:.0f} s"
    return f"{minutes} min" if minutes < 120 else f"{minutes // 60} h"
