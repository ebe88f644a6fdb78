"""Ask the daemon, over its socket. Standard library only: this runs inside training processes.

Nothing here waits longer than it is told to, however slowly or strangely the other side answers.
"""

from __future__ import annotations

import http.client
import json
import os
import socket
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import quote

from zftune.daemon import PROTOCOL, PROTOCOL_HEADER, SHOWN
from zftune.daemon.client.location import locate, peer_uid
from zftune.errors import BadInputError, DaemonError, NoDaemonError, StrangerError, ZftuneError

_MOST_NAMED = 6


PAST_RUNS = "all runs of the store: zftune runs list --all"
"""Where to look for what a daemon does not tell."""


def all_runs(client: DaemonClient) -> list[dict[str, Any]]:
    """The runs that are followed and the last that have ended, oldest first. Raises NoDaemonError: there is none; the
    sentence says where its runs are to be seen; DaemonError: the daemon cannot be asked.
    """
    try:
        runs: list[dict[str, Any]] = client.get("/v1/runs")
    except NoDaemonError as error:  # a private one ends a minute after its last run
        raise NoDaemonError(f"{error}; {PAST_RUNS}") from error
    return runs


def called(run: Mapping[str, Any]) -> str:
    """How a run is called: as `zftune explain` knows it, or before it is in the store as the daemon does."""
    return str(run["record"] or run["run"])[:SHOWN]


def among(runs: list[dict[str, Any]], run: str | None) -> dict[str, Any]:
    """The run with an identity, its record's, or the beginning of one; None: the only run there is.

    Raises ZftuneError if there is no run, BadInputError if `run` is none of them, or not only one.
    """
    if not runs:
        raise ZftuneError(f"the daemon follows no run, start one with: zftune run --online -- CMD; {PAST_RUNS}")
    if run is None:
        found = [one for one in runs if one["state"] != "ended"] or runs
        what = f"RUN is missing, there are {len(found)} runs"
    else:
        found = _beginning(runs, "run", run) or _beginning(runs, "record", run)
        what = f"RUN '{run[:40]}' is " + (f"the beginning of {len(found)}" if found else "not there")
    if len(found) == 1:
        return found[0]
    named = found or runs
    names = ", ".join(called(one) for one in named[-_MOST_NAMED:])
    more = " .." if len(named) > _MOST_NAMED else ""
    raise BadInputError(f"{what}; the runs are {names}{more} (see zftune runs list)")


def details(client: DaemonClient, run: str) -> dict[str, Any]:
    """A run with its trials and decisions. Raises DaemonError: the daemon cannot be asked, or does not follow it any
    more.
    """
    found: dict[str, Any] = client.get(f"/v1/runs/{quote(run, safe='')}")
    return found


def told(client: DaemonClient, run: str, command: str) -> dict[str, Any]:
    """The run after a command: "pause", "resume", "rollback" or "stop". Raises DaemonError: the daemon cannot be asked,
    or the run's state does not allow it.
    """
    found: dict[str, Any] = client.post(f"/v1/runs/{quote(run, safe='')}/{command}", timeout_s=30.0)
    return found


def _beginning(runs: list[dict[str, Any]], name: str, beginning: str) -> list[dict[str, Any]]:
    return [one for one in runs if beginning and (one[name] or "").startswith(beginning.lower())]


MAX_REPLY_BYTES = 8 << 20


