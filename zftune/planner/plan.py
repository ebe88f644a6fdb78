"""A plan as a document: what was asked, what is proposed, what else there is, step times over S, and advice."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, takewhile
from typing import Any

import zftune
from zenflow import ZenFlowConfig
from zftune.planner.choosing import (
    HEADROOM,
    NEAR,
    OFFLOAD_RATIOS,
    Choice,
    budget_of,
    choose,
    fits,
    least_gpu,
    limits,
)
from zftune.planner.closed_form import predict
from zftune.planner.memory import host_bytes
from zftune.planner.model import Job, Machine, Memory, ModelFacts, Prediction
from zftune.planner.rates import Rates
from zftune.planner.simulate import simulate
from zftune.planner.split import split_of
from zftune.store.types import Quality
from zftune.text import ms, size, size_up
from zftune.words import CAUSES

SMALLEST = ZenFlowConfig.zero_offload(pipeline="bucket")
"""The setting that needs least of a device's memory."""
_SHORTEST = 256
_ANY_HOST = 1 << 60
_RUN = "zftune run{} -- deepspeed train.py --deepspeed ds_config.json"
_ON_HOST = (
    '"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}} '
    f"into your ds_config: {_RUN.format('')}"
)

Step = tuple[str, Job]
"""An option of the command line, and the job with it."""


@dataclass(frozen=True, slots=True)
class Remedy:
    """An option of the command line with which a model fits a machine."""

    option: str
    device_bytes: int
    """That each GPU then needs."""
    host_bytes: int
    """That the host then needs."""


def of_nothing(model: ModelFacts, machine: Machine, job: Job) -> list[str]:
    """Sentences for a model that does not fit: what is short, by how much, and what would do."""
    device, host = limits(machine)
    need = next(_shares(model, machine, job)).memory
    short, answers = [], []
    most = "all state on the host"
    if fitting := list(_within(device, _shares(model, machine, job))):
        need, most = min(fitting, key=_of_host), "as much state on the GPUs as they hold,"
    on_host = _of_host(need)
    if need.device_bytes > device:
        first = " (in the first step, which keeps every gradient)" if not need.device_by_use["activations"] else ""
        if job.accumulation > 1:
            whole = size(model.element_bytes * model.trainable)
            first = f" ({whole} of that for gradients, which --accumulation {job.accumulation} keeps from pass to pass)"
        over, free = size(need.device_bytes - device), _free(machine.device_memory_bytes, device)
        short.append(f"{over} more of a GPU's memory than the {size(device)} that it may use{free}{first}")
        answers.append(_for_device(model, machine, job))
    if on_host > host:
        over, free = size(on_host - host), _free(machine.host_memory_bytes, host)
        short.append(f"{over} more of the host's memory than the {size(host)} that it may use{free}")
        answers += _for_host(model, machine, job, on_host if fitting else None)
    what = " and ".join(short) or "more memory than there is, with any window"
    return [f"Nothing fits: even with {most} a step needs {what}.", *answers]


def _free(whole: int, limit: float) -> str:
    return f" (of {size(whole)}, {size(whole - limit)} stay free)"


def remedies(model: ModelFacts, machine: Machine, job: Job) -> list[Remedy]:
    """What would let the model fit a machine: single options where one is enough, else each with `--checkpointing`.

    An option that the job has already is not named.
    """
    device, host = limits(machine)

    def enough(ladder: Sequence[Step]) -> Iterator[Remedy]:
        for option, changed in ladder:
            for need in _within(device, _shares(model, machine, changed)):
                if _of_host(need) <= host:
                    yield Remedy(option, need.device_bytes, _of_host(need))
                    return

    ladders = _ladders(machine, job)
    if job.checkpointing:
        return list(chain.from_iterable(map(enough, ladders)))
    recomputing = [("--checkpointing", replace(job, checkpointing=True))]
    alone = list(chain.from_iterable(map(enough, (recomputing, *ladders))))
    both = (
        [(f"--checkpointing {option}", replace(one, checkpointing=True)) for option, one in ladder]
        for ladder in ladders
    )
    return alone or list(chain.from_iterable(map(enough, both)))


def _shares(model: ModelFacts, machine: Machine, job: Job) -> Iterator[Prediction]:
    """The setting that needs least with each share of the state on the host, the largest share first."""
    return (predict(model, machine, job, replace(SMALLEST, offload_ratio=ratio)) for ratio in OFFLOAD_RATIOS)


