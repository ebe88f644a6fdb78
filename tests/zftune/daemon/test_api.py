"""The HTTP interface on the socket: sentences for whatever is wrong, limits, and what no client may do to it."""

from __future__ import annotations

import json
import os
import random
import re
import socket
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest

from tests.tiers import by_day
from tests.zftune.daemon.daemons import SOON_S, Daemon, answer_on, exchange, get, serving, status_of
from tests.zftune.daemon.hosted import ANSWER_S, BODY_S
from zftune.daemon import PROTOCOL
from zftune.daemon.client.http import DaemonClient
from zftune.daemon.server import limits
from zftune.daemon.server.answers import error_body
from zftune.errors import DaemonError

FUZZ_S = float(os.environ.get("ZFTUNE_FUZZ_S", by_day("2", all_of="10")))
"""Of random bytes, and of random requests; here and for the runs' routes together."""
EXAMPLES = 20
FUZZ_SEED = int(os.environ.get("ZFTUNE_FUZZ_SEED", "8"))
ECHO = "/v1/test/echo/7"
GOOD = b'{"topk_ratio": 0.5, "name": "x"}'


def posted(body: bytes, route: str = ECHO, kind: str = "application/json", length: int | None = None) -> bytes:
    head = f"POST {route} HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-type: {kind}\r\n"
    return f"{head}content-length: {len(body) if length is None else length}\r\n\r\n".encode() + body


def refusal(answer: bytes) -> tuple[int, str]:
    """Status and sentence; everything that refuses is JSON with nothing but a sentence, and says the protocol."""
    head, _, body = answer.partition(b"\r\n\r\n")
    assert b"\r\ncontent-type: application/json" in head
    assert f"\r\nzftune-protocol: {PROTOCOL}".encode() in head
    found = json.loads(body)
    assert list(found) == ["error"]
    assert "\n" not in found["error"]
    return status_of(answer), found["error"]


@pytest.mark.parametrize(
    ("request_bytes", "status", "sentence"),
    [
        (get("/v1/nope"), 404, "there is no '/v1/nope'"),
        (get("/v1/health/"), 404, "there is no '/v1/health/'"),
        (get("/v1/nope").replace(b"host: x", b"host: ["), 404, "there is no '/v1/nope'"),
        (get("/docs"), 404, "there is no '/docs'"),
        (get("/v1/" + "x" * 300), 404, "there is no '/v1/" + "x" * 73 + "...'"),
        (posted(b"", "/v1/health"), 405, "method POST on '/v1/health' is not allowed; it must be GET"),
        (posted(GOOD, "/v1/test/echo/x"), 422, "number is 'x': Input should be a valid integer"),
        (posted(GOOD, "/v1/test/echo/-1"), 422, "number is '-1': Input should be greater than or equal to 0"),
        (posted(GOOD, f"/v1/test/echo/{'9' * 5000}"), 422, "number is '999"),
        (posted(b""), 422, "body: Field required"),
        (posted(b"{"), 422, "the body is not JSON (Expecting property name"),
        (posted(b"[1]"), 422, "body is '[1]': Input should be a valid dictionary"),
        (posted(b"{}"), 422, "topk_ratio: Field required (and 1 more)"),
        (posted(b'{"topk_ratio": NaN, "name": "x"}'), 422, "topk_ratio is 'nan': "),
        (posted(b'{"topk_ratio": 1e999, "name": "x"}'), 422, "topk_ratio is 'inf': "),
        (posted(b'{"topk_ratio": 1, "name": "\\ud800"}'), 422, "name is '\\ud800'"),
        (posted(b'{"topk_ratio": "\\ud800\\n", "name": "x"}'), 422, "topk_ratio is '\\ud800\\n'"),
        (posted(b"\xff\xfe"), 422, "the body is not JSON ("),
        (posted(b"\xff"), 400, "There was an error parsing the body"),
        (posted(b"[" * 100_000), 400, "There was an error parsing the body"),
        (posted(b"9" * 10_000), 400, "There was an error parsing the body"),
        (posted(GOOD, kind="text/plain"), 422, "body is "),
        (get("/v1/test/refuses"), 422, "name 'x': allowed is y"),
        (posted(b"", length=(1 << 20) + 1), 413, "the body is longer than 1048576 bytes"),
        (b"garbage\r\n\r\n", 400, "this is not a request of HTTP/1.1"),
        (b"GET / HTTP/1.1\r\n\r\n", 400, "this is not a request of HTTP/1.1"),
        (b"GET / HTTP/1.1\r\nhost: x\r\nhost: y\r\n\r\n", 400, "this is not a request of HTTP/1.1"),
        (b"GET /" + b"x" * 100_000, 400, "this is not a request of HTTP/1.1"),
        (posted(b"", length=0).replace(b": 0", b": -1"), 400, "this is not a request of HTTP/1.1"),
    ],
)
def test_what_is_wrong_is_one_sentence(served: Daemon, request_bytes: bytes, status: int, sentence: str) -> None:
    found_status, found = refusal(exchange(served.path, request_bytes))
    assert (found_status, found[: len(sentence)]) == (status, sentence)


