"""The planner as a search sees it: how long a setting takes, and whether it fits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from zenflow import CoverageCurve, ZenFlowConfig
from zenflow.host.limits import available_host_bytes
from zftune.emulation import Rig
from zftune.planner.choosing import choose, limits
from zftune.planner.closed_form import predict
from zftune.planner.machine import UNLIMITED, machine_of
from zftune.planner.memory import state_bytes
from zftune.planner.model import Job, Machine, ModelFacts
from zftune.planner.rates import Rates
from zftune.quality import assumed_coverage
from zftune.tuner.space import TOPK_RATIOS, Coverage, Forecast, Setting, Space

if TYPE_CHECKING:
    from zftune.tuner.setup import WorldInfo


_KNOTS = (0.005, 0.015, 0.03, 0.075, 0.25, 0.5, 0.6, 0.75, 1.0)


@dataclass(frozen=True, slots=True)
class PlannerForecast:
    """Predictions for one model, machine and job.

    Args:
        counted: whether device memory is only counted, as on an emulated accelerator: no allocator rounds it then.
    """

    model: ModelFacts
    machine: Machine
    job: Job
    rates: Rates
    base: ZenFlowConfig
    counted: bool = False

    def __call__(self, setting: Setting) -> Forecast:
        config = setting.config(self.base)
        found = predict(self.model, self.machine, self.job, config, rates=self.rates)
        device, host = limits(self.machine)
        needs = found.memory.device_bytes / device, (found.memory.host_bytes + found.memory.migration_bytes) / host
        excess, place = max(zip(needs, ("GPU", "host"), strict=True))
        ranks = self.job.ranks
        on_device = state_bytes(self.model, config, ranks=ranks) if self.counted else found.memory.device_bytes
        bytes_of = (on_device, found.memory.host_bytes // self.job.gpus)  # of a rank
        if excess <= 1:
            return Forecast(found.step_ms, *bytes_of)
        return Forecast(found.step_ms, *bytes_of, excess - 1, f"it needs {excess:.2f} times the usable {place} memory")

    def planned(self, space: Space, *, least_ratio: float) -> list[Setting]:
        """The planner's choices within a space, best first; an offload ratio below `least_ratio` would take more GPU
        memory.
        """
        choices = choose(
            self.model,
            self.machine,
            self.job,
            budget=space.budget,
            coverage=space.coverage,
            rates=self.rates,
        )
        kept = ("select_interval", "deferred_update", "host_threads")
        own = {name: getattr(space.base, name) for name in kept}
        settings = (replace(Setting.of(config), **own) for config, _ in choices if config.offload_ratio >= least_ratio)
        return [setting for setting in dict.fromkeys(settings) if space.violation(setting) is None]


def forecast_for(
    model: ModelFacts, machine: Machine, job: Job, base: ZenFlowConfig, *, company: WorldInfo, rig: Rig | None = None
) -> PlannerForecast:
    """The planner for a training on one rank or several.

    Ranks that share weights by rows, or their state alone, are one job of the planner's, and have their part of what
    all ranks of a machine share. Where they share nothing, each is a job. `rig`: each rank has one.
    """
    gpus = min(company.shards, company.here)
    job = replace(job, gpus=gpus, nodes=-(-company.shards // gpus), stage=2 if company.keeps_whole else 3)
    share = gpus / company.here
    machine = replace(
        machine,
        gpus=gpus,
        host_gbps=machine.host_gbps * share,
        host_update_gelements_s=machine.host_update_gelements_s * share,
        host_memory_bytes=int(machine.host_memory_bytes * share),
    )
    if rig is not None:
        replicas = company.ranks // company.shards if company.shards > 1 else 1
        rates = Rates.of_rig(rig, model.element_bytes, ranks=job.ranks, replicas=replicas, keeps_whole=job.keeps_whole)
        return PlannerForecast(model, machine, job, rates, base, counted=True)
    rates = Rates.of(model, machine, job)
    if job.compute_ms is not None:  # what was measured has the ranks' collectives in it
        rates = replace(rates, comm_gbps=None)
    return PlannerForecast(model, machine, job, rates, base)


def rig_machine(rig: Rig) -> Machine:
    """An emulated accelerator as a machine: its rates, and this host's memory."""
    host_bytes = available_host_bytes() or UNLIMITED
    return machine_of(rig.name, "emulated accelerator", Rates.of_rig(rig), host_memory_bytes=host_bytes)


@dataclass(frozen=True, slots=True)
class MeasuredCoverage:
    """Coverage at some ratios, and between them on straight lines. Plain data, so that it can be sent."""

    ratios: tuple[float, ...]
    shares: tuple[float, ...]

    def __call__(self, topk_ratio: float) -> float:
        return float(np.interp(topk_ratio, self.ratios, self.shares))


def measured_coverage(curves: Sequence[CoverageCurve], ratios: Sequence[float] = ()) -> tuple[Coverage, str]:
    """Coverage for every k from the live model's selections, exact at `ratios`, and where it comes from, in words."""
    curves = [curve for curve in curves if curve.at(1.0) is not None]
    if not curves:
        return assumed_coverage, "assumed: nothing was selected that could be measured"
    knots = tuple(sorted({*TOPK_RATIOS, *_KNOTS, *ratios}))
    shares = tuple(sum(curve.at(knot) or 0.0 for curve in curves) / len(curves) for knot in knots)
    count = "1 selection" if len(curves) == 1 else f"{len(curves)} selections"
    return MeasuredCoverage(knots, shares), f"measured on the live model in {count}"
