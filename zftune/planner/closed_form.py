"""The closed form: what each resource has to do in a step, the shortest window the host keeps up with, a prediction."""

from __future__ import annotations

from dataclasses import dataclass, replace

from zenflow import ZenFlowConfig
from zftune.errors import BadInputError
from zftune.planner.memory import memory
from zftune.planner.model import Job, Machine, ModelFacts, Prediction
from zftune.planner.rates import Rates, device_work_ms
from zftune.planner.simulate import simulate
from zftune.planner.split import Split, split_of

_SLOWER_LINK = 0.8
"""Memory is planned for a link of this share of its rate: gradients then wait for it longer."""
_PACKED_BUCKETS = 2


def predict(
    model: ModelFacts, machine: Machine, job: Job, config: ZenFlowConfig, *, rates: Rates | None = None
) -> Prediction:
    """Predict one setting; `update_interval` "auto" is taken as its longest window.

    `rates` replace those that follow from machine and job.

    Raises:
        BadInputError: the machine has fewer GPUs than the job.
    """
    if job.gpus > machine.gpus:
        raise BadInputError(
            f"--gpus is {job.gpus}; it must be an integer from 1 to {machine.gpus}, which {machine.name} has: a TOML "
            "file with more is given as --hardware (docs/how-to/plan.md)"
        )
    rates = rates or Rates.of(model, machine, job)
    split = split_of(model, config)
    least, steady = floor(rates, split, config), simulate(rates, split, config)
    slower = steady
    if split.deferred and rates.streams(config):
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


_LONGEST = 4096


@dataclass(frozen=True, slots=True)
class Floor:
    """Lower bounds of a step."""

    loads_ms: dict[str, float]
    """Time a step that each resource needs, whatever overlaps."""
    step_ms: float
    """The largest of them; where nothing overlaps, what follows each other."""
    s_min: int | None
    bound_by: str


def least_window(rates: Rates, deferred: float, compute_ms: float) -> int | None:
    """S_min: the least S with T_host(S) <= S c; None: no window is long enough.

    `deferred` counts elements of a rank; `compute_ms` is c, with the runtime's own kernels.
    """
    if deferred == 0:
        return 1
    # T_host(S) = max(fixed + slope S, S / U): linear in S, so two windows give fixed and slope.
    if rates.host_ms(deferred, _LONGEST) > _LONGEST * compute_ms:
        return None
    low, high = 1, _LONGEST
    while low < high:
        middle = (low + high) // 2
        if rates.host_ms(deferred, middle) <= middle * compute_ms:
            high = middle
        else:
            low = middle + 1
    return low


def floor(rates: Rates, split: Split, config: ZenFlowConfig) -> Floor:
    """Evaluate it for a setting of a rank."""
    window = config.longest_window
    own = split.deferred / rates.ranks
    compute = rates.compute_ms + device_work_ms(rates, split, window, stream=rates.streams(config))
    loads = {
        "compute": compute,
        "d2h": rates.down_ms(own),
        "h2d": rates.up_ms(own) / window,
        "host": rates.host_ms(own, window) / window,
    }
    if thread_ms := rates.thread.step_ms(split, window, rates.accumulation):
        loads["thread"] = thread_ms
    if rates.ranks > 1:
        loads["comm"] = collective_ms(rates, split)
    s_min = least_window(rates, own, compute)
    bound_by = max(loads, key=lambda name: loads[name])
    step = loads[bound_by]
    if rates.ranks > 1 and (rates.keeps_whole or rates.gloo) and compute + loads["comm"] > step:  # one after the other
        step, bound_by = compute + loads["comm"], max("compute", "comm", key=lambda name: loads[name])
    if own and not config.overlap_step:
        alone = compute - rates.scatter_ms(own) / window + (loads["comm"] if rates.keeps_whole else 0.0)
        if config.pipeline == "none":
            step = max(step, alone + loads["host"] + loads["h2d"])
        else:  # forward goes on as far as weights are there
            ahead = 0.0 if rates.keeps_whole else rates.forward_ms / (1 if config.staggers else window)
            step = max(step, alone - ahead + loads["host"])
    return Floor(loads, step, s_min, bound_by)


def collective_ms(rates: Rates, split: Split) -> float:
    """Time a step in collectives: FSDP2 gathers each unit (but the last one again for backward) and reduce-scatters its
    gradients, and the ranks add up the columns' energies. Replicas add up gradients beside that: what takes longer.
    Ranks that have whole weights average all gradients, and gather all weights once.
    """
    if rates.keeps_whole:
        whole = sum(rates.reduce_ms(elements) + rates.gather_ms(elements) for elements in split.exchanged)
        return whole + rates.add_up_ms(split.words)
    gathers = [rates.gather_ms(elements) for elements in split.gathered]
    again = sum(gathers[:-1]) if rates.reshard else 0.0
    reduced = sum(rates.reduce_ms(elements) for elements in split.reduced if elements)
    between = sum(rates.replicate_ms(elements) for elements in split.reduced if elements)
    return max(sum(gathers) + again + reduced, between) + rates.add_up_ms(split.words)


def mean_staleness(split: Split, config: ZenFlowConfig) -> float:
    """Steps from a deferred gradient's production to its application, on average; without pieces as of many buckets."""
    if split.deferred == 0:
        return 0.0
    window = config.longest_window
    in_window = (window - 1) / 2
    if not config.overlap_step:
        return in_window
    if not split.pieces:
        return in_window + (config.lag if config.staggers else (1 + config.lag) / 2)
    return in_window + sum(piece.elements * piece.due for piece in split.pieces) / split.deferred