def test_a_sentence_may_hold_anything() -> None:
    assert json.loads(error_body("half \ud800\n").decode()) == {"error": "half \ud800\n"}


def test_what_fails_inside_is_logged_and_not_told(served: Daemon) -> None:
    status, sentence = refusal(exchange(served.path, get("/v1/test/fails")))
    assert (status, sentence) == (500, "the daemon failed (RuntimeError); see its log")
    assert "secret reason" in served.log.read_text()
    assert status_of(exchange(served.path, get("/v1/health"))) == 200


def chunked(size: int) -> bytes:
    head = f"POST {ECHO} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ntransfer-encoding: chunked\r\n\r\n"
    return head.encode() + f"{size:x}\r\n".encode() + b" " * size


def test_a_body_that_does_not_tell_its_length_is_limited_too(served: Daemon) -> None:
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(SOON_S)
        connection.connect(str(served.path))
        connection.sendall(chunked((1 << 20) + 1))
        assert refusal(answer_on(connection))[0] == 413
        connection.sendall(b"\r\nno length\r\n")  # what comes after the answer is not answered
        assert connection.recv(4096) == b""


def test_a_body_that_does_not_come_is_not_waited_for(served: Daemon) -> None:
    begun_s = time.monotonic()
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(SOON_S)
        connection.connect(str(served.path))
        connection.sendall(posted(b"{", length=2).replace(b"connection: close\r\n", b""))
        assert refusal(answer_on(connection)) == (408, f"the body has not come within {BODY_S:g} s")
    assert time.monotonic() - begun_s >= BODY_S


def test_an_answer_that_does_not_begin_is_not_waited_for(served: Daemon) -> None:
    begun_s = time.monotonic()
    status, sentence = refusal(exchange(served.path, get("/v1/test/held")))
    assert (status, sentence) == (503, f"no answer within {ANSWER_S:g} s, try again later")
    assert time.monotonic() - begun_s >= ANSWER_S  # `exchange` waits for ten times as long at most


def test_an_answer_that_has_begun_may_take_its_time(served: Daemon) -> None:
    answer = exchange(served.path, get("/v1/test/streams"))
    assert status_of(answer) == 200
    assert b"one " in answer
    assert b"two" in answer


def is_refused(daemon: Daemon) -> bool:
    with DaemonClient(daemon.path) as client:
        try:
            client.get("/v1/health")
        except DaemonError:
            return True
        return False


def test_connections_are_counted(served: Daemon) -> None:
    most = limits.SocketProtocol.max_connections
    held = []
    try:
        for _ in range(most):
            connection = socket.socket(socket.AF_UNIX)
            connection.settimeout(SOON_S)
            held.append(connection)
            connection.connect(str(served.path))
            connection.sendall(get("/v1/health").replace(b"close", b"keep-alive"))
            assert answer_on(connection).startswith(b"HTTP/1.1 200")
        with socket.socket(socket.AF_UNIX) as surplus:
            surplus.settimeout(SOON_S)
            surplus.connect(str(served.path))
            assert refusal(answer_on(surplus)) == (429, f"there are more than {most} connections")
        held.pop().close()
        until_s = time.monotonic() + SOON_S
        while is_refused(served):  # until the daemon has seen it go
            assert time.monotonic() < until_s
    finally:
        for connection in held:
            connection.close()


def test_a_head_that_does_not_come_is_not_waited_for(folder: Path) -> None:
    with serving(folder, "--head-s", "0.5") as daemon:
        kept = socket.socket(socket.AF_UNIX)
        kept.settimeout(SOON_S)
        kept.connect(str(daemon.path))
        alive = get("/v1/health").replace(b"close", b"keep-alive")
        for text in (b"", b"GET / HTTP/1.1\r\nx: "):
            begun_s = time.monotonic()
            kept.sendall(alive)
            assert answer_on(kept).startswith(b"HTTP/1.1 200")
            assert refusal(exchange(daemon.path, text)) == (408, "no request has come within 0.5 s")
            assert time.monotonic() - begun_s >= 0.5
        kept.sendall(alive[:9])  # a connection that waited without harm has no longer for its next head
        assert refusal(answer_on(kept)) == (408, "no request has come within 0.5 s")
        kept.close()


def test_the_interface_describes_itself(served: Daemon) -> None:
    with DaemonClient(served.path) as client:
        document = client.get("/v1/openapi.json")
    assert document["openapi"].startswith("3.1")
    assert {"/v1/health", "/v1/page", "/v1/stop", "/v1/test/echo/{number}"} <= set(document["paths"])
    assert all(path.startswith("/v1/") for path in document["paths"])
    error = document["components"]["schemas"]["ErrorAnswer"]
    assert list(error["properties"]) == ["error"]
    assert "HTTPValidationError" not in json.dumps(document)


