"""The planner's answer for one setting: time, stall, memory."""

from __future__ import annotations

from dataclasses import replace

from zenflow import ZenFlowConfig
from zftune.errors import BadInputError
from zftune.planner.closed_form import floor, mean_staleness
from zftune.planner.facts import Job, Machine, ModelFacts, Prediction
from zftune.planner.memory import memory
from zftune.planner.rates import Rates
from zftune.planner.simulate import simulate
from zftune.planner.split import split_of

_SLOWER_LINK = 0.8
"""Memory is planned for a link of this share of its rate: gradients then wait for it longer."""
_PACKED_BUCKETS = 2


def predict(
    model: ModelFacts, machine: Machine, job: Job, config: ZenFlowConfig, *, rates: Rates | None = None
) -> Prediction:
    """Predict one setting.

    Args:
        model: what is trained.
        machine: where.
        job: batch, and how many of the machine's GPUs.
        config: the knobs; `update_interval` "auto" is taken as its longest window.
        rates: other ones than those that follow from machine and job.

    Raises:
        BadInputError: the machine has fewer GPUs than the job.
    """
    if job.gpus > machine.gpus:
        raise BadInputError(f"--gpus {job.gpus}: allowed are 1 to {machine.gpus}, which {machine.name} has")
    rates = rates or Rates.of(model, machine, job)
    split = split_of(model, config)
    least, steady = floor(rates, split, config), simulate(rates, split, config)
    slower = steady
    if split.deferred and config.stream:
        slower = simulate(replace(rates, d2h_gbps=_SLOWER_LINK * rates.d2h_gbps), split, config)
    most = rates.element_bytes * split.deferred / rates.ranks
    packed = min(most, slower.packed_bytes + _PACKED_BUCKETS * rates.element_bytes * split.largest_bucket)
    return Prediction(
        step_ms=steady.step_ms,
        compute_ms=steady.compute_ms,
        stall_ms_by_cause=steady.stall_ms,
        host_utilisation=steady.host_utilisation,
        memory=memory(model, job, config, packed=packed, arrived=steady.arrived_bytes),
        s_min=least.s_min,
        bound_by=least.bound_by,
        loads_ms=least.loads_ms,
        staleness_steps=mean_staleness(split, config),
    )
