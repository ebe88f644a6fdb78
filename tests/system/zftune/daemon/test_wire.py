"""The socket and the page's port of a real daemon: what is no HTTP, connections without end, and garbage."""

from __future__ import annotations

import json
import os
import random
import socket
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path

import pytest

from tests.support.tiers import fast
from tests.support.zftune.daemon.daemons import (
    SOON_S,
    Daemon,
    answer_on,
    as_other_user,
    exchange,
    get,
    needs_root,
    page_of,
    serving,
    status_of,
)
from tests.support.zftune.daemon.runs.agents import Agent
from zftune.daemon import PROTOCOL
from zftune.daemon.client.http import DaemonClient
from zftune.daemon.protocol.codec import encode
from zftune.daemon.protocol.messages import Report
from zftune.daemon.server import limits
from zftune.errors import DaemonError

FUZZ_S = float(os.environ.get("ZFTUNE_FUZZ_S", fast("0.5", all_of="5")))
FUZZ_SEED = int(os.environ.get("ZFTUNE_FUZZ_SEED", "8"))


def posted(body: bytes, route: str) -> bytes:
    head = f"POST {route} HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-type: application/json\r\n"
    return f"{head}content-length: {len(body)}\r\n\r\n".encode() + body


def refusal(answer: bytes) -> tuple[int, str]:
    head, _, body = answer.partition(b"\r\n\r\n")
    assert f"\r\nzftune-protocol: {PROTOCOL}".encode() in head
    return status_of(answer), json.loads(body)["error"]


def connected(path: Path) -> socket.socket:
    connection = socket.socket(socket.AF_UNIX)
    connection.settimeout(SOON_S)
    connection.connect(str(path))
    return connection


@pytest.mark.smoke
@pytest.mark.parametrize(
    "request_bytes",
    [
        b"garbage\r\n\r\n",
        b"GET / HTTP/1.1\r\n\r\n",
        b"GET / HTTP/1.1\r\nhost: x\r\nhost: y\r\n\r\n",
        b"GET /" + b"x" * 100_000,
        posted(b"", "/v1/stop").replace(b"length: 0", b"length: -1"),
    ],
)
def test_what_is_no_http_is_refused(served: Daemon, request_bytes: bytes) -> None:
    assert refusal(exchange(served.path, request_bytes)) == (400, "this is not a request of HTTP/1.1")


@pytest.mark.smoke
def test_a_failure_inside_is_logged_and_not_told(served: Daemon) -> None:
    status, sentence = refusal(exchange(served.path, get("/v1/test/fails")))
    assert (status, sentence) == (500, "the daemon failed (RuntimeError); see its log")
    assert "secret reason" in served.log.read_text()


@pytest.mark.smoke
def test_a_body_that_is_too_long_ends_its_connection(served: Daemon) -> None:
    size = (1 << 20) + 1
    with connected(served.path) as connection:
        head = "POST /v1/stop HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n"
        connection.sendall(f"{head}{size:x}\r\n".encode() + b" " * size)
        assert refusal(answer_on(connection))[0] == 413
        connection.sendall(b"\r\nno length\r\n")
        assert connection.recv(4096) == b""


def is_refused(daemon: Daemon) -> bool:
    with DaemonClient(daemon.path) as client:
        try:
            client.get("/v1/health")
        except DaemonError:
            return True
        return False


@pytest.mark.smoke
def test_connections_are_counted(served: Daemon) -> None:
    most = limits.SocketProtocol.max_connections
    held = []
    try:
        for _ in range(most):
            held.append(connected(served.path))
            held[-1].sendall(get("/v1/health").replace(b"close", b"keep-alive"))
            assert answer_on(held[-1]).startswith(b"HTTP/1.1 200")
        with connected(served.path) as surplus:
            assert refusal(answer_on(surplus)) == (429, f"there are more than {most} connections")
        held.pop().close()
        until_s = time.monotonic() + SOON_S
        while is_refused(served):  # until the daemon has seen it go
            assert time.monotonic() < until_s
    finally:
        for connection in held:
            connection.close()


@pytest.mark.smoke
def test_a_head_that_does_not_come_is_given_up(folder: Path) -> None:
    with serving(folder, "--head-s", "0.2") as daemon, connected(daemon.path) as kept:
        alive = get("/v1/health").replace(b"close", b"keep-alive")
        kept.sendall(alive)
        assert answer_on(kept).startswith(b"HTTP/1.1 200")
        for text in (b"", b"GET / HTTP/1.1\r\nx: "):
            assert refusal(exchange(daemon.path, text)) == (408, "no request has come within 0.2 s")
        kept.sendall(alive[:9])  # a connection that waited without harm has no longer for its next head
        assert refusal(answer_on(kept)) == (408, "no request has come within 0.2 s")


