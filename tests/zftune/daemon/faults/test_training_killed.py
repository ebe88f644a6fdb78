"""A training is killed in every state of its search, on one store: what was in flight is not tried again."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from typing import Any

from tests.tiers import by_day
from tests.zftune.daemon.faults.stage import Stage, Training, until

STATES = ("warming", "baseline", "searching", "confirming", "frozen", "paused")
KILLED_IN = by_day(("baseline", "searching", "frozen"), all_of=STATES)
LEASE_S = 1.5


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
        training.until(lambda now: now["role"] == "explore" or world.state() == "frozen")  # in the midst of a trial
    return run


def ended(world: Stage, run: str) -> bool:
    states = {one["run"]: one["state"] for one in world.client.get("/v1/runs")}
    return bool(states[run] == "ended")


def test_it_is_killed_in_every_state(stage: Callable[..., Stage], chance: random.Random) -> None:
    world, crashed, seen = stage(), [], []
    daemon = world.daemon(lease_s=LEASE_S)
    for state in chance.sample(KILLED_IN, len(KILLED_IN)):
        # Not stopped by hand: then its agent says goodbye.
        training = world.train(most=2 if state == "frozen" else 8)
        run = comes_to(world, training, state)
        time.sleep(chance.uniform(0, 0.1))
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
    assert len(set(seen) & set(STATES)) >= by_day(2, all_of=4), seen
    world.look()


def was_tried(world: Stage, training: Training, crashed: list[dict[str, Any]]) -> None:
    """What it ran when it was killed is marked, unless it is what it would have gone back to, or was just measured."""
    changes = training.changes
    if changes:
        last, first = changes[-1][1], world.trials()[0][1]
        assert last == first or last in crashed or last in world.adopted() or training.is_through
