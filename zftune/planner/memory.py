"""What a setting needs: of the host to the byte, as the runtime plans it; of the device, activations too, by a
model.

The device holds the weights; fp32 master, moments and counts of resident and selected columns, and the columns'
indices; gradients; packed gradients that wait for the link; updated weights that arrive; activations. Its caching
allocator rounds: blocks to 512 bytes, into segments of 2 MiB (below 1 MiB), 20 MiB (below 10 MiB) or a multiple of
2 MiB; each stream has segments of its own.

Several devices each have rows of that (FSDP2), and what is gathered or not reduced yet: the layer that computes and two
that are gathered ahead, the gradients of one layer and of one that is being reduced, and what no layer has. Or each has
all weights and gradients, and the state of its rows (`zenflow.Partition`), beside two buckets that are being averaged.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache

from zenflow import ZenFlowConfig
from zenflow.host.places import padded
from zenflow.layout import ModelPlan, WeightPlan
from zenflow.schedule import log_bytes
from zftune.planner.model import Job, Memory, ModelFacts
from zftune.planner.rates import MOMENTS
from zftune.planner.split import model_plan, totals_of


@dataclass(frozen=True, slots=True)
class Activations:
    """Bytes on the device."""

    layer: int
    """Kept by one layer's forward until its backward."""
    checkpoint: int
    """Kept of one layer that recomputes."""
    working: int
    """Made and freed within one layer's backward."""
    head: int
    """Kept and made around the logits."""


def activations(model: ModelFacts, job: Job) -> Activations:
    """What one rank keeps."""
    e, h, tokens = model.element_bytes, model.hidden, job.tokens
    wide, narrow = model.intermediate or 4 * h, model.key_value_width or h
    norms = 2 * (4 + 2 * e) * h
    attention = 3 * e * h + 2 * e * narrow + 4 * model.heads
    gated = 4 * e * wide
    working = max(3 * e * wide, 3 * e * h + 8 * h) + 2 * e * h
    return Activations(
        layer=tokens * (norms + attention + gated),
        checkpoint=tokens * e * h,
        working=tokens * working,
        head=tokens * (model.vocabulary * (2 * e + 12) + 3 * e * h),
    )


CONTEXT_BYTES = 600 << 20
"""CUDA context, kernels and the libraries' workspaces, outside of the allocator: an estimate."""
_MIB = 1 << 20
_BLOCK, _SMALL, _SMALL_SEGMENT, _MEDIUM, _MEDIUM_SEGMENT = 512, _MIB, 2 * _MIB, 10 * _MIB, 20 * _MIB
_SPLINTERS = 0.06
"""Of what comes and goes: the share that lies between blocks and fits nothing."""
_STREAMS = 3
_STATE = 4 * (1 + MOMENTS)  # bytes of fp32 state of an element
_INDEX = 8
_AHEAD = 2  # units that FSDP2 gathers before the last one has computed
_REDUCED = 3
_SCORES = 12  # importance, kept and new, and its sums, fp32 a column


