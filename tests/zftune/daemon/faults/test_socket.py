"""What befalls the daemon's socket: it is deleted, others have planted theirs, somebody answers with garbage."""

from __future__ import annotations

import json
import os
import random
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from tests.zftune.daemon.daemons import OTHER_UID, as_other_user, needs_root
from tests.zftune.daemon.faults.stage import SOON_S, Stage, until
from zftune.daemon import PROTOCOL
from zftune.daemon.client.http import DaemonClient
from zftune.errors import DaemonError

SESSION = "a" * 32
WELCOME = {"protocol": PROTOCOL, "session": SESSION, "lease_s": 1.0}
HOLD = {"protocol": PROTOCOL, "session": SESSION, "decision": 0, "kind": "hold", "state": "warming"}


def test_it_is_deleted(stage: Callable[..., Stage], chance: random.Random) -> None:
    world = stage()
    daemon, training = world.daemon(), world.train(most=12)
    world.until_state("baseline", "searching", "confirming", "frozen", training=training)
    time.sleep(chance.uniform(0, 0.3))
    record = world.acknowledge()["run"]["record"]
    world.socket.unlink()
    if chance.random() < 0.5:
        world.socket.with_name("z.sock.lock").unlink()  # as those do who clean up
    world.client.close()
    until(lambda: world.pid() == daemon.process.pid, world.log)
    assert world.socket.stat().st_mode & 0o777 == 0o600
    second = world.begin_daemon()
    second.process.join(SOON_S)
    assert second.process.exitcode == 1  # it is still one
    training.goes_on()
    assert world.until_state("baseline", "searching", "confirming", "frozen", training=training)["record"] == record
    training.end()
    daemon.end()
    world.look()
    assert world.crashed() == []


def test_another_daemon_has_taken_its_place(stage: Callable[..., Stage], chance: random.Random) -> None:
    world = stage()
    first, training = world.daemon(), world.train(most=12)
    world.until_state("baseline", "searching", "confirming", "frozen", training=training)
    time.sleep(chance.uniform(0, 0.3))
    world.acknowledge()
    first.signal(signal.SIGSTOP)
    for name in ("z.sock", "z.sock.lock"):
        (world.folder / name).unlink()
    world.client.close()
    second = world.daemon()
    first.signal(signal.SIGCONT)
    first.process.join(SOON_S)
    assert first.process.exitcode == 0  # two would be one too many
    until(lambda: world.live_run() is not None, world.log)
    # Perhaps as a new one: the first daemon has the run's lock until it has ended.
    world.until_state("baseline", "searching", "confirming", "frozen", training=training)
    training.end()
    assert world.pid() == second.process.pid
    second.end()
    world.look()
    assert world.crashed() == []


LISTENS = """
listening = socket.socket(socket.AF_UNIX)
listening.bind(sys.argv[1])
listening.listen(64)
print("listens", flush=True)
held = []
listening.settimeout(0.05)
import select
while not select.select([sys.stdin], [], [], 0)[0]:
    try:
        held.append(listening.accept()[0])
        held[-1].sendall(b"HTTP/1.1 200 OK\\r\\nzftune-protocol: 3\\r\\ncontent-length: 2\\r\\n\\r\\n{}")
    except OSError:
        pass
"""


@contextmanager
def planted(path: Path) -> Iterator[subprocess.Popen[str]]:
    """A socket of another user, on which that user answers."""
    path.parent.chmod(0o777)
    with as_other_user(LISTENS, str(path)) as process:
        assert process.stdout is not None
        assert process.stdin is not None
        assert process.stdout.readline() == "listens\n"
        assert path.lstat().st_uid == OTHER_UID
        yield process
        process.stdin.close()
        process.wait(SOON_S)
    path.unlink()


@needs_root
def test_another_user_has_planted_one_before(stage: Callable[..., Stage]) -> None:
    world = stage()
    with planted(world.socket):
        training = world.train()
        refused = world.begin_daemon()
        refused.process.join(SOON_S)
        assert refused.process.exitcode == 1
        assert f"belongs to user {OTHER_UID}" in world.log()
        training.goes_on()
        assert training.now()["role"] is None
    daemon = world.daemon()
    world.until_state("baseline", "searching", "confirming", "frozen", training=training)
    found = training.end()
    assert any(f"is served by user {OTHER_UID}" in one for one in found["notices"])
    daemon.end()
    world.look()


