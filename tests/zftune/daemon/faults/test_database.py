"""What befalls the daemon's database: its disk is full, somebody else has locked it, its bytes are garbage."""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import sqlite3
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.zftune.daemon.faults.stage import Stage, Training, until
from zftune.errors import DaemonError
from zftune.store import open_store
from zftune.store.types import TrialState
from zftune.tuner.messages import NOT_PREDICTED

BUSY_S = 1.0


@pytest.fixture
def disk(folder: Path) -> Iterator[Path]:
    """A disk of its own that is soon full."""
    mount = shutil.which("mount")
    if os.geteuid() != 0 or mount is None:
        pytest.skip("only root can mount a small disk")
    made = folder / "disk"
    made.mkdir()
    done = subprocess.run([mount, "-t", "tmpfs", "-o", "size=2m", "none", made], capture_output=True, check=False)
    if done.returncode:
        pytest.skip(f"a small disk cannot be mounted here ({done.stderr.decode().strip()})")
    yield made
    subprocess.run(["umount", "-l", made], check=True)  # where a test has failed, its daemon still uses it


def filled(disk: Path) -> Path:
    """What takes all the room that is left."""
    filler = disk / "filler"
    with filler.open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(bytes(4096))
    return filler


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
    """Whether such a decision is in the store."""
    with open_store(str(world.database), environment={"HOME": str(world.folder)}) as store:
        return kind in [one.kind for run in store.runs() for one in store.decisions(run.run_id)]


def states(world: Stage) -> set[TrialState]:
    """Of all trials in the store."""
    with open_store(str(world.database), environment={"HOME": str(world.folder)}) as store:
        trials = [one for run in store.runs() for one in store.trials(run.run_id)]
    return {one.state for one in trials}


def at_work(world: Stage, training: Training, chance: random.Random) -> None:
    world.until_state("baseline", "searching", "confirming", "frozen", training=training)
    time.sleep(chance.uniform(0, 0.6))
    world.acknowledge()


def serves(world: Stage, training: Training) -> None:
    """The daemon answers and the training trains, whatever became of the store."""
    training.goes_on(20)
    until(lambda: world.pid() is not None, world.log)
    until(lambda: world.live_run() is not None, world.log)


@pytest.mark.usefixtures("every_fault")
def test_its_disk_is_full(stage: Callable[..., Stage], disk: Path, chance: random.Random) -> None:
    world = stage(database=disk / "zftune.db")
    daemon, training = world.daemon(), world.train(most=12)
    at_work(world, training, chance)
    filler = filled(disk)
    serves(world, training)
    acknowledged = paused(world)
    training.goes_on(60)
    serves(world, training)
    filler.unlink()
    training.end()
    until(lambda: TrialState.IN_FLIGHT not in states(world), world.log)
    assert TrialState.CRASHED not in states(world)  # it was survived
    later = world.train(most=2)
    world.until_state("frozen", training=later)  # there is room again
    assert world.acknowledge()["run"]["notices"] in ([], [NOT_PREDICTED])
    later.end()
    daemon.end()
    assert is_kept(world, "pause") >= acknowledged
    world.look()


def test_its_files_may_not_grow(stage: Callable[..., Stage], chance: random.Random) -> None:
    world = stage()
    world.daemon().end()  # the database is made
    most_bytes = world.database.stat().st_size + chance.randrange(1 << 14)
    daemon, training = world.daemon(most_bytes=most_bytes), world.train(most=12)
    training.until(lambda now: now["resting"])
    training.goes_on(100)
    serves(world, training)
    training.end()
    daemon.end()
    world.look()


@pytest.mark.usefixtures("every_fault")
def test_it_is_locked(stage: Callable[..., Stage], chance: random.Random) -> None:
    world = stage()
    daemon, training = world.daemon(busy_s=BUSY_S), world.train(most=12)
    at_work(world, training, chance)
    with contextlib.closing(sqlite3.connect(world.database, isolation_level=None, timeout=30)) as other:
        other.execute("BEGIN EXCLUSIVE")
        ends = time.monotonic() + chance.choice([0.5, 2.5]) * BUSY_S
        serves(world, training)
        acknowledged = paused(world)
        while time.monotonic() < ends:
            serves(world, training)
        other.execute("ROLLBACK")
    serves(world, training)
    assert acknowledged or paused(world) or world.acknowledge()["run"]["notices"]
    training.end()
    daemon.end()
    assert is_kept(world, "pause") >= acknowledged
    world.look()


def spoilt(database: Path, chance: random.Random) -> None:
    """Write garbage into it, in place; the beginning or what comes after it."""
    size = database.stat().st_size
    with database.open("r+b") as file:
        for _ in range(chance.randrange(1, 6)):
            file.seek(chance.choice([0, chance.randrange(size)]))
            file.write(chance.randbytes(chance.randrange(64, 8192)))


@pytest.mark.usefixtures("every_fault")
def test_it_becomes_garbage(stage: Callable[..., Stage], chance: random.Random) -> None:
    world = stage()
    daemon, training = world.daemon(), world.train(most=12)
    at_work(world, training, chance)
    spoilt(world.database, chance)
    paused(world)
    training.goes_on(60)
    serves(world, training)
    training.end()
    daemon.end()
    assert world.database.stat().st_size > 0  # nobody throws away what may be rescued
    daemon, later = world.daemon(), world.train()
    world.freeze(later)
    later.end()
    daemon.end()
    world.look_at_leftovers(readable=False)
