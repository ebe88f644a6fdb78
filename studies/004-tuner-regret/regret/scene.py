"""A rig, the settings that may be proposed on it, and what the planner thinks of them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property

import torch

from zenflow import ZenFlowConfig
from zftune.emulation import RigSpec
from zftune.emulation.machines import load_rig
from zftune.planner.choosing import ranked
from zftune.planner.closed_form import predict
from zftune.planner.machine import rig_machine
from zftune.planner.model import Job, ModelFacts
from zftune.planner.rates import Rates
from zftune.profile.measure import Task
from zftune.quality import assumed_coverage
from zftune.tuner.setup import PlannerForecast
from zftune.tuner.space import PUBLISHED, Dimension, Forecaster, Setting, Space
from zftune.workload import load_text

RIGS: Mapping[str, str] = {
    "device-bound": "compute-bound",
    "host-heavy": "host-bound",
    "slow-core": "host-bound, a slow core",
    "link-bound": "link-bound",
    "noisy-link": "link-bound, a noisy link",
    "contended": "balanced, contention",
}
MODEL = "tiny"
SEQUENCE = 32
BASE = ZenFlowConfig(topk_ratio=0.1, update_interval=4, select_interval=1 << 20)
"""What the user has: the published setting. Selections stay as they are, so that a grid point has one time."""
START = replace(PUBLISHED, select_interval=BASE.select_interval)
_DIMENSIONS = (
    Dimension("topk_ratio", (0.05, 0.1, 0.2, 0.3)),
    Dimension("update_interval", (1, 2, 3, 4, 6)),
    Dimension("lag_share", (0.0, 1.0)),
    Dimension("offload_ratio", (0.85, 1.0)),
)


def space() -> Space:
    """The grid, within the published quality."""
    free = Space(base=START, quality="published", dimensions=_DIMENSIONS, budget=0.0, coverage=assumed_coverage)
    return replace(free, budget=free.cost(START))


SETTINGS: Sequence[Setting] = tuple(space().settings())
"""The feasible ones."""


@cache
def scene_of(rig: str) -> Scene:
    """One rig's scene, the same for all searches of this process."""
    return Scene(rig)


@dataclass(frozen=True)
class Scene:
    """One rig.

    Args:
        rig: its name.
    """

    rig: str

    @cached_property
    def spec(self) -> RigSpec:
        """The rig's file."""
        return load_rig(self.rig)

    @cached_property
    def base(self) -> ZenFlowConfig:
        """The user's, with as many buckets as the large model has that the rig stands for."""
        return self.task().scaled(BASE)

    @cached_property
    def forecast(self) -> PlannerForecast:
        """The planner, which knows the rig's rates and nothing of its effects."""
        model = ModelFacts.from_name(MODEL)
        elements = sum(math.prod(shape) for shape in model.weights if len(shape) > 1)
        rig = self.spec.for_elements(elements)
        job = Job(seq=SEQUENCE, micro_batch=1)
        return PlannerForecast(model, rig_machine(rig), job, Rates.of_rig(rig, model.element_bytes), self.base)

    @cached_property
    def remembered(self) -> Forecaster:
        """The same, which works out a setting once for all searches of this process."""
        return cache(self.forecast)

    @cached_property
    def planned(self) -> list[Setting]:
        """The planner's order of preference."""
        planner = self.forecast
        found = [
            (config, predict(planner.model, planner.machine, planner.job, config, rates=planner.rates))
            for config in (setting.config(self.base) for setting in SETTINGS)
        ]
        return [Setting.of(config) for config, _ in ranked(found)]

    def task(self) -> Task:
        """What trains on it."""
        return Task(
            model=MODEL,
            corpus=load_text(None),
            dtype=torch.bfloat16,
            micro_batch=1,
            sequence=SEQUENCE,
            seed=0,
            torch_device=torch.device("cpu"),
            rig=self.spec,
            learning_rate=1e-5,  # with which weights move little enough for late updates
        )