def _within(device: float, shares: Iterator[Prediction]) -> Iterator[Memory]:
    """What they need, up to the first for which a GPU is too small: a GPU has all the more of those after it."""
    return takewhile(lambda need: need.device_bytes <= device, (one.memory for one in shares))


def _of_host(need: Memory) -> int:
    return need.host_bytes + need.migration_bytes


def _ladders(machine: Machine, job: Job) -> list[list[Step]]:
    """Each option's values, from the least change to the greatest."""
    batches = [(f"--micro-batch {each}", replace(job, micro_batch=each)) for each in _halves(job.micro_batch, 1)]
    lengths = [(f"--seq {each}", replace(job, seq=each)) for each in _halves(job.seq, _SHORTEST)]
    more = [job.gpus * 2**power for power in range(1, machine.gpus.bit_length())]
    gpus = [(f"--gpus {each}", replace(job, gpus=each)) for each in more if each <= machine.gpus]
    rows = [("--stage 3", replace(job, stage=3))] if job.keeps_whole else []
    if job.accumulation > 1:
        return [[("--accumulation 1", replace(job, accumulation=1))], batches, lengths]
    return [batches, lengths, gpus, rows]


def _halves(value: int, least: int) -> list[int]:
    return [value >> power for power in range(1, value.bit_length()) if value >> power >= least]


def _for_device(model: ModelFacts, machine: Machine, job: Job) -> str:
    """What to do where a GPU is too small for any share of the state on the host, and with which host."""
    if found := remedies(model, machine, job):
        return f"What would do: {_listed(found)}."
    roomy = replace(machine, host_memory_bytes=_ANY_HOST)
    if found := remedies(model, roomy, job):
        host = max(one.host_bytes for one in found) / (1 - HEADROOM)
        return f"What would do with {size_up(host)} of host memory in all: {_listed(found)}."
    most = replace(job, gpus=max(job.gpus, machine.gpus), micro_batch=1, checkpointing=True, stage=3)
    need = next(_shares(model, machine, most)).memory
    options = f"{f'--gpus {most.gpus} ' if most.gpus > 1 else ''}--micro-batch 1 --checkpointing"
    options += " --stage 3" if job.keeps_whole else ""
    takes = f"GPUs of {size_up(least_gpu(need.device_bytes))}"
    if _of_host(need) > limits(machine)[1]:
        takes += f" with {size_up(_of_host(need) / (1 - HEADROOM))} of host memory in all"
    on_host = _weights_on_host(model, machine, job)
    return f"Even {options} takes {takes}, and shorter sequences do not help enough. {on_host}"


def _for_host(model: ModelFacts, machine: Machine, job: Job, least: int | None) -> list[str]:
    """Sentences for a host that is too small; `least`: its bytes with these GPUs, None if they are too small too."""
    _, host = limits(machine)
    needs = [one.memory for one in _shares(model, machine, job)]
    gpu = least_gpu(min(need.device_bytes for need in needs if _of_host(need) <= host))
    with_host = f"ith this host each GPU needs {size_up(gpu)}"
    if least is None:
        return [f"W{with_host} of memory in all."]
    found = remedies(model, machine, job)
    return [
        f"With these GPUs the host needs {size_up(least / (1 - HEADROOM))} of memory in all; w{with_host}.",
        *([f"What would do as well: {_listed(found)}."] if found else []),
    ]


def _listed(found: Sequence[Remedy]) -> str:
    return " or ".join(f"{one.option} ({size(one.device_bytes)} of each GPU)" for one in found)


def _weights_on_host(model: ModelFacts, machine: Machine, job: Job) -> str:
    """What else there is where no option makes weights and activations fit a GPU: in sentences, with what it takes."""
    need = next(_shares(model, machine, job)).memory
    weights = model.element_bytes * model.parameters * job.replicas // job.nodes
    needed = (_of_host(need) + weights) / (1 - HEADROOM)
    takes = f"Weights on the host too take less of a GPU, and about {size(needed)} of host memory in all"
    if needed > machine.host_memory_bytes:
        return f"{takes}, of which there are {size(machine.host_memory_bytes)}."
    return f"{takes}; this plan does not predict their speed. To train so, put {_ON_HOST}"