def memory(model: ModelFacts, job: Job, config: ZenFlowConfig, *, packed: float, arrived: float) -> Memory:
    """Predict a setting's memory.

    `packed` and `arrived` are the most bytes of gradients and of updated weights that wait on the device.
    """
    plan = model_plan(model, config)
    of_all = host_bytes(model, config, ranks=job.shards)
    host = {use: -(-nbytes * job.replicas // job.nodes) for use, nbytes in of_all.items()}
    device = device_bytes(model, plan, job, config, packed=packed, arrived=arrived)
    selected = sum(weight.selected * weight.rows for weight in plan.weights if weight.deferred)
    return Memory(
        device_bytes=sum(device.values()),
        host_bytes=sum(host.values()),
        pinned_bytes=host["log"] + host["staging"],
        migration_bytes=2 * _STATE * selected,
        device_by_use=device,
        host_by_use=host,
    )


def host_bytes(model: ModelFacts, config: ZenFlowConfig, *, ranks: int = 1) -> dict[str, int]:
    """Host memory of all ranks together by use, exactly as their runtimes plan it.

    The log is that of the longest window; each rank has the state of its rows of every weight.
    """
    found = {"state": 0, "log": 0, "staging": 0}
    buckets = model_plan(model, config).buckets
    for part, count in Counter(_alike(model, ranks)).items():
        sums = _host_sums(model, config.topk_ratio, config.offload_ratio, config.bucket_bytes, part, ranks)
        state, staging, entries = sums
        found["state"] += count * state
        found["log"] += count * log_bytes(config, entries, buckets)
        found["staging"] += count * staging
    return found


@lru_cache(maxsize=8)
def _alike(model: ModelFacts, ranks: int) -> list[int]:
    """Of each rank the first one that has as many rows of every weight."""
    heights = [shape[0] for shape in model.weights if shape]
    first: dict[tuple[int, ...], int] = {}
    return [first.setdefault(tuple(_rows_of(rows, rank, ranks) for rows in heights), rank) for rank in range(ranks)]


def _rows_of(rows: int, rank: int, ranks: int) -> int:
    """How many of a weight's rows a rank has: as many as the others, and the last ones what is left."""
    share = -(-rows // ranks)
    return max(0, min(share, rows - rank * share))


@lru_cache(maxsize=512)
def _host_sums(
    model: ModelFacts, topk_ratio: float, offload_ratio: float, bucket_bytes: int, rank: int, ranks: int
) -> tuple[int, int, Sequence[tuple[int, int]]]:
    """Bytes of a rank's state, of its staging, and of one step's log entry of each bucket, behind its number."""
    config = ZenFlowConfig(topk_ratio=topk_ratio, offload_ratio=offload_ratio, bucket_bytes=bucket_bytes)
    state = staging = 0
    entries: Counter[int] = Counter()
    for shape, weight in zip(model.weights, model_plan(model, config).weights, strict=True):
        rows = weight.rows * _rows_of(shape[0], rank, ranks) // shape[0] if weight.deferred else 0
        elements = weight.deferred * rows
        state += _STATE * elements + 4 * weight.deferred
        staging += model.element_bytes * elements
        for number, (low, high) in enumerate(weight.bucket_slots, weight.first_bucket):
            entries[number] += padded((high - low) * rows * model.element_bytes)
    return state, staging, tuple(entries.items())


def device_bytes(
    model: ModelFacts, plan: ModelPlan, job: Job, config: ZenFlowConfig, *, packed: float, arrived: float
) -> dict[str, int]:
    """Memory of a device by use, at the moment at which it needs most."""
    ranks = job.shards
    among = 1 if job.keeps_whole else ranks
    weights = segments(model.element_bytes * -(-math.prod(shape) // among) for shape in model.weights)
    frozen = segments([model.element_bytes * (model.parameters - model.trainable) // among])
    state = segments(size for sizes in _state_tensors(model, plan, ranks) for size in sizes)
    steady = _steady(model, plan, job, config, packed=packed, arrived=arrived)
    first = {} if job.keeps_whole or ranks == 1 else _first_step(model, plan, config, ranks)
    return {
        "context": CONTEXT_BYTES,
        "weights": weights + frozen,
        "gathered": _gathered_bytes(model, config, job),
        "state": state,
        **(steady if sum(steady.values()) >= sum(first.values()) else first),
        "segments": _STREAMS * _MEDIUM_SEGMENT,
    }


def state_bytes(model: ModelFacts, config: ZenFlowConfig, *, ranks: int = 1) -> int:
    """What the runtime keeps on a device for good, without what an allocator adds.

    Each rank has the state of its rows of every weight.
    """
    return sum(map(sum, _state_tensors(model, model_plan(model, config), ranks)))


def segments(sizes: Iterable[int]) -> int:
    """Bytes that the caching allocator reserves for tensors that stay, each of a size in bytes."""
    small = medium = large = 0
    for size in sizes:
        block = -(-size // _BLOCK) * _BLOCK
        if block <= _SMALL:
            small += block
        elif block < _MEDIUM:
            medium += block
        else:
            large += -(-block // _SMALL_SEGMENT) * _SMALL_SEGMENT
    # What is left at a segment's end is at most one block: a third of a segment on average is plenty.
    medium_segments = math.ceil(medium * 1.25 / _MEDIUM_SEGMENT)
    return large + medium_segments * _MEDIUM_SEGMENT + -(-small // _SMALL_SEGMENT) * _SMALL_SEGMENT


def _state_tensors(model: ModelFacts, plan: ModelPlan, ranks: int) -> list[list[int]]:
    """Of each parameter: sizes of what the runtime keeps of it on the device."""
    elements = (math.prod(shape) for shape in model.weights)
    return [_state_of(count, weight, ranks) for count, weight in zip(elements, plan.weights, strict=True)]


def _state_of(elements: int, weight: WeightPlan, ranks: int) -> list[int]:
    if weight.resident == weight.columns:  # also without a column view: one row with one count
        return [4 * -(-elements // ranks)] * (1 + MOMENTS) + [4]
    sizes = [_INDEX * weight.selected, _INDEX * weight.deferred, _SCORES * weight.columns]
    for columns in (weight.resident, weight.selected):
        if columns:
            sizes += [4 * columns * -(-weight.rows // ranks)] * (1 + MOMENTS) + [4 * columns]
    return [size for size in sizes if size]


def _gathered_bytes(model: ModelFacts, config: ZenFlowConfig, job: Job) -> int:
    """Weights of which several devices have more than their rows."""
    if job.shards == 1 or job.keeps_whole:
        return 0
    *layers, rest = totals_of(model, config).gathered
    kept = _AHEAD * max(layers) + sum(layers) if not job.reshard else (1 + _AHEAD) * max(layers)
    return segments([model.element_bytes * (rest + kept)])


def _gradients(model: ModelFacts, plan: ModelPlan, *, streams: bool) -> tuple[list[int], list[int], int]:
    """By stage: bytes that a pass leaves of its gradients, the largest gradient in full, and the largest of all."""
    kept, largest = [0] * (model.layers + 1), [0] * (model.layers + 1)
    for shape, weight, stage in zip(model.weights, plan.weights, model.stages, strict=True):
        whole = model.element_bytes * math.prod(shape)
        leaves = streams and weight.deferred
        kept[stage] += whole - (model.element_bytes * weight.deferred * weight.rows if leaves else 0)
        largest[stage] = max(largest[stage], whole)
    return kept, largest, max(largest)


def _steady(
    model: ModelFacts, plan: ModelPlan, job: Job, config: ZenFlowConfig, *, packed: float, arrived: float
) -> dict[str, int]:
    """The greatest need of a steady backward: activations shrink as gradients grow."""
    acts, ranks = activations(model, job), job.shards
    streams = config.stream and not job.keeps_whole
    if streams and ranks == 1:  # the first step: masters and gradients wait, as much as may
        packed = max(packed, min(_deferred_bytes(model, plan), config.staging_bytes))
    whole = model.element_bytes * model.trainable if job.accumulation > 1 else 0
    kept, largest, _ = _gradients(model, plan, streams=streams)
    layers = model.layers
    units = [model.element_bytes * elements for elements in totals_of(model, config).reduced]
    per_layer = acts.checkpoint if job.checkpointing else acts.layer
    most, best = -1, (0, 0)
    gradients = 0
    for stage in reversed(range(layers + 1)):
        gradients += kept[stage]
        working = acts.head if stage == layers else acts.working + (acts.layer if job.checkpointing else 0)
        held = per_layer * min(stage + 1, layers) + working
        if whole:  # of the passes before; what is added to it, and what is packed
            made = whole + 2 * largest[stage]
        elif job.keeps_whole:  # nothing leaves before all of them are there
            made = gradients + largest[stage]
        elif ranks == 1:  # three: the weight's gradient as it is made, in full, and packed
            made = gradients + 3 * largest[stage]
        else:  # of the layer, of it as it is sent, and of the one before, which is being reduced; the rest's to the end
            made = gradients // ranks + units[-1] + _REDUCED * (units[stage] if stage < layers else 0)
        if held + made > most:
            most, best = held + made, (held, made)
    if job.keeps_whole:  # two buckets on their way, and what a rank gets of each
        bucket = model.element_bytes * max(totals_of(model, config).exchanged)
        best = max(best, (0, gradients + 2 * (bucket + bucket // ranks)), key=sum)
    if selected := sum(weight.selected * weight.rows for weight in plan.weights if weight.deferred):
        # Columns that change tier, nearly all at the first close: their state down and up, each as much as may wait.
        moved = 2 * min(_STATE * selected // ranks, config.staging_bytes)
        best = max(best, (0, gradients // ranks + moved), key=sum)
    held, made = best
    guesses = config.look_ahead == "guess"
    signs = _deferred_bytes(model, plan) // (4 * model.element_bytes * ranks) if guesses else 0  # two bits an element
    return {
        "activations": round(held * (1 + _SPLINTERS)),
        "gradients": round(made * (1 + _SPLINTERS)) + signs,
        "packed": round(packed * (1 + _SPLINTERS)) if streams else _deferred_bytes(model, plan) // ranks,
        "arriving": segments([round(arrived * (1 + _SPLINTERS))]),
    }


def _first_step(model: ModelFacts, plan: ModelPlan, config: ZenFlowConfig, ranks: int) -> dict[str, int]:
    """Of several ranks the first step keeps every gradient in full: weights are split in it. Activations are gone then.

    Columns that wait for the link, masters and then gradients, are as many as arrive at a time in later steps.
    """
    whole = model.element_bytes * model.trainable // ranks
    # Of several ranks the rest's gradients are reduced at last: as they are, and as they are sent.
    most = 3 * _gradients(model, plan, streams=config.stream)[2]
    if ranks > 1:
        most = 2 * model.element_bytes * totals_of(model, config).reduced[-1]
    packed = min(_deferred_bytes(model, plan) // ranks, config.staging_bytes)
    return {
        "activations": 0,
        "gradients": segments([whole]) + most,
        "packed": round(packed * (1 + _SPLINTERS)),
        "arriving": 0,
    }


def _deferred_bytes(model: ModelFacts, plan: ModelPlan) -> int:
    return model.element_bytes * sum(weight.deferred * weight.rows for weight in plan.weights)
