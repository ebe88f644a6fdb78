"""The runs that the daemon follows, as a command asks for them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from urllib.parse import quote

from zftune.daemon.client import DaemonClient
from zftune.errors import BadInputError, ZftuneError

_SHOWN = 8
"""Characters of a run's identity."""
_MOST_NAMED = 6


def all_runs(client: DaemonClient) -> list[dict[str, Any]]:
    """The runs that are followed and the last that have ended, oldest first.

    Raises:
        DaemonError: the daemon cannot be asked.
    """
    runs: list[dict[str, Any]] = client.get("/v1/runs")
    return runs


def chosen(client: DaemonClient, run: str | None) -> dict[str, Any]:
    """The run that is meant.

    Args:
        client: of the daemon.
        run: its identity or that of its record, or the beginning of one; None: the only run there is.

    Raises:
        BadInputError: it is none, or not only one.
        ZftuneError: there is no run, or the daemon cannot be asked.
    """
    return among(all_runs(client), run)


def called(run: Mapping[str, Any]) -> str:
    """How a run is called: as `zftune explain` knows it, or before it is in the store as the daemon does."""
    return str(run["record"] or run["run"])[:_SHOWN]


def among(runs: list[dict[str, Any]], run: str | None) -> dict[str, Any]:
    """The run that is meant; see `chosen`."""
    if not runs:
        raise ZftuneError("the daemon follows no run, start one with: zftune run --online -- CMD")
    if run is None:
        found = [one for one in runs if one["state"] != "ended"] or runs
        what = f"RUN is missing, there are {len(found)} runs"
    else:
        found = _beginning(runs, "run", run) or _beginning(runs, "record", run)
        if len({one["record"] or one["run"] for one in found}) == 1:
            found = found[-1:]  # a training that was gone on with: the last part
        what = f"RUN '{run[:40]}'" + (f" is the beginning of {len(found)}" if found else "")
    if len(found) == 1:
        return found[0]
    named = found or runs
    names = ", ".join(called(one) for one in named[-_MOST_NAMED:])
    more = " .." if len(named) > _MOST_NAMED else ""
    raise BadInputError(f"{what}, allowed is one of {names}{more} (see zftune daemon runs)")


def details(client: DaemonClient, run: str) -> dict[str, Any]:
    """A run with its trials and decisions.

    Raises:
        DaemonError: the daemon cannot be asked, or does not follow it any more.
    """
    found: dict[str, Any] = client.get(f"/v1/runs/{quote(run, safe='')}")
    return found


def told(client: DaemonClient, run: str, command: str) -> dict[str, Any]:
    """The run after a command.

    Args:
        client: of the daemon.
        run: its identity.
        command: "pause", "resume", "rollback" or "stop".

    Raises:
        DaemonError: the daemon cannot be asked, or the run's state does not allow it.
    """
    found: dict[str, Any] = client.post(f"/v1/runs/{quote(run, safe='')}/{command}", timeout_s=30.0)
    return found


def _beginning(runs: list[dict[str, Any]], name: str, beginning: str) -> list[dict[str, Any]]:
    return [one for one in runs if beginning and (one[name] or "").startswith(beginning.lower())]