SCHEMA = "zftune.plan/1"
BASELINES = {
    "no_offload": ZenFlowConfig.zero_offload(offload_ratio=0.0, pipeline="bucket"),
    "zero_offload": ZenFlowConfig.zero_offload(),
}
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
    "look_ahead",
    "window_phase",
    "stream",
    "bucket_bytes",
    "staging_bytes",
)


def make_plan(model: ModelFacts, machine: Machine, job: Job, *, quality: Quality) -> dict[str, Any]:
    """The plan for a model on a machine; `quality` with the assumed coverage, since none is measured.

    Returns:
        A document of plain data; "proposal" is null where nothing fits.

    Raises:
        BadInputError: the machine has fewer GPUs than the job.
    """
    budget = budget_of(quality)
    found = choose(model, machine, job, budget=budget)
    baselines = {name: predict(model, machine, job, config) for name, config in BASELINES.items()}
    smallest = predict(model, machine, job, SMALLEST)
    device, host = limits(machine)
    stage = {"stage": job.stage} if job.ranks > 1 else {}  # one rank has the same at any
    return {
        "schema": SCHEMA,
        "zftune": zftune.__version__,
        "model": _model(model),
        "machine": _machine(machine),
        "job": dataclasses.asdict(job),
        "quality": {"name": quality, "budget": budget, "coverage": "assumed: 88.9% of the energy in the top 1%"},
        "limits": {"device_bytes": round(device), "host_bytes": round(host), "headroom": HEADROOM},
        "proposal": _setting(*found[0], machine, stage) if found else None,
        "alternatives": [_setting(*choice, machine, stage) for choice in found[1 : 1 + _ALTERNATIVES]],
        "baselines": {
            name: _setting(BASELINES[name], prediction, machine, stage) for name, prediction in baselines.items()
        },
        "least": _setting(SMALLEST, smallest, machine, stage),
        "verdict": [
            *(verdict(found, baselines, machine) if found else of_nothing(model, machine, job)),
            *of_ranks(model, machine, job, found),
            *(of_thread(found[0][1]) if found else []),
            *([_next_command(found[0][0], quality)] if found else []),
        ],
        "curves": None,
    }


def curves(model: ModelFacts, machine: Machine, job: Job, proposal: Mapping[str, Any] | None) -> list[dict[str, Any]]:
    """Step time over S for several k and ratios, each windows that overlap with lag S; memory is not looked at.

    All of them have the `staging_bytes` of the proposal.
    """
    base = ZenFlowConfig() if proposal is None else ZenFlowConfig(staging_bytes=proposal["knobs"]["staging_bytes"])
    rates = Rates.of(model, machine, job)
    found = []
    for ratio in _CURVE_RATIOS:
        for topk in _CURVE_TOPK:
            steps = []
            for window in _CURVE_S:
                config = dataclasses.replace(base, topk_ratio=topk, offload_ratio=ratio, update_interval=window)
                steps.append(simulate(rates, split_of(model, config, pieces=_CURVE_PIECES), config).step_ms)
            found.append(
                {"topk_ratio": topk, "offload_ratio": ratio, "update_interval": list(_CURVE_S), "step_ms": steps}
            )
    return found


def verdict(
    found: Sequence[Choice],
    baselines: dict[str, Prediction],
    machine: Machine,
) -> list[str]:
    """What to do where something fits, in sentences; the first one is the answer.

    `found` is what fits, the best first.
    """
    without, zero = baselines["no_offload"], baselines["zero_offload"]
    whole = fits(without, machine)
    config, best = found[0]
    if config.offload_ratio == 0:
        fastest = min(one.step_ms for _, one in found)
        most = max(2, math.ceil(100 * (best.step_ms / fastest - 1)))
        return [f"Do not offload: all state fits on the GPU, and no other setting is more than {most}% faster."]
    sentences = [f"{_named(config)}: {ms(best.step_ms)} a step{_bound(best)}{_stall(best)}."]
    gain = zero.step_ms / best.step_ms
    late = f"{best.staleness_steps:.1f} steps late on average" if best.staleness_steps else "on time"
    too_large = "" if fits(zero, machine) else ", which does not fit"
    sentences.append(f"That is {gain:.1f} times as fast as ZeRO-Offload{too_large}; updates come {late}.")
    sentences += _faster(found)
    if whole:
        slower = without.step_ms / best.step_ms - 1
        sentences.append(
            f"Without offloading it would fit too, at {ms(without.step_ms)} a step ({slower:+.0%}) "
            "and without staleness: offload only if you want the GPU's memory for something else."
        )
    elif without.memory.device_bytes > (limit := limits(machine)[0]):
        need, has = size(without.memory.device_bytes), size(machine.device_memory_bytes)
        free = f", {size(machine.device_memory_bytes - limit)} of it to stay free"
        tight = without.memory.device_bytes <= machine.device_memory_bytes
        sentences.append(
            f"Without offloading it would need {need} of each GPU, which has {has}{free if tight else ''}."
        )
    return sentences