class DaemonClient:
    """One connection to the daemon, opened when it is needed and again when it broke. For one thread.

    Args:
        timeout_s: for one request as a whole, connecting included.
    """

    def __init__(self, path: Path | None = None, *, timeout_s: float = 5.0) -> None:
        self._path = path
        self._timeout_s = timeout_s
        self._connection: _UnixConnection | None = None

    @property
    def path(self) -> Path:
        """Of the socket. Raises DaemonError: the environment names none that could be one."""
        if self._path is None:
            try:
                self._path = locate(os.environ).socket
            except BadInputError as error:
                raise DaemonError(str(error)) from error
        return self._path

    def get(self, route: str, *, timeout_s: float | None = None) -> Any:
        """The JSON of a route such as "/v1/health". Raises DaemonError: nobody answers in time, somebody else does, or
        the daemon refuses (it has a `status` then).
        """
        return self._ask("GET", route, None, timeout_s)

    def post(self, route: str, document: Any = None, *, timeout_s: float | None = None) -> Any:
        """The answer of a route to a document, or its JSON. Never sent twice. Raises DaemonError: as `get`."""
        return self._ask("POST", route, document, timeout_s)

    def close(self) -> None:
        """Close the connection; the next request opens one."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def __enter__(self) -> DaemonClient:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _ask(self, method: str, route: str, document: Any, timeout_s: float | None) -> Any:
        path = self.path
        body = document
        if not isinstance(document, bytes | None):
            body = json.dumps(document, allow_nan=False).encode()
        try:
            status, version, text = self._exchange(path, method, route, body, timeout_s or self._timeout_s)
        except DaemonError:
            self.close()
            raise
        except (FileNotFoundError, ConnectionRefusedError) as error:
            self.close()
            raise NoDaemonError(f"no daemon serves '{path}', start one with: zftune daemon start") from error
        except TimeoutError as error:
            self.close()
            raise DaemonError(f"the daemon at '{path}' has not answered in time") from error
        except (OSError, http.client.HTTPException, ValueError) as error:
            self.close()
            reason = str(error) or type(error).__name__
            raise DaemonError(f"the daemon at '{path}' cannot be reached ({reason[:200]})") from error
        return self._understood(status, version, text)

    def _exchange(
        self, path: Path, method: str, route: str, body: bytes | None, timeout_s: float
    ) -> tuple[int, str, bytes]:
        connection = self._connection
        if connection is None or connection.is_stale():
            self.close()
            connection = self._connection = _UnixConnection(path)
        connection.deadline_s = time.monotonic() + timeout_s
        headers = {} if body is None else {"content-type": "application/json"}
        connection.request(method, route, body, headers)
        response = connection.getresponse()
        text = response.read(MAX_REPLY_BYTES + 1)
        if len(text) > MAX_REPLY_BYTES:
            raise DaemonError(f"the daemon at '{path}' answers with more than {MAX_REPLY_BYTES >> 20} MiB")
        if response.length:  # announced, and not come
            raise http.client.IncompleteRead(text, response.length)
        return response.status, response.headers.get(PROTOCOL_HEADER, ""), text

    def _understood(self, status: int, version: str, text: bytes) -> Any:
        if version != str(PROTOCOL):
            self.close()
            found = f"speaks protocol {version[:20]!r}" if version else "is no zftune daemon"
            raise StrangerError(f"what answers at '{self.path}' {found}; this zftune needs protocol {PROTOCOL}")
        try:
            answer = json.loads(text)
        except (ValueError, RecursionError) as error:
            self.close()
            raise DaemonError(f"the daemon at '{self.path}' answers with something else than JSON") from error
        if status < 400:
            return answer
        sentence = answer.get("error") if isinstance(answer, dict) else None
        raise DaemonError(str(sentence or f"the daemon answers with status {status}"), status=status)


class _UnixConnection(http.client.HTTPConnection):
    """HTTP over a Unix socket to a server of this user, with one deadline for all of a request."""

    def __init__(self, path: Path) -> None:
        super().__init__("localhost")
        self._path = path
        self.deadline_s = 0.0
        """Of the request under way, by time.monotonic()."""

    def connect(self) -> None:
        connection = _Socket(self)
        try:
            connection.settimeout(self.left_s())
            connection.connect(os.fspath(self._path))
            uid = peer_uid(connection)
            if uid != os.getuid():
                raise StrangerError(f"the socket '{self._path}' is served by user {uid}, not by you")
        except BaseException:
            connection.close()
            raise
        self.sock = connection

    def is_stale(self) -> bool:
        """Whether the server has closed the connection since its last answer, or sent what nobody asked for."""
        if self.sock is None:
            return False
        self.sock.settimeout(0.0)
        try:
            self.sock.recv(1, socket.MSG_PEEK)
        except BlockingIOError:
            return False
        except OSError:
            return True
        return True

    def left_s(self) -> float:
        """Time until the deadline. Raises TimeoutError: there is none."""
        left_s = self.deadline_s - time.monotonic()
        if left_s <= 0:
            raise TimeoutError
        return left_s


class _Socket(socket.socket):
    """Each read and write has what is left of the request's time: one byte a second is not an answer."""

    def __init__(self, owner: _UnixConnection) -> None:
        super().__init__(socket.AF_UNIX, socket.SOCK_STREAM)
        self._owner = owner

    def recv_into(self, *arguments: Any) -> int:  # what reading by makefile(), as http.client does, ends in
        self.settimeout(self._owner.left_s())
        return super().recv_into(*arguments)

    def sendall(self, *arguments: Any) -> None:
        self.settimeout(self._owner.left_s())
        super().sendall(*arguments)
