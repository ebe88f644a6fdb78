"""The client: what it says of daemons that are not there, slow, strange, or somebody else's."""

from __future__ import annotations

import select
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.support.zftune.daemon.daemons import Daemon
from zftune import __version__
from zftune.daemon import PROTOCOL
from zftune.daemon.client import http as client_module
from zftune.daemon.client.http import DaemonClient
from zftune.errors import DaemonError

pytestmark = pytest.mark.smoke

HEAD = f"HTTP/1.1 200 OK\r\nzftune-protocol: {PROTOCOL}\r\n".encode()


@contextmanager
def standing_in(path: Path, answer: Callable[[socket.socket], None]) -> Iterator[None]:
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen()

        def serve() -> None:
            while True:
                connection, _ = listener.accept()
                with connection:
                    if connection.recv(1 << 16) == b"end":
                        return
                    try:
                        answer(connection)
                    except OSError:  # the client had enough
                        continue

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield
        finally:
            with socket.socket(socket.AF_UNIX) as last:
                last.connect(str(path))
                last.sendall(b"end")
            thread.join()


def sends(text: bytes) -> Callable[[socket.socket], None]:
    return lambda connection: connection.sendall(text)


def test_health(served: Daemon) -> None:
    with DaemonClient(served.path) as client:
        health = client.get("/v1/health")
        assert health.pop("uptime_s") > 0
        assert health == {
            "zftune": __version__,
            "protocol": PROTOCOL,
            "pid": served.process.pid,
            "runs": 0,
            "private": False,
            "stores": ["None"],
            "notices": [],
        }
        document = {"topk_ratio": 0.25, "name": "ä\u2028"}
        assert client.post("/v1/test/echo/7", document) == document


def test_a_connection_is_kept_and_made_again(served: Daemon, monkeypatch: pytest.MonkeyPatch) -> None:
    made = []
    connect = client_module._UnixConnection.connect

    def counted(connection: client_module._UnixConnection) -> None:
        made.append(connection)
        connect(connection)

    monkeypatch.setattr(client_module._UnixConnection, "connect", counted)
    with DaemonClient(served.path) as client:
        for _ in range(3):
            client.get("/v1/health")
        assert len(made) == 1
        client.close()
        client.get("/v1/health")
        assert len(made) == 2
        with pytest.raises(DaemonError, match="there is no '/v1/nonesuch'"):
            client.get("/v1/nonesuch")
        client.get("/v1/health")
        assert len(made) == 2


@pytest.mark.parametrize("left", ["nothing", "stale socket"])
def test_nobody_is_there(folder: Path, left: str) -> None:
    if left == "stale socket":
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(str(folder / "s"))
    with DaemonClient(folder / "s") as client, pytest.raises(DaemonError, match="no daemon serves") as error:
        client.get("/v1/health")
    assert error.value.status is None
    assert "zftune daemon" in str(error.value)


ODD = {
    "garbage": (b"\x00\xff garbage\r\n\r\n", "cannot be reached"),
    "nothing": (b"", "cannot be reached"),
    "half a head": (HEAD, "something else than JSON"),
    "half a body": (HEAD + b"content-length: 100\r\n\r\n7", "cannot be reached"),
    "no JSON": (HEAD + b"content-length: 2\r\n\r\n{]", "something else than JSON"),
    "too deep": (HEAD + b"content-length: 200000\r\n\r\n" + b"[" * 200000, "something else than JSON"),
    "no daemon": (b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}", "is no zftune daemon"),
    "another protocol": (
        b"HTTP/1.1 200 OK\r\nzftune-protocol: 99\r\ncontent-length: 2\r\n\r\n{}",
        f"speaks protocol '99'; this zftune needs protocol {PROTOCOL}",
    ),
    "a bad length": (HEAD + b"content-length: many\r\n\r\n{}", None),
    "an error without a sentence": (HEAD.replace(b"200 OK", b"418 X") + b"content-length: 2\r\n\r\n[]", "status 418"),
}


@pytest.mark.parametrize("case", ODD)
def test_odd_answers_are_one_error(folder: Path, case: str) -> None:
    text, sentence = ODD[case]
    with standing_in(folder / "s", sends(text)), DaemonClient(folder / "s", timeout_s=5) as client:
        if sentence is None:  # read until the end, as HTTP/1.0 did
            assert client.get("/v1/health") == {}
        else:
            with pytest.raises(DaemonError, match=sentence):
                client.get("/v1/health")


class Clock:
    """What the client's module takes for `time`."""

    now_s = 100.0

    def monotonic(self) -> float:
        return self.now_s


def test_an_answer_that_comes_byte_by_byte_has_no_more_than_the_timeout(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock()
    monkeypatch.setattr(client_module, "time", clock)

    def drip(connection: socket.socket) -> None:
        connection.sendall(HEAD + b"content-length: 9999\r\n\r\n")
        while True:
            clock.now_s += 0.1
            connection.sendall(b" ")

    with standing_in(folder / "s", drip), DaemonClient(folder / "s", timeout_s=20.0) as client:
        with pytest.raises(DaemonError, match="has not answered in time"):
            client.get("/v1/health")
        assert clock.now_s >= 120.0


def silence(connection: socket.socket) -> None:
    until_it_goes = select.poll()
    until_it_goes.register(connection, select.POLLRDHUP)
    until_it_goes.poll()


@pytest.mark.parametrize("body", [b"", b"y" * (4 << 20)], ids=["no answer", "nobody reads"])
def test_silence_has_no_more_than_the_timeout(folder: Path, body: bytes) -> None:
    client = DaemonClient(folder / "s", timeout_s=0.05)
    with standing_in(folder / "s", silence), client, pytest.raises(DaemonError, match="has not answered in time"):
        client.post("/v1/x", body)


def test_an_endless_answer_is_cut_off(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_module, "MAX_REPLY_BYTES", 1 << 20)
    endless = HEAD + b"content-length: 99999999\r\n\r\n" + b" " * (2 << 20)
    client = DaemonClient(folder / "s", timeout_s=20)
    with standing_in(folder / "s", sends(endless)), client, pytest.raises(DaemonError, match="more than 1 MiB"):
        client.get("/v1/health")


def test_a_connection_that_broke_is_made_again(folder: Path) -> None:
    answers = iter([b'{"n": 1}', b'{"n": 2}'])

    def once(connection: socket.socket) -> None:
        text = next(answers)
        connection.sendall(HEAD + f"content-length: {len(text)}\r\n\r\n".encode() + text)

    with standing_in(folder / "s", once), DaemonClient(folder / "s") as client:
        assert client.get("/v1/a") == {"n": 1}
        assert client._connection is not None
        assert client._connection.sock.recv(1) == b""  # the other side has closed
        assert client.get("/v1/a") == {"n": 2}