def _faster(found: Sequence[Choice]) -> list[str]:
    """Why the fastest of the settings that are shown is not the one that is proposed; nothing where it is."""
    (first, best), *others = found[: 1 + _ALTERNATIVES]
    if not others:
        return []
    number, (config, other) = min(enumerate(others, 2), key=lambda one: one[1][1].step_ms)
    if other.step_ms >= best.step_ms or ms(other.step_ms) == ms(best.step_ms):
        return []
    near, memory, more = f"{NEAR - 1:.0%}", best.memory, other.memory
    if 0 < config.offload_ratio < 1 and first.offload_ratio in (0, 1):
        why = f"an offload ratio below 1 is proposed only where it is more than {near} faster"
    else:
        if round(best.staleness_steps, 1) < round(other.staleness_steps, 1):
            least = f"staleness is proposed ({best.staleness_steps:.1f} instead of {other.staleness_steps:.1f} steps)"
        elif memory.device_bytes < more.device_bytes and size(memory.device_bytes) != size(more.device_bytes):
            least = f"GPU memory is proposed ({size(memory.device_bytes)} instead of {size(more.device_bytes)})"
        else:
            least = f"host memory is proposed ({size(memory.host_bytes)} instead of {size(more.host_bytes)})"
        why = f"of the settings within {near} of the fastest, the one with the least {least}"
    return [f"Choice {number} is faster, at {ms(other.step_ms)} a step: {why}."]


def of_thread(best: Prediction) -> list[str]:
    """That the training thread bounds a step, in a sentence; nothing where it does not."""
    if best.bound_by != "thread":
        return []
    thread_ms, compute_ms = ms(best.loads_ms["thread"]), ms(best.loads_ms["compute"])
    needs = f"The training thread needs {thread_ms} a step for Python and launches, the GPU {compute_ms}"
    return [f"{needs}: more tokens a step hide that, a faster GPU does not."]


def of_ranks(model: ModelFacts, machine: Machine, job: Job, found: Sequence[Choice]) -> list[str]:
    """How several ranks share the model, what they need at other stages, and without sharing, in sentences."""
    if job.ranks == 1:
        return []
    config = found[0][0] if found else SMALLEST
    named = "the first of these settings" if found else "the setting that needs least memory"
    shared = [_shared(job), *_other_stage(model, machine, job, config, named)]
    if config.offload_ratio == 0:
        return shared
    need = job.gpus * sum(host_bytes(model, config).values())
    fit = "fits" if need <= limits(machine)[1] else "does not fit"
    replicated = (
        "Ranks that share nothing out, as under DistributedDataParallel, hold all of the state each: "
        f"{size(need)} of host memory of a machine, which {fit}. Each of them keeps every gradient until "
        f"step(), and sends and updates all: {job.gpus} times the work of link and host."
    )
    return [*shared, replicated]


def _shared(job: Job) -> str:
    """How ranks share the model, in a sentence."""
    if job.keeps_whole:
        return (
            f"This is for {job.ranks} ranks{_on_nodes(job)} at ZeRO stage 1 or 2 with zftune run (zenflow.Partition): "
            "each has all weights, and the state of its rows. It averages gradients after backward and gathers weights "
            "after the update, and no compute hides that."
        )
    gathered = "gathered again for backward" if job.reshard else "kept until backward"
    return (
        f"This is for {job.ranks} ranks{_on_nodes(job)} over PyTorch's FSDP2 ({_sharded(job)}), each with its rows of "
        f"every weight; layers are {gathered}."
    )


