"""Staggered windows: which bucket closes when, what that evens out, and what is refused.

That runs with them are the oracle's to a bit is tested with all other knobs (test_invariants, test_scripts).
"""

from __future__ import annotations

import copy
import random
import re
from typing import Any

import pytest
import torch
from torch import nn

from tests.support.seeds import fresh_seeds
from zenflow import CheckpointError, ConfigError, ZenFlowAdamW, ZenFlowConfig
from zenflow.schedule import WindowClock, log_bytes

STAGGERED: dict[str, Any] = {"window_phase": "staggered", "host_threads": 1}


def closes(config: ZenFlowConfig, buckets: int, steps: int) -> list[dict[int, tuple[int, int]]]:
    """By step and closing bucket, the window's steps and the step after which it shows."""
    clock, found = WindowClock(config), []
    for _ in range(steps):
        plan = clock.advance()
        windows = {b: plan.window(b, buckets, config.lag) for b in range(buckets)}
        found.append({b: (one.steps, one.due) for b, one in windows.items() if one is not None})
        if plan.closes:
            clock.close()
    return found


def test_each_bucket_closes_in_a_step_of_its_own() -> None:
    found = closes(ZenFlowConfig(update_interval=4, **STAGGERED), buckets=4, steps=8)
    assert found == [
        {1: (1, 2)},
        {2: (2, 3)},
        {3: (3, 4)},
        {0: (4, 5)},
        {1: (4, 6)},
        {2: (4, 7)},
        {3: (4, 8)},
        {0: (4, 9)},
    ]


@pytest.mark.parametrize("seed", fresh_seeds("window phase", 20))
def test_every_gradient_is_in_one_window_of_its_bucket(seed: int) -> None:
    rng = random.Random(seed)
    interval, buckets, warm = rng.randint(1, 9), rng.randint(1, 20), rng.choice([0, 0, 2])
    lag = rng.choice([None, *range(1, interval + 1)])
    config = ZenFlowConfig(update_interval=interval, apply_lag=lag, full_warm_up_rounds=warm, **STAGGERED)
    last, shown = dict.fromkeys(range(buckets), 0), dict.fromkeys(range(buckets), 0)
    for step, windows in enumerate(closes(config, buckets, 4 * interval + warm), start=1):
        for bucket, (steps, due) in windows.items():
            assert last[bucket] + steps == step
            assert step + (step > warm) <= due <= step + config.lag
            assert shown[bucket] <= step
            last[bucket], shown[bucket] = step, due
    assert min(last.values()) > 3 * interval + warm - interval


@pytest.mark.parametrize("seed", fresh_seeds("window phase", 20))
def test_the_log_has_room_for_the_most_that_is_open(seed: int) -> None:
    rng = random.Random(seed)
    interval, buckets = rng.randint(1, 9), rng.randint(1, 20)
    config = ZenFlowConfig(update_interval=interval, **STAGGERED)
    sizes = [rng.randint(1, 100) for _ in range(buckets)]
    held, most = [0] * buckets, 0
    for windows in closes(config, buckets, 5 * interval):
        held = [one + 1 for one in held]
        most = max(most, sum(steps * size for steps, size in zip(held, sizes, strict=True)))
        held = [0 if bucket in windows else one for bucket, one in enumerate(held)]
    planned = log_bytes(config, [*enumerate(sizes)], buckets)
    assert planned == most + interval * max(sizes)
    assert planned <= log_bytes(ZenFlowConfig(update_interval=interval), [*enumerate(sizes)], buckets)


def trained(knobs: dict[str, Any], steps: int) -> tuple[list[nn.Parameter], ZenFlowAdamW]:
    generator = torch.Generator().manual_seed(3)
    weights = [nn.Parameter(torch.randn(8, 40, generator=generator)) for _ in range(8)]
    config = ZenFlowConfig(**{"update_interval": 4, "bucket_bytes": 8 * 4 * 40, **STAGGERED, **knobs})
    optimizer = ZenFlowAdamW(weights, config=config)
    for _ in range(steps):
        for weight in weights:
            weight.grad = torch.randn(8, 40, generator=generator)
        optimizer.step()
    return weights, optimizer