@pytest.mark.smoke
@needs_root
def test_another_user_gets_nothing_of_the_page_with_a_cookie_either(served: Daemon) -> None:
    script = """
with socket.socket() as connection:
    connection.settimeout(20)
    connection.connect(("127.0.0.1", int(sys.argv[1])))
    print(connection.recv(4096).decode())  # before it has asked
    try:
        connection.sendall(sys.argv[2].encode())
        print(connection.recv(4096).decode())
    except OSError as error:
        print(type(error).__name__)
"""
    port, cookie = page_of(served)
    request = f"GET /v1/health HTTP/1.1\r\nhost: 127.0.0.1:{port}\r\ncookie: {cookie}\r\nconnection: close\r\n\r\n"
    answer = as_other_user(script, str(port), request).communicate(timeout=SOON_S)[0]
    assert answer.startswith("HTTP/1.1 403 ")
    assert "may not connect; only the daemon's own user may" in answer
    assert "uptime_s" not in answer
    with socket.create_connection(("127.0.0.1", port), SOON_S) as connection:
        connection.sendall(request.encode())
        assert status_of(answer_on(connection)) == 200


def mutated(chance: random.Random, seeds: Sequence[bytes]) -> bytes:
    """Bytes that are nearly a request."""
    text = bytearray(chance.choice([*seeds, chance.randbytes(chance.randrange(1, 400))]))
    for _ in range(chance.choice([0, 1, 1, 2, 5, 20])):
        at = chance.randrange(len(text) + 1)
        what = chance.randrange(4)
        if what == 0:
            text[at:at] = chance.randbytes(chance.randrange(1, 9))
        elif what == 1:
            del text[at : at + chance.randrange(1, 9)]
        elif what == 2:
            text[at : at + 1] = chance.randbytes(1)
        else:
            text[at:at] = text[: chance.randrange(len(text) + 1)]
    return bytes(text)


def garbage(connect: Callable[[], socket.socket], chance: random.Random, seeds: Sequence[bytes]) -> dict[int, int]:
    """Send what is nearly a request for some time; how often a status was the answer, none of which is a failure's."""
    until_s = time.monotonic() + FUZZ_S
    statuses: dict[int, int] = {}
    while time.monotonic() < until_s or not statuses.get(400):
        text = mutated(chance, seeds)
        with connect() as connection:
            try:
                connection.sendall(text)
                if chance.random() < 0.3:
                    continue  # it goes without waiting
                connection.shutdown(socket.SHUT_WR)
                answer = b"".join(iter(lambda one=connection: one.recv(1 << 16), b""))  # type: ignore[misc]
            except (BrokenPipeError, ConnectionResetError):
                continue
        if answer:
            statuses[status_of(answer)] = statuses.get(status_of(answer), 0) + 1
            assert b"HTTP/1.1 5" not in answer, text
    return statuses


@pytest.mark.timeout(300 + 4 * FUZZ_S)
def test_garbage_harms_nobody(folder: Path) -> None:
    """On the socket, and on the page's port with its cookie; among what is mutated are requests of a run that lives."""
    more = {"ZFTUNE_DB": str(folder / "zftune.db"), "HOME": str(folder)}
    with (
        serving(folder, module="tests.support.zftune.daemon.runs.hosted", more=more) as daemon,
        closing(DaemonClient(daemon.path, timeout_s=30.0)) as client,
    ):
        agent, (port, cookie) = Agent(client), page_of(daemon)
        report = encode(Report(protocol=PROTOCOL, session=agent.session, sequence=1))
        asked = [
            posted(encode(agent._hello), "/v1/runs"),
            posted(report, f"/v1/runs/{agent.run}/report"),
            posted(b"", f"/v1/runs/{agent.run}/pause"),
            posted(b"", f"/v1/runs/{agent.run}/resume"),
            *(get(f"/v1/runs{name}") for name in ("", f"/{agent.run}", "/none")),
            get("/v1/openapi.json").replace(b"close", b"keep-alive") + get("/"),
            b"GET / HTTP/1.1\r\nhost: x\r\nconnection: upgrade\r\nupgrade: websocket\r\n\r\n",
        ]
        of_page = f"host: 127.0.0.1:{port}\r\norigin: http://127.0.0.1:{port}\r\ncookie: {cookie}\r\n".encode()
        on_page = [one.replace(b"host: x\r\n", of_page) for one in (*asked, get("/page.js"), get("/metrics"))]
        chance = random.Random(FUZZ_SEED)
        garbage(lambda: connected(daemon.path), chance, asked)
        garbage(lambda: socket.create_connection(("127.0.0.1", port), SOON_S), chance, on_page)
        assert daemon.process.poll() is None
        assert client.get("/v1/health")["pid"] == daemon.process.pid
        agent = Agent(client, run="f" * 32)
        assert agent.asked().role == "start"  # it still tunes
