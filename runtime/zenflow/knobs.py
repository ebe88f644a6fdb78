"""A change of knobs between its request and the step that it takes effect in, with the memory that it needs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from zenflow.config import ZenFlowConfig
from zenflow.errors import ZenFlowError
from zenflow.host.cores import HostCores, host_cores
from zenflow.layout import WeightPlan
from zenflow.model import Groups, ModelState, Split
from zenflow.runtime import Runtime


@dataclass(slots=True)
class KnobChange:
    """New knobs, and what was got ready for them."""

    config: ZenFlowConfig
    splits: bool
    """Whether columns change tier, so that everything has to be visible first."""
    cores: HostCores
    change_threads: Callable[[], None] | None
    reserve: list[torch.Tensor]
    """Memory that the new split will take; held so that nobody else takes it before."""


def splits(old: ZenFlowConfig, new: ZenFlowConfig) -> bool:
    """Whether a change of knobs moves columns between the tiers."""
    return (old.topk_ratio, old.offload_ratio) != (new.topk_ratio, new.offload_ratio)


def prepare(runtime: Runtime, model: ModelState, new: ZenFlowConfig, groups: Groups, old: ZenFlowConfig) -> KnobChange:
    """Get everything that new knobs need.

    Raises HostMemoryError, or MemoryError where that is found out too late to say it well, if the host has less memory
    than they need; HostEngineError if threads could not be started; RankError if another rank could not get it.
    """
    change = KnobChange(new, splits(old, new), runtime.cores, None, [])
    split, host_bytes = None, 0  # before the first step, which sees to the memory
    if model.weights and change.splits:
        split = model.split(groups, new)
        host_bytes = _require_room(runtime, split, new)
    elif model.weights and runtime.log.bytes_for(new) > runtime.log.bytes_for(old):
        missing = runtime.log.bytes_for(new) - runtime.log.allocated_bytes
        runtime.require_host_bytes([max(0, missing)], "the gradient log", "lower update_interval")
    _on_all_ranks(runtime, lambda: _get(runtime, model, change, old, split, host_bytes))
    return change


def _get(
    runtime: Runtime, model: ModelState, change: KnobChange, old: ZenFlowConfig, split: Split | None, host_bytes: int
) -> None:
    new = change.config
    if (old.host_threads, old.pt_reserved_cores_perc) != (new.host_threads, new.pt_reserved_cores_perc):
        change.cores = host_cores(
            reserved_share=new.pt_reserved_cores_perc,
            numa_node=runtime.device.numa_node(),
            threads=new.host_threads,
            affinity=runtime.cpus,
        )
        change.change_threads = runtime.engine.backend.prepare(list(change.cores.cpus))
    if split is not None:
        change.reserve = _allocate(runtime, model, split, host_bytes)
    elif model.weights and runtime.log.bytes_for(new) > runtime.log.bytes_for(old):
        runtime.log.reserve(new)


def _on_all_ranks(runtime: Runtime, get: Callable[[], object]) -> None:
    error = None
    try:
        get()
    except (ZenFlowError, MemoryError, torch.OutOfMemoryError) as raised:
        error = raised
    if runtime.ranks is not None:
        runtime.ranks.together(error, runtime.device.torch_device)
    elif error is not None:
        raise error


def reserve(runtime: Runtime, model: ModelState, split: Split, config: ZenFlowConfig) -> list[torch.Tensor]:
    """Memory for what another split needs more than there is, and for its largest weight, twice there a while.

    `config` has the knobs of that split. Raises HostMemoryError if the host has less memory, RankError if another rank
    could not get it.
    """
    host_bytes = _require_room(runtime, split, config)
    reserved: list[torch.Tensor] = []
    _on_all_ranks(runtime, lambda: reserved.extend(_allocate(runtime, model, split, host_bytes)))
    return reserved


def _require_room(runtime: Runtime, split: Split, config: ZenFlowConfig) -> int:
    """Host bytes that another split needs more than there is; refused where they do not fit."""
    in_use = runtime.memory.bytes_by_use
    host_bytes = runtime.host_bytes_for(split.trained, split.plan.buckets, config)
    host_bytes += max((_state_bytes(runtime, plan, plan.deferred) for plan, _ in split.trained), default=0)
    log_bytes = min(in_use["log"], runtime.log_bytes_for(split.trained, split.plan.buckets, config))
    host_bytes = max(0, host_bytes - in_use["state"] - in_use["staging"] - log_bytes)
    advice = "lower offload_ratio or update_interval, or raise topk_ratio"
    runtime.require_host_bytes([host_bytes], "the new split", advice)
    return host_bytes


def _allocate(runtime: Runtime, model: ModelState, split: Split, host_bytes: int) -> list[torch.Tensor]:
    reserved = [runtime.memory.empty((host_bytes,), torch.uint8, "state")]
    device = runtime.device.torch_device
    if device.type != "cpu":
        new = [_state_bytes(runtime, plan, plan.resident + plan.selected) for plan, _ in split.trained]
        now = [weight.plan for weight in model.weights if weight.parameter.requires_grad]
        old = [_state_bytes(runtime, plan, plan.resident + plan.selected) for plan in now]
        device_bytes = max(0, sum(new) + max(new, default=0) - sum(old))
        reserved.append(torch.empty(device_bytes, dtype=torch.uint8, device=device))
    return reserved


def _state_bytes(runtime: Runtime, plan: WeightPlan, columns: int) -> int:
    return columns * (plan.rows * 4 * (1 + runtime.rule.moments) + 4)