def test_link_and_host_have_as_much_to_do_in_every_step() -> None:
    _, optimizer = trained({"topk_ratio": 0.0}, 24)
    steps = optimizer.history(wait=True)[8:20]
    assert {one.h2d_bytes for one in steps} == {2 * 8 * 40 * 4}  # two of eight weights
    assert {one.host_elements for one in steps} == {2 * 8 * 40}
    assert [one.step for one in steps if one.closed] == [12, 16, 20]
    optimizer.close()
    _, together = trained({"topk_ratio": 0.0, "window_phase": "together"}, 24)
    assert sum(one.h2d_bytes for one in together.history(wait=True)[8:20]) == sum(one.h2d_bytes for one in steps)
    together.close()


def test_a_selection_reaches_each_bucket_at_its_own_close() -> None:
    knobs = {"topk_ratio": 0.25, "select_interval": 9, "update_interval": 3, "bucket_bytes": 8 * 4 * 10}
    weights, optimizer = trained(knobs, 9)
    windows = optimizer._training.model.windows
    (third,) = [one for one in optimizer._training.model.weights if one.parameter is weights[2]]
    tier = third.deferred
    assert tier is not None
    assert [part.index * 3 // windows.buckets for part in tier.parts] == [0, 0, 1]
    loud = torch.ones(8, 40)
    loud[:, tier.slot_columns[[3, 12, 13, 27]]] = 9
    moved = {}
    for step in (10, 11, 12, 13):
        before = tier.slot_columns.clone()
        for weight in weights:
            weight.grad = loud
        optimizer.step()
        changed = before != tier.slot_columns
        moved[step] = [bool(changed[part.slots.start : part.slots.stop].any()) for part in tier.parts]
    assert moved == {10: [False] * 3, 11: [False] * 3, 12: [True, True, False], 13: [False, False, True]}
    assert not third.pending
    optimizer.close()


def test_fewer_late_steps_than_together() -> None:
    staleness = {}
    for phase in ("together", "staggered"):
        _, optimizer = trained({"topk_ratio": 0.0, "window_phase": phase}, 40)
        steps = [one for one in optimizer.history(wait=True)[16:32] if one.host_elements]
        late = [one.staleness_mean_steps * one.host_elements for one in steps if one.staleness_mean_steps is not None]
        staleness[phase] = sum(late) / sum(one.host_elements for one in steps)
        optimizer.close()
    assert staleness == {"together": 4.0, "staggered": 2.5}


@pytest.mark.parametrize("other", [{"update_interval": "auto"}, {"deferred_update": "mean"}], ids=str)
def test_what_does_not_go_with_it_is_refused(other: dict[str, Any]) -> None:
    ((name, value),) = other.items()
    with pytest.raises(ConfigError, match=re.escape(f'it must be "together" with {name} "{value}"')):
        ZenFlowConfig(**STAGGERED, **other)


def test_a_damaged_count_of_logged_gradients_is_refused() -> None:
    weights, optimizer = trained({"topk_ratio": 0.1, "bucket_bytes": 8 * 4 * 10}, 6)
    saved = optimizer.state_dict()
    optimizer.close()
    header = saved["param_groups"][0]["zenflow"]
    for good, bad in ((r'"logged": \[[0-9, ]+\]', '"logged": [9, 9]'), (r'"logged": \[[0-9, ]+\]', '"logged": []')):
        damaged = copy.deepcopy(saved)
        damaged["param_groups"][0]["zenflow"] = re.sub(good, bad, header, count=1)
        assert damaged["param_groups"][0]["zenflow"] != header
        other = ZenFlowAdamW([nn.Parameter(one.detach().clone()) for one in weights], config=ZenFlowConfig(**STAGGERED))
        with pytest.raises(CheckpointError, match="does not tell which gradients each of its buckets has logged"):
            other.load_state_dict(damaged)
        other.close()