def mutated(chance: random.Random, more: Sequence[bytes] = ()) -> bytes:
    """Bytes that are nearly a request, one of `more` among others."""
    seeds = [
        *more,
        get("/v1/health"),
        get("/v1/openapi.json").replace(b"close", b"keep-alive") + get("/"),
        posted(GOOD),
        posted(GOOD, kind="multipart/form-data; boundary=x"),
        chunked(10) + b"\r\n0\r\n\r\n",
        b"GET /v1/health?" + bytes(chance.randrange(33, 127) for _ in range(20)) + b" HTTP/1.1\r\nhost: x\r\n\r\n",
        b"GET / HTTP/1.1\r\nhost: x\r\nconnection: upgrade\r\nupgrade: websocket\r\n\r\n",
        bytes(chance.randrange(256) for _ in range(chance.randrange(1, 400))),
    ]
    text = bytearray(chance.choice(seeds))
    for _ in range(chance.choice([0, 1, 1, 2, 5, 20])):
        at = chance.randrange(len(text) + 1)
        what = chance.randrange(4)
        if what == 0:
            text[at:at] = bytes(chance.randrange(256) for _ in range(chance.randrange(1, 9)))
        elif what == 1:
            del text[at : at + chance.randrange(1, 9)]
        elif what == 2:
            text[at : at + 1] = bytes([chance.randrange(256)])
        else:
            text[at:at] = text[: chance.randrange(len(text) + 1)]
    return bytes(text)


def garbage(
    connect: Callable[[], socket.socket], chance: random.Random, for_s: float, more: Sequence[bytes] = ()
) -> dict[int, int]:
    """Send what is nearly a request for some time; how often a status was the answer, none of which is a failure's."""
    until_s = time.monotonic() + for_s
    statuses: dict[int, int] = {}
    while time.monotonic() < until_s:
        text = mutated(chance, more)
        with connect() as connection:
            connection.settimeout(SOON_S)
            try:
                connection.sendall(text)
                if chance.random() < 0.7:
                    connection.shutdown(socket.SHUT_WR)
                    answer = b"".join(iter(lambda one=connection: one.recv(1 << 16), b""))  # type: ignore[misc]
                else:
                    answer = b""  # it goes without waiting
            except (BrokenPipeError, ConnectionResetError):
                continue
        if answer:
            statuses[status_of(answer)] = statuses.get(status_of(answer), 0) + 1
            assert b"HTTP/1.1 5" not in answer, text
    return statuses


def to(path: Path) -> socket.socket:
    """A connection to a Unix socket."""
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(str(path))
    return connection


def test_garbage_on_the_socket_harms_nobody(served: Daemon) -> None:
    statuses = garbage(lambda: to(served.path), random.Random(FUZZ_SEED), FUZZ_S / 4)
    assert statuses.get(400, 0) > 10, statuses
    assert served.process.poll() is None
    with DaemonClient(served.path) as client:
        assert client.get("/v1/health")["pid"] == served.process.pid


def test_schemathesis_finds_nothing(served: Daemon) -> None:
    import schemathesis  # late: 1 s
    from schemathesis.core.result import Ok

    with DaemonClient(served.path) as client:
        schema = schemathesis.openapi.from_dict(client.get("/v1/openapi.json"))
    statuses: dict[str, set[int]] = {}
    for result in schema.get_all_operations():
        assert isinstance(result, Ok)
        operation = result.ok()
        if operation.path != "/v1/stop":
            ask_often(served, operation, statuses.setdefault(operation.label, set()))
    assert 200 in statuses["GET /v1/health"]
    assert {200, 422} <= statuses["POST /v1/test/echo/{number}"]
    assert max(status for seen in statuses.values() for status in seen) < 500, statuses
    assert served.process.poll() is None


def ask_often(daemon: Daemon, operation: Any, statuses: set[int]) -> None:
    """Ask a route with what its description allows, and what it does not; answers are what the description says."""
    from hypothesis import HealthCheck, given, settings
    from hypothesis import strategies as st
    from schemathesis import GenerationMode

    modes = [operation.as_strategy(generation_mode=mode) for mode in GenerationMode]

    @settings(max_examples=EXAMPLES, deadline=None, database=None, suppress_health_check=list(HealthCheck))
    @given(case=st.one_of(modes))
    def ask(case: Any) -> None:
        body = b"" if not case.media_type else json.dumps(case.body, default=str).encode()
        target = re.sub(r"[^!-~]", lambda found: quote(found[0], errors="replace"), case.formatted_path)
        answer = exchange(daemon.path, posted(body, target).replace(b"POST", case.method.encode(), 1))
        statuses.add(status_of(answer))
        if status_of(answer) >= 400:
            refusal(answer)

    ask()