def _other_stage(model: ModelFacts, machine: Machine, job: Job, config: ZenFlowConfig, named: str) -> list[str]:
    """What a setting does where ranks share the model the other way, in a sentence."""
    if job.replicas > 1:
        return []
    stages, stage = ("stage 3", 3) if job.keeps_whole else ("stages 1 and 2", 2)
    found = predict(model, machine, replace(job, stage=stage), config)
    device, _ = limits(machine)
    fit = "fits" if found.memory.device_bytes <= device else "does not fit"
    whole = "" if stage == 3 else " for all weights and, until step(), all gradients"
    sentence = (
        f"At ZeRO {stages} (--stage {stage}) {named} takes {ms(found.step_ms)} a step and "
        f"{size(found.memory.device_bytes)} of each GPU{whole}, which {fit}; host memory and host work are the same."
    )
    return [sentence]


def _sharded(job: Job) -> str:
    if job.replicas == 1:
        return "fully_shard of each layer and of the model; ZeRO stage 3 with zftune run"
    mesh = f"a mesh of {job.replicas} by {job.shards}"
    return f"HSDP: fully_shard of each layer and of the model over {mesh}, so that each machine has all rows"


def _on_nodes(job: Job) -> str:
    return "" if job.nodes == 1 else f" on {job.nodes} machines with a network of {job.network_gbps:g} GB/s each way"


def _next_command(config: ZenFlowConfig, quality: Quality) -> str:
    """How a proposal is trained with, in a sentence."""
    if config.offload_ratio == 0:
        return "Train without an offload section; where the time goes then: zftune profile -- python train.py"
    return f"To train with it, put its section into your ds_config: {_RUN.format(f' --quality {quality}')}"


def _named(config: ZenFlowConfig) -> str:
    if config.overlap_step:
        name = f"topk_ratio {config.topk_ratio:g}, update_interval {config.update_interval}, apply_lag {config.lag}"
    else:
        name = f"topk_ratio {config.topk_ratio:g}, each step synchronous"
    return name if config.offload_ratio == 1 else f"{name}, offload_ratio {config.offload_ratio:g}"


_BESIDE_COMPUTE = 0.1
"""Of a step: with more stall than this it is not computing that bounds it."""


def _bound(prediction: Prediction) -> str:
    """What takes longest; nothing where that is computing and the step waits all the same, as its stall tells."""
    if prediction.bound_by not in CAUSES and prediction.stall_ms > _BESIDE_COMPUTE * prediction.step_ms:
        return ""
    return f", bound by {CAUSES.get(prediction.bound_by, prediction.bound_by)}"


def _stall(prediction: Prediction) -> str:
    share = prediction.stall_ms / prediction.step_ms if prediction.step_ms else 0.0
    if share < 0.005:
        return ", without a stall worth naming"
    cause = max(prediction.stall_ms_by_cause, key=lambda name: prediction.stall_ms_by_cause[name])
    return f", {share:.0%} of it stall (most for {CAUSES[cause]})"


def _model(model: ModelFacts) -> dict[str, Any]:
    names = ("name", "parameters", "trainable", "layers", "hidden", "dtype")
    return {**{name: getattr(model, name) for name in names}, "weights": len(model.weights)}


def _machine(machine: Machine) -> dict[str, Any]:
    return {**dataclasses.asdict(machine), "source": dict(machine.source)}


def _setting(
    config: ZenFlowConfig, prediction: Prediction, machine: Machine, stage: Mapping[str, int]
) -> dict[str, Any]:
    memory = dataclasses.asdict(prediction.memory)
    return {
        "knobs": {name: getattr(config, name) for name in _KNOBS} | {"apply_lag": config.lag},
        "python": config.to_python(),
        "ds_config": {**stage, **config.to_ds_config().get("zero_optimization", {})},
        "step_ms": prediction.step_ms,
        "compute_ms": prediction.compute_ms,
        "stall_ms_by_cause": dict(prediction.stall_ms_by_cause),
        "loads_ms": dict(prediction.loads_ms),
        "host_utilisation": prediction.host_utilisation,
        "staleness_steps": prediction.staleness_steps,
        "s_min": prediction.s_min,
        "bound_by": prediction.bound_by,
        "memory": memory,
        "fits": fits(prediction, machine),
    }
