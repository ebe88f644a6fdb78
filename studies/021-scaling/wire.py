"""What a step would be if only the columns that changed were gathered: planned, not built and not measured.

Weights stay whole on every GPU (FSDP2 without resharding). Gradients are reduced and scattered as now. Of the weights
each rank sends the columns that changed in the step: its selected ones, which change in each, and of the deferred ones
those that are shown in it, on average one in S.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from zenflow import ZenFlowConfig
from zftune.planner.choosing import fits
from zftune.planner.closed_form import collective_ms, predict
from zftune.planner.model import Job, Machine, ModelFacts
from zftune.planner.rates import Rates
from zftune.planner.simulate import simulate
from zftune.planner.split import Split, split_of

CONFIG = ZenFlowConfig(topk_ratio=0.05, update_interval=4)
MODELS, MACHINES, GPUS, BATCHES = ("Llama-2-7B", "Llama-2-13B"), ("a100-80-pcie", "l40s"), (2, 4, 8), (1, 4)
QUICK_MODELS, QUICK_MACHINES = MODELS[:1], MACHINES[:1]
WAYS = ("again for backward", "kept until backward", "changed columns")
SEQUENCE = 2048


@dataclass(frozen=True, slots=True)
class Way:
    """How the weights get to every GPU: a step's time, what a GPU sends in it, and whether it fits."""

    step_ms: float
    sent_gb: float
    fits: bool


def ways_of(model: ModelFacts, machine: Machine, gpus: int, micro_batch: int) -> dict[str, Way]:
    """Each of WAYS, with the same knobs; a machine may have more GPUs than the library's, and the same host."""
    box = replace(machine, gpus=max(gpus, machine.gpus))
    found = {}
    for way in WAYS:
        job = Job(
            seq=SEQUENCE, micro_batch=micro_batch, gpus=gpus, checkpointing=True, reshard=way == "again for backward"
        )
        rates, split = Rates.of(model, box, job), split_of(model, CONFIG)
        if way == "changed columns":
            changed = changed_share(split)
            split = replace(split, gathered=tuple(round(changed * elements) for elements in split.gathered))
            # Own columns are packed, and all are written where they belong: 2 bytes read and 2 written of each.
            moved_ms = rates.device_ms(2 * rates.element_bytes * sum(split.gathered) * (1 + 1 / gpus))
            rates = replace(rates, forward_ms=rates.forward_ms + moved_ms)
        sent_gb = collective_ms(replace(rates, comm_gbps=1.0), split) / 1e3  # at 1 GB/s
        fit = fits(predict(model, box, job, CONFIG), box)
        found[way] = Way(simulate(rates, split, CONFIG).step_ms, sent_gb, fit)
    return found


def changed_share(split: Split) -> float:
    """Of a model's elements, those that change in a step, on average over a window."""
    always = split.resident + split.selected
    return (always + split.deferred / CONFIG.longest_window) / (always + split.deferred)


def planned(quick: bool) -> dict[str, dict[str, Any]]:
    """All boxes, as plain data."""
    return {
        f"{model} on {machine} x {gpus}, {batch}": {
            way: {"step_ms": one.step_ms, "sent_gb": one.sent_gb, "fits": one.fits}
            for way, one in ways_of(ModelFacts.from_name(model), Machine.load(machine), gpus, batch).items()
        }
        for model, machine, gpus, batch in _boxes(quick)
    }


def _boxes(quick: bool) -> Iterator[tuple[str, str, int, int]]:
    for model in QUICK_MODELS if quick else MODELS:
        for machine in QUICK_MACHINES if quick else MACHINES:
            for gpus in GPUS:
                for batch in BATCHES:
                    yield model, machine, gpus, batch
