"""ZenFlow and Twin-Flow together under a limit of device memory, beside each alone, planned: when does which win?"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from studykit import Job as Measurement
from studykit import code_digest

from claims.rigs import MODEL, NEVER, PLANNED_CODE, rig_inputs, rig_of
from zenflow import ZenFlowConfig
from zftune.emulation.machines import load_rig, rig_names
from zftune.planner.choosing import published_budget
from zftune.planner.closed_form import mean_staleness
from zftune.planner.memory import state_bytes
from zftune.planner.model import ModelFacts
from zftune.planner.rates import Rates
from zftune.planner.simulate import simulate
from zftune.planner.split import split_of
from zftune.quality import assumed_coverage

RATIOS = tuple(number / 20 for number in range(20, 0, -1))
TOPK, INTERVALS = (0.0, 0.02, 0.05, 0.1, 0.2, 0.3), (1, 2, 3, 4, 6)
LIMITS = (0.05, 0.12, 0.25, 0.5, 0.75)
"""Device memory for optimizer state, as a share of what all of it takes."""
NEAR = 1.01
"""What is faster by less is taken for equal."""
CODE = (*PLANNED_CODE, "zftune/planner/choosing.py", "zftune/quality.py", "studies/024-claims/claims/both.py")


def rigs() -> list[str]:
    """Those whose rates say all of them: the planner is not told of effects."""
    return [name for name in rig_names() if not load_rig(name).effects]


@dataclass(frozen=True, slots=True)
class Point:
    """A setting: what it is, its planned step, and the state that it keeps on the device."""

    kind: str
    """"Twin-Flow", "ZenFlow" or "both"."""
    config: ZenFlowConfig
    step_ms: float
    share: float
    """Of all state."""


def job(rig: str) -> Measurement:
    """All limits at one rig's rates."""
    inputs = {
        **rig_inputs(rig),
        "ratios": RATIOS,
        "topk": TOPK,
        "intervals": INTERVALS,
        "limits": LIMITS,
        "code": code_digest(*CODE),
    }
    return Measurement(f"both--{rig}", inputs, figures, (rig,))


def settings() -> Iterator[tuple[str, ZenFlowConfig]]:
    """Everything within the published quality, by kind."""
    budget = published_budget(assumed_coverage)
    model = ModelFacts.from_name(MODEL)
    for ratio in RATIOS:
        yield "Twin-Flow", ZenFlowConfig.zero_offload(offload_ratio=ratio, pipeline="bucket")
        for topk in TOPK:
            for interval in INTERVALS:
                config = ZenFlowConfig(
                    topk_ratio=topk, update_interval=interval, offload_ratio=ratio, select_interval=NEVER
                )
                late = mean_staleness(split_of(model, config), config)
                if (1 - assumed_coverage(topk)) * late <= budget * (1 + 1e-9):
                    yield "ZenFlow" if ratio == 1 else "both", config


def points(rig: str) -> list[Point]:
    """All of them, planned on a rig."""
    model, rates = ModelFacts.from_name(MODEL), Rates.of_rig(rig_of(rig))
    whole = state_bytes(model, ZenFlowConfig.zero_offload(offload_ratio=0.0, pipeline="bucket"))
    return [
        Point(
            kind, config, simulate(rates, split_of(model, config), config).step_ms, state_bytes(model, config) / whole
        )
        for kind, config in settings()
    ]


def best(found: Sequence[Point], kind: str, limit: float) -> Point | None:
    """The fastest of a kind within a limit, of those that are equal the one with least on the device."""
    own = [one for one in found if one.kind == kind and one.share <= limit]
    if not own:
        return None
    fastest = min(one.step_ms for one in own)
    return min((one for one in own if one.step_ms <= NEAR * fastest), key=lambda one: one.share)


def figures(rig: str) -> dict[str, Any]:
    """By limit: the best of each kind, and which wins."""
    torch.set_num_threads(1)
    found = points(rig)
    by_limit = {}
    for limit in LIMITS:
        row = {}
        for kind in ("Twin-Flow", "ZenFlow", "both"):
            one = best(found, kind, limit)
            if one is not None:
                row[kind] = {
                    "step_ms": one.step_ms,
                    "share": one.share,
                    "ratio": one.config.offload_ratio,
                    "topk": one.config.topk_ratio,
                    "interval": one.config.longest_window,
                }
        by_limit[f"{limit:g}"] = {"kinds": row, "wins": winner({kind: one["step_ms"] for kind, one in row.items()})}
    return {"limits": by_limit}


def winner(steps: dict[str, float]) -> str:
    """What is fastest: alone where it is as fast as both together, and Twin-Flow, which is never late, where equal."""
    fastest = min(steps.values())
    order = ("Twin-Flow", "ZenFlow", "both")
    return next(kind for kind in order if kind in steps and steps[kind] <= NEAR * fastest)
