"""What may happen to a run between its steps: random changes of the live knobs, groups that join, flushes."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from tests.support.zenflow.case_data import Case, Happening
from zenflow.config import LIVE_KNOBS, ZenFlowConfig
from zenflow.errors import ConfigError

SPLIT = ("topk_ratio", "offload_ratio")
VALUES: dict[str, list[Any]] = {
    "topk_ratio": [0.0, 0.1, 0.25, 0.4, 0.6, 1.0],
    "offload_ratio": [1.0, 1.0, 0.9, 0.75, 0.5, 0.2, 0.0],
    "update_interval": [1, 2, 3, 4, 5, 7, "auto"],
    "select_interval": [1, 1, 2, 3, 5, "auto"],
    "apply_lag": [None, 1, 2, 3, 5],
    "deferred_update": ["replay", "mean"],
    "look_ahead": ["none", "coast", "guess", "guess"],
    "window_phase": ["together", "staggered"],
    "overlap_step": [True, True, False],
    "pipeline": ["bucket", "none"],
    "auto_ratio": [0.0, 0.5, 0.99, 1.0],
    "max_update_interval": [1, 2, 3, 5, 9],
    "max_grad_norm": [None, 0.7, 30.0],
    "skip_nonfinite": [True, False],
    "host_threads": [None, 1, 2],
    "pt_reserved_cores_perc": [0.25, 0.5, 0.75],
}
assert VALUES.keys() == set(LIVE_KNOBS)


def draw_knobs(rng: random.Random, config: ZenFlowConfig, names: Sequence[str] = tuple(VALUES)) -> dict[str, Any]:
    """A change of one to four live knobs that this configuration allows. names: the knobs to choose from."""
    while True:
        knobs = {name: rng.choice(VALUES[name]) for name in rng.sample(names, min(len(names), rng.randint(1, 4)))}
        try:
            config.changed(knobs)
        except ConfigError:  # a lag beyond the window, a prediction beside the mean
            continue
        return knobs


def live_knobs(config: ZenFlowConfig) -> dict[str, Any]:
    """All knobs that may change while it trains."""
    return {name: getattr(config, name) for name in LIVE_KNOBS}


def with_changes(rng: random.Random, case: Case, *, share: float = 0.25, fixed: Sequence[str] = ()) -> Case:
    """The case with knobs changed after about that share of its steps, now and then twice, or with a flush behind.

    fixed: knobs that stay.
    """
    held = {*fixed, "skip_nonfinite"} if case.nonfinite_at else set(fixed)
    names = [name for name in VALUES if name not in held]
    config = case.config.resolved()
    between: list[Happening] = []
    for step in range(case.steps + 1):
        for _ in range(rng.choice([0] * round(2 / share) + [1, 2])):
            knobs = draw_knobs(rng, config, names if rng.random() < 0.7 else [n for n in SPLIT if n in names] or names)
            config = config.changed(knobs)
            between.append((step, "knobs", knobs))
            if rng.random() < 0.2:
                between.append((step, "flush", None))
    return merged(case, between)


def with_joins(rng: random.Random, case: Case) -> Case:
    """The case with one or two of its three groups added in mid-run; some parameters are there before."""
    groups = rng.choice([[1], [2], [2, 1]])
    if all(param.group in groups for param in case.params):
        groups = [group for group in (0, 1, 2) if group != case.params[0].group]
    joins: list[Happening] = [(rng.randint(0, case.steps), "join", group) for group in groups]
    return replace(merged(case, joins), grows=rng.random() < 0.3)


def with_auto(rng: random.Random, case: Case) -> Case:
    """The case with one of the two intervals "auto", or both."""
    which = rng.choice(["update", "select", "both", "both"])
    knobs: dict[str, Any] = {}
    if which != "select":
        coasts = "none" if case.config.look_ahead == "none" else "coast"
        knobs |= {
            "update_interval": "auto",
            "window_phase": "together",
            "look_ahead": coasts,
            "auto_ratio": rng.choice(VALUES["auto_ratio"]),
        }
        knobs["max_update_interval"] = rng.choice([1, 2, 4, 6, 9])
        knobs["apply_lag"] = rng.choice([None, *range(1, knobs["max_update_interval"] + 1)])
    if which != "update":
        knobs |= {"select_interval": "auto", "topk_ratio": rng.choice([case.config.topk_ratio, 0.7, 0.9])}
    return replace(case, config=replace(case.config, **knobs))


def merged(case: Case, more: Sequence[Happening]) -> Case:
    """The case with these happenings after those of the same step that it has."""
    return replace(case, between=tuple(sorted([*case.between, *more], key=lambda happening: happening[0])))
