"""What befalls the daemon's socket: it is deleted, others have planted theirs, somebody answers with garbage."""

from __future__ import annotations

import random
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.zftune.daemon.daemons import OTHER_UID, as_other_user, needs_root
from tests.zftune.daemon.faults.stage import SOON_S, Stage, until
from zftune.daemon.client.http import DaemonClient
from zftune.errors import DaemonError


@pytest.mark.usefixtures("every_fault")
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


@pytest.mark.usefixtures("every_fault")
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
@pytest.mark.usefixtures("every_fault")
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
