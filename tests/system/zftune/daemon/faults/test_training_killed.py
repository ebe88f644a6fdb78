"""A training is killed in every state of its search, on one store: what was in flight is not tried again."""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Callable
from typing import Any

import pytest

from tests.support.tiers import fast
from tests.support.zftune.daemon.faults.stage import Stage, Training, until

STATES = ("warming", "baseline", "searching", "confirming", "frozen", "paused")
KILLED_IN = fast(("baseline", "searching", "frozen"), all_of=STATES)
LEASE_S = 8.0
"""More than it takes to look at one that was stopped; a death is noticed before."""
MOST = {"searching": 24, "frozen": 2}
"""Measurements of a search: many where one is to be met in the midst of a trial."""


def comes_to(world: Stage, training: Training, state: str) -> dict[str, Any]:
    """Wait until a run is in a state, or has passed it."""
    if state == "paused":
        run = world.until_state("searching", "confirming", training=training)
        world.client.post(f"/v1/runs/{run['run']}/pause")
        return world.until_state("paused", training=training)
    if state == "frozen":
        return world.until_state("frozen", training=training)
    run = world.until_state(*STATES[STATES.index(state) : -1], training=training)
    if state == "searching":
        stopped_in_a_trial(world, training)
    return run


def stopped_in_a_trial(world: Stage, training: Training) -> None:
    """A trial takes 40 ms, and a look at the daemon longer on a busy machine: time stands still until it is killed."""
    while True:
        training.until(lambda now: now["role"] == "explore" or world.state() == "frozen")
        os.kill(training.process.pid or 0, signal.SIGSTOP)
        if training.now()["role"] == "explore" and not training.is_through:
            return
        os.kill(training.process.pid or 0, signal.SIGCONT)
        assert world.state() != "frozen"


def ended(world: Stage, run: str) -> bool:
    states = {one["run"]: one["state"] for one in world.client.get("/v1/runs")}
    return bool(states[run] == "ended")


@pytest.mark.smoke
def test_it_is_killed_in_every_state(stage: Callable[..., Stage], chance: random.Random) -> None:
    world, crashed, seen = stage(), [], []
    daemon = world.daemon(lease_s=LEASE_S)
    for state in chance.sample(KILLED_IN, len(KILLED_IN)):
        # Not stopped by hand: then its agent says goodbye.
        training = world.train(most=MOST.get(state, 8))
        run = comes_to(world, training, state)
        world.acknowledge()
        seen.append(world.state())
        training.kill()
        assert [knobs for _, knobs in training.changes if knobs in crashed] == []
        until(lambda which=run["run"]: ended(world, which), world.log)  # type: ignore[misc]
        crashed = world.crashed()
        was_tried(world, training, crashed)
    last = world.train(most=8)
    world.until_state("confirming", "frozen", training=last)
    last.end()
    daemon.end()
    assert [knobs for _, knobs in last.changes if knobs in crashed] == []
    assert crashed
    assert len(set(seen) & set(STATES)) >= fast(2, all_of=4), seen
    world.look()


def was_tried(world: Stage, training: Training, crashed: list[dict[str, Any]]) -> None:
    """What it ran when it was killed is marked, unless it is what it would have gone back to, or was once measured."""
    changes = training.changes
    if changes:
        last, first = changes[-1][1], world.trials()[0][1]
        assert last == first or last in crashed or last in world.measured() or training.is_through
