"""What befalls a daemon: it is killed, or stopped, has two of its kind, and the clock jumps."""

from __future__ import annotations

import random
import signal
import time
from collections.abc import Callable

import pytest

from tests.zftune.daemon.faults.stage import SOON_S, Stage, Training, until

AT_WORK = ("warming", "baseline", "searching", "confirming")


def at_work(world: Stage, training: Training, chance: random.Random) -> dict[str, object]:
    """Wait for some moment of a search; what the daemon has said of it by then."""
    world.until_state(*AT_WORK[chance.randrange(len(AT_WORK)) :], "frozen", training=training)
    time.sleep(chance.uniform(0, 0.15))
    return world.acknowledge()


def goes_on(world: Stage, training: Training, record: object) -> None:
    """A run is tuned, and none but that which was."""
    run = world.until_state(*AT_WORK[1:], "frozen", training=training)
    assert record in (None, run["record"])
    if run["state"] != "frozen":
        training.until(lambda now: now["role"] is not None or world.state() == "frozen")


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


@pytest.mark.usefixtures("every_fault")
def test_it_is_stopped_for_some_time(stage: Callable[..., Stage], chance: random.Random) -> None:
    world = stage()
    daemon, training = world.daemon(), world.train()
    record = at_work(world, training, chance)["run"]["record"]  # type: ignore[index]
    daemon.signal(signal.SIGSTOP)
    ends = time.monotonic() + chance.uniform(0.2, 4.0)  # a report is given up after 3 s
    while time.monotonic() < ends:
        training.goes_on(5)
    daemon.signal(signal.SIGCONT)
    goes_on(world, training, record)
    training.end()
    daemon.end()
    world.look(accounts=True)
    assert world.crashed() == []


@pytest.mark.usefixtures("every_fault")
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


@pytest.mark.usefixtures("every_fault")
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
