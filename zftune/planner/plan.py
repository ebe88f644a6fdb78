"""A plan as a document: what was asked, what is proposed, what else there is, and step times over S."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import zftune
from zenflow import ZenFlowConfig
from zftune.planner.choosing import (
    HEADROOM,
    Choice,
    budget_of,
    choose,
    fits,
    limits,
)
from zftune.planner.facts import Job, Machine, ModelFacts, Prediction
from zftune.planner.memory import host_bytes
from zftune.planner.predicting import predict
from zftune.planner.rates import Rates
from zftune.planner.simulate import simulate
from zftune.planner.split import split_of

SCHEMA = "zftune.plan/1"
BASELINES = {
    "no_offload": ZenFlowConfig.zero_offload(offload_ratio=0.0, pipeline="bucket"),
    "zero_offload": ZenFlowConfig.zero_offload(),
}
_SMALLEST = ZenFlowConfig.zero_offload(pipeline="bucket")
_CURVE_TOPK, _CURVE_RATIOS, _CURVE_S = (0.0, 0.05, 0.1, 0.2), (1.0, 0.5), (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 20, 24)
_CURVE_PIECES = 32
_ALTERNATIVES = 4
_KNOBS = (
    "topk_ratio",
    "update_interval",
    "apply_lag",
    "offload_ratio",
    "overlap_step",
    "pipeline",
    "select_interval",
    "deferred_update",
    "stream",
    "bucket_bytes",
    "staging_bytes",
)


def make_plan(
    model: ModelFacts, machine: Machine, job: Job, *, quality: str, headroom: float = HEADROOM
) -> dict[str, Any]:
    """The plan for a model on a machine.

    Args:
        model: what is trained.
        machine: where.
        job: batch and ranks.
        quality: "exact", "published" or "loose"; with the assumed coverage, since none is measured.
        headroom: share of device and host memory that stays free.

    Returns:
        A document of plain data; "proposal" is null where nothing fits.

    Raises:
        BadInputError: the machine has fewer GPUs than the job.
    """
    budget = budget_of(quality)
    found = choose(model, machine, job, budget=budget, memory_headroom=headroom)
    baselines = {name: predict(model, machine, job, config) for name, config in BASELINES.items()}
    smallest = predict(model, machine, job, _SMALLEST)
    device, host = limits(machine, headroom)
    return {
        "schema": SCHEMA,
        "zftune": zftune.__version__,
        "model": _model(model),
        "machine": _machine(machine),
        "job": dataclasses.asdict(job),
        "quality": {"name": quality, "budget": budget, "coverage": "assumed: 88.9% of the energy in the top 1%"},
        "limits": {"device_bytes": round(device), "host_bytes": round(host), "headroom": headroom},
        "proposal": _setting(*found[0], machine, headroom) if found else None,
        "alternatives": [_setting(*choice, machine, headroom) for choice in found[1 : 1 + _ALTERNATIVES]],
        "baselines": {
            name: _setting(BASELINES[name], prediction, machine, headroom) for name, prediction in baselines.items()
        },
        "least": _setting(_SMALLEST, smallest, machine, headroom),
        "verdict": [*verdict(found, baselines, smallest, machine, headroom), *of_ranks(model, job, found, host)],
        "curves": None,
    }


def curves(model: ModelFacts, machine: Machine, job: Job) -> list[dict[str, Any]]:
    """Step time over S for several k and ratios, each windows that overlap with lag S; memory is not looked at."""
    rates = Rates.of(model, machine, job)
    found = []
    for ratio in _CURVE_RATIOS:
        for topk in _CURVE_TOPK:
            steps = []
            for window in _CURVE_S:
                config = ZenFlowConfig(topk_ratio=topk, offload_ratio=ratio, update_interval=window)
                steps.append(simulate(rates, split_of(model, config, pieces=_CURVE_PIECES), config).step_ms)
            found.append(
                {"topk_ratio": topk, "offload_ratio": ratio, "update_interval": list(_CURVE_S), "step_ms": steps}
            )
    return found


def verdict(
    found: Sequence[Choice],
    baselines: dict[str, Prediction],
    smallest: Prediction,
    machine: Machine,
    headroom: float = HEADROOM,
) -> list[str]:
    """What to do, in sentences; the first one is the answer."""
    without, zero = baselines["no_offload"], baselines["zero_offload"]
    whole = fits(without, machine, headroom)
    if not found:
        return [_nothing_fits(smallest, machine, headroom)]
    config, best = found[0]
    if config.offload_ratio == 0:
        return ["Do not offload: all state fits on the GPU, and no other setting is more than 2% faster."]
    sentences = [f"{_named(config)}: {best.step_ms:,.0f} ms a step, bound by {best.bound_by}{_stall(best)}."]
    gain = zero.step_ms / best.step_ms
    sentences.append(
        f"That is {gain:.1f} times as fast as ZeRO-Offload; the mean staleness is {best.staleness_steps:.1f} steps."
    )
    if whole:
        slower = without.step_ms / best.step_ms - 1
        sentences.append(
            f"Without offloading it would fit too, at {without.step_ms:,.0f} ms a step ({slower:+.0%}) "
            "and without staleness: offload only if you want the GPU's memory for something else."
        )
    elif without.memory.device_bytes > machine.device_memory_bytes:
        need = without.memory.device_bytes / 2**30
        sentences.append(f"Without offloading it would need {need:,.0f} GiB of each GPU, which it does not have.")
    return sentences


def of_ranks(model: ModelFacts, job: Job, found: Sequence[Choice], host: float) -> list[str]:
    """How several ranks share the model, and what they need that do not, in sentences.

    Args:
        model: what is trained.
        job: batch and ranks.
        found: what was chosen, the best first.
        host: bytes of host memory that may be used.
    """
    if job.ranks == 1:
        return []
    config = found[0][0] if found else _SMALLEST
    need = job.gpus * sum(host_bytes(model, config).values())
    fit = "fits" if need <= host else "does not fit"
    gathered = "gathered again for backward" if job.reshard else "kept until backward"
    shared = (
        f"This is for {job.ranks} ranks{_on_nodes(job)} over PyTorch's FSDP2 ({_sharded(job)}), each with its rows of "
        f"every weight; layers are {gathered}."
    )
    replicated = (
        "Ranks that are not sharded, as under DistributedDataParallel or below stage 3, hold all of the state each: "
        f"{need / 2**30:,.1f} GiB of host memory of a machine, which {fit}. Each of them keeps every gradient until "
        f"step(), and sends and updates all: {job.gpus} times the work of link and host."
    )
    return [shared, replicated]


def _sharded(job: Job) -> str:
    if job.replicas == 1:
        return "fully_shard of each layer and of the model; ZeRO stage 3 with zftune run"
    mesh = f"a mesh of {job.replicas} by {job.shards}"
    return f"HSDP: fully_shard of each layer and of the model over {mesh}, so that each machine has all rows"


def _on_nodes(job: Job) -> str:
    return "" if job.nodes == 1 else f" on {job.nodes} machines with a network of {job.network_gbps:g} GB/s each way"


def _nothing_fits(smallest: Prediction, machine: Machine, headroom: float) -> str:
    device, host = limits(machine, headroom)
    need = smallest.memory
    missing = []
    if need.device_bytes > device:
        first = " (in the first step, which keeps every gradient)" if not need.device_by_use["activations"] else ""
        missing.append(f"{need.device_bytes / 2**30:,.1f} GiB of GPU memory{first}, usable are {device / 2**30:,.1f}")
    if need.host_bytes > host:
        missing.append(f"{need.host_bytes / 2**30:,.1f} GiB of host memory, usable are {host / 2**30:,.1f}")
    what = "; ".join(missing) or "more memory than there is, with any window"
    return f"Nothing fits: even with all state on the host a step needs {what}. Try --checkpointing or a smaller batch."


def _named(config: ZenFlowConfig) -> str:
    if config.overlap_step:
        name = f"topk_ratio {config.topk_ratio:g}, update_interval {config.update_interval}, apply_lag {config.lag}"
    else:
        name = f"topk_ratio {config.topk_ratio:g}, each step synchronous"
    return name if config.offload_ratio == 1 else f"{name}, offload_ratio {config.offload_ratio:g}"


def _stall(prediction: Prediction) -> str:
    share = prediction.stall_ms / prediction.step_ms if prediction.step_ms else 0.0
    if share < 0.005:
        return ", without a stall worth naming"
    cause = max(prediction.stall_ms_by_cause, key=lambda name: prediction.stall_ms_by_cause[name])
    return f", {share:.0%} of it stall (most for {cause})"


def _model(model: ModelFacts) -> dict[str, Any]:
    names = ("name", "parameters", "trainable", "layers", "hidden", "dtype")
    return {**{name: getattr(model, name) for name in names}, "weights": len(model.weights)}


def _machine(machine: Machine) -> dict[str, Any]:
    return {**dataclasses.asdict(machine), "source": dict(machine.source)}


def _setting(config: ZenFlowConfig, prediction: Prediction, machine: Machine, headroom: float) -> dict[str, Any]:
    memory = dataclasses.asdict(prediction.memory)
    return {
        "knobs": {name: getattr(config, name) for name in _KNOBS} | {"apply_lag": config.lag},
        "step_ms": prediction.step_ms,
        "compute_ms": prediction.compute_ms,
        "stall_ms_by_cause": dict(prediction.stall_ms_by_cause),
        "loads_ms": dict(prediction.loads_ms),
        "host_utilisation": prediction.host_utilisation,
        "staleness_steps": prediction.staleness_steps,
        "s_min": prediction.s_min,
        "bound_by": prediction.bound_by,
        "memory": memory,
        "fits": fits(prediction, machine, headroom),
    }