@needs_root
def test_another_user_plants_one(stage: Callable[..., Stage], chance: random.Random) -> None:
    world = stage()
    daemon, training = world.daemon(), world.train(most=12)
    world.until_state("baseline", "searching", "confirming", "frozen", training=training)
    time.sleep(chance.uniform(0, 0.3))
    record = world.acknowledge()["run"]["record"]
    daemon.signal(signal.SIGSTOP)
    world.socket.unlink()
    with planted(world.socket):
        daemon.signal(signal.SIGCONT)
        with DaemonClient(world.socket) as client, pytest.raises(DaemonError, match=f"served by user {OTHER_UID}"):
            client.get("/v1/health")
        until(lambda: f"belongs to user {OTHER_UID}" in world.log())
        training.goes_on()
        assert daemon.process.is_alive()
    world.client.close()
    until(lambda: world.pid() == daemon.process.pid, world.log)
    assert world.until_state("baseline", "searching", "confirming", "frozen", training=training)["record"] == record
    training.end()
    daemon.end()
    world.look()
    assert world.crashed() == []


class Impostor:
    """Answers on a socket of this user's, with whatever comes to mind.

    Args:
        path: of the socket.
        chance: of what.
    """

    def __init__(self, path: Path, chance: random.Random) -> None:
        self.asked, self._chance, self._over = 0, chance, threading.Event()
        self._path = path
        self._listening = socket.socket(socket.AF_UNIX)
        self._listening.bind(str(path))
        self._listening.listen(64)
        self._listening.settimeout(0.05)
        self._threads = [threading.Thread(target=self._serve)]
        self._threads[0].start()

    def close(self) -> None:
        self._over.set()
        for one in self._threads:
            one.join()
        self._listening.close()
        self._path.unlink()

    def _serve(self) -> None:
        while not self._over.is_set():
            with suppress(TimeoutError):
                connection, _ = self._listening.accept()
                self._threads.append(threading.Thread(target=self._answer, args=(connection,)))
                self._threads[-1].start()

    def _answer(self, connection: socket.socket) -> None:
        with connection, suppress(OSError):
            connection.settimeout(0.05)
            while not self._over.is_set():
                try:
                    asked = connection.recv(1 << 16)
                except TimeoutError:
                    continue
                if not asked:
                    return
                if asked.startswith(b"POST"):
                    self.asked += 1
                    connection.settimeout(5.0)
                    self._reply(connection, hello=asked.startswith(b"POST /v1/runs HTTP"))
                    connection.settimeout(0.05)

    def _reply(self, connection: socket.socket, *, hello: bool) -> None:
        chance = self._chance
        kind = chance.randrange(8)
        good = json.dumps(WELCOME if hello else HOLD).encode()
        if kind == 0:
            connection.sendall(chance.randbytes(chance.randrange(1, 4000)))
        elif kind == 1:
            connection.close()
        elif kind == 2:
            connection.sendall(answer(good, length=len(good) + 9))
            connection.close()
        elif kind == 3:
            connection.sendall(answer(bytes(9 << 20)))
        elif kind == 4:
            for place in range(400):  # ever so slowly
                if self._over.wait(0.05):
                    return
                connection.sendall(answer(good)[place : place + 1])
        elif kind == 5:
            connection.sendall(answer(mutated(good, chance)))
        elif kind == 6:
            connection.sendall(answer(b"[" * chance.randrange(1, 200_000)))
        else:
            connection.sendall(answer(good))


def answer(body: bytes, length: int | None = None) -> bytes:
    length = len(body) if length is None else length
    head = (
        f"HTTP/1.1 200 OK\r\nzftune-protocol: {PROTOCOL}\r\ncontent-type: application/json\r\n"
        f"content-length: {length}\r\n\r\n"
    )
    return head.encode() + body


def mutated(text: bytes, chance: random.Random) -> bytes:
    found = bytearray(text)
    for _ in range(chance.randrange(1, 6)):
        found[chance.randrange(len(found))] = chance.randrange(256)
    return bytes(found)


def test_somebody_answers_with_garbage(stage: Callable[..., Stage], chance: random.Random) -> None:
    world = stage()
    daemon = None
    if chance.random() < 0.7:  # else it is there before the daemon is
        daemon = world.daemon()
    training = world.train(most=12)
    if daemon is not None:
        world.until_state("baseline", "searching", "confirming", "frozen", training=training)
        world.acknowledge()
        daemon.kill()
        world.socket.unlink()
    impostor = Impostor(world.socket, chance)
    try:
        asked = 1 + chance.randrange(8)
        until(lambda: impostor.asked >= asked, training.said)
        training.goes_on()
    finally:
        impostor.close()
    daemon = world.daemon()
    world.until_state("baseline", "searching", "confirming", "frozen", training=training)
    training.end()
    daemon.end()
    world.look()
    assert os.path.lexists(world.database)
