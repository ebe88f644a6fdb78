"""What befalls a daemon, its database and its socket: by day it is killed, and its files may not grow."""

from __future__ import annotations

import contextlib
import random
import signal
import sqlite3
from collections.abc import Callable

import pytest

from tests.support.zftune.daemon.faults.stage import SOON_S, Stage, Training, until
from zftune.errors import DaemonError
from zftune.store import open_store

AT_WORK = ("warming", "baseline", "searching", "confirming")


def at_work(world: Stage, training: Training, chance: random.Random) -> dict[str, object]:
    """Wait for some moment of a search; what the daemon has said of it by then."""
    world.until_state(*AT_WORK[chance.randrange(len(AT_WORK)) :], "frozen", training=training)
    training.goes_on(chance.randrange(60))
    return world.acknowledge()


def goes_on(world: Stage, training: Training, record: object) -> None:
    run = world.until_state(*AT_WORK[1:], "frozen", training=training)
    assert record in (None, run["record"])
    if run["state"] != "frozen":
        training.until(lambda now: now["role"] is not None or world.state() == "frozen")


@pytest.mark.smoke
def test_it_is_killed(stage: Callable[..., Stage], chance: random.Random) -> None:
    world = stage()
    daemon, training = world.daemon(), world.train()
    record = at_work(world, training, chance)["run"]["record"]  # type: ignore[index]
    daemon.kill()
    training.goes_on()
    training.until(lambda now: now["role"] is None)
    daemon = world.daemon()
    goes_on(world, training, record)
    training.end()
    daemon.end()
    world.look(accounts=True)
    assert world.crashed() == []


def test_it_is_stopped_for_some_time(stage: Callable[..., Stage], chance: random.Random) -> None:
    world = stage()
    daemon, training = world.daemon(), world.train()
    record = at_work(world, training, chance)["run"]["record"]  # type: ignore[index]
    daemon.signal(signal.SIGSTOP)
    training.goes_on(chance.choice([50, 1500]))  # a report is given up after 3 s
    daemon.signal(signal.SIGCONT)
    goes_on(world, training, record)
    training.end()
    daemon.end()
    world.look(accounts=True)
    assert world.crashed() == []


def test_it_is_stopped_when_training_ends(stage: Callable[..., Stage]) -> None:
    world = stage()
    daemon, training = world.daemon(), world.train()
    world.until_state("searching", "confirming", training=training)
    world.acknowledge()
    daemon.signal(signal.SIGSTOP)
    training.end()  # goodbye has its time, and no more
    daemon.kill()
    world.daemon().end()
    world.look(accounts=True)


def test_two_begin_at_once(stage: Callable[..., Stage], chance: random.Random) -> None:
    world = stage()
    both = [world.begin_daemon(), world.begin_daemon()]
    training = world.train()
    until(lambda: world.pid() is not None, world.log)
    until(lambda: any(not one.process.is_alive() for one in both), world.log)
    serving, refused = sorted(both, key=lambda one: one.process.is_alive(), reverse=True)
    assert serving.process.is_alive()
    assert refused.process.exitcode == 1
    assert world.pid() == serving.process.pid
    assert f"another daemon (pid {serving.process.pid}) serves" in world.log()
    details = at_work(world, training, chance)
    third = world.begin_daemon()
    third.process.join(SOON_S)
    assert third.process.exitcode == 1
    goes_on(world, training, details["run"]["record"])  # type: ignore[index]
    training.end()
    serving.end()
    world.look(accounts=True)
    assert world.crashed() == []


def paused(world: Stage) -> bool:
    """Ask for a pause; whether it was acknowledged. What cannot be done is said in a sentence."""
    run = world.live_run()
    assert run is not None
    try:
        return bool(world.client.post(f"/v1/runs/{run['run']}/pause")["state"] == "paused")
    except DaemonError as error:
        if error.status not in (409, 503):
            raise
        return False


def is_kept(world: Stage, kind: str) -> bool:
    with open_store(str(world.database), environment={"HOME": str(world.folder)}) as store:
        return kind in [one.kind for run in store.runs() for one in store.decisions(run.run_id)]


def serves(world: Stage, training: Training) -> None:
    """The daemon answers and the training trains, whatever became of the store."""
    training.goes_on(20)
    until(lambda: world.pid() is not None, world.log)
    until(lambda: world.live_run() is not None, world.log)


def test_its_files_may_not_grow(stage: Callable[..., Stage], chance: random.Random) -> None:
    world = stage()
    assert world.adopted() == []  # the database is made
    most_bytes = world.database.stat().st_size + chance.randrange(1 << 14)
    daemon, training = world.daemon(most_bytes=most_bytes), world.train(most=12)
    training.until(lambda now: now["resting"])
    training.goes_on(100)
    serves(world, training)
    training.end()
    daemon.end()
    world.look()


def test_it_is_locked(stage: Callable[..., Stage], chance: random.Random) -> None:
    world = stage()
    daemon, training = world.daemon(busy_s=1.0), world.train(most=12)
    world.until_state(*AT_WORK[1:], "frozen", training=training)
    at_work(world, training, chance)
    with contextlib.closing(sqlite3.connect(world.database, isolation_level=None, timeout=30)) as other:
        other.execute("BEGIN EXCLUSIVE")
        serves(world, training)
        acknowledged = paused(world)
        training.goes_on(chance.choice([50, 800]))  # for less than the daemon waits, or for more
        other.execute("ROLLBACK")
    serves(world, training)
    assert acknowledged or paused(world) or world.acknowledge()["run"]["notices"]
    training.end()
    daemon.end()
    assert is_kept(world, "pause") >= acknowledged
    world.look()


def test_it_is_deleted(stage: Callable[..., Stage], chance: random.Random) -> None:
    world = stage()
    daemon, training = world.daemon(), world.train(most=12)
    world.until_state(*AT_WORK[1:], "frozen", training=training)
    record = at_work(world, training, chance)["run"]["record"]  # type: ignore[index]
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
    world.until_state(*AT_WORK[1:], "frozen", training=training)
    at_work(world, training, chance)
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
