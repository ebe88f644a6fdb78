"""What DeepSpeed's engine loads at ZeRO stage 1 or 2, for any number of ranks."""

from __future__ import annotations

from typing import Any

import torch

from zftune.checkpoint.engine_files import STAGE, deepspeed_version, engine_state, in_bf16, optimizer_file
from zftune.checkpoint.reading_zero import ds_config, shuffled, shuffles
from zftune.checkpoint.sources import MODEL_STATES
from zftune.checkpoint.state import MOMENTS, Group, TrainingState, Weight

_OWN = ("param_names", "decoupled_weight_decay", "maximize", "foreach", "capturable", "differentiable", "fused")
"""Settings of torch's optimizers that DeepSpeed's do not have."""


def zero_documents(training: TrainingState, ranks: int) -> dict[str, Any]:
    """The files of a checkpoint, by name.

    Args:
        training: the run.
        ranks: how many ranks it is for.
    """
    model = training.tensors(masters=False)
    groups = _trained(training)
    for group in groups if shuffles(ds_config(training.engine)) else ():
        group.weights = shuffled(group.weights, ranks)
    version = deepspeed_version(training)
    files: dict[str, Any] = {MODEL_STATES: engine_state(training, groups, model, ranks)}
    flats = [_flat(group, ranks) for group in groups]
    for rank in range(ranks):
        files[optimizer_file(rank, bf16=in_bf16(training))] = {
            "optimizer_state_dict": _part(groups, flats, rank, ranks, version),
            "ds_config": training.engine.get("ds_config", {}),
            "ds_version": version,
        }
    return files


def _trained(training: TrainingState) -> list[Group]:
    """The groups as DeepSpeed has them, without what is frozen: what has no state, where anything has."""
    return [
        Group(group.settings, [weight for weight in group.weights if weight.moments or not training.steps])
        for group in training.groups
    ]


def _flat(group: Group, ranks: int) -> list[torch.Tensor]:
    """Master and moments of a group behind each other, padded so that the ranks' parts are equally long."""
    total = sum(weight.master.numel() for weight in group.weights)
    alignment = 2 * ranks
    padded = -(-total // alignment) * alignment
    flats = [torch.zeros(padded) for _ in range(1 + len(MOMENTS))]
    low = 0
    for weight in group.weights:
        high = low + weight.master.numel()
        for flat, stream in zip(flats, _streams(weight), strict=False):
            flat[low:high] = stream.reshape(-1)
        low = high
    return flats


def _streams(weight: Weight) -> list[torch.Tensor]:
    return [weight.master, *weight.moments]


def _part(groups: list[Group], flats: list[list[torch.Tensor]], rank: int, ranks: int, version: str) -> dict[str, Any]:
    state: dict[int, dict[str, Any]] = {}
    masters, paddings, settings = [], [], []
    for number, (group, streams) in enumerate(zip(groups, flats, strict=True)):
        length = streams[0].numel() // ranks
        master, *moments = (stream[rank * length : (rank + 1) * length].clone() for stream in streams)
        total = sum(weight.master.numel() for weight in group.weights)
        padding = min(length, max(0, (rank + 1) * length - total))
        masters.append(master[: length - padding].clone())
        paddings.append(padding)
        step = max((weight.count for weight in group.weights), default=0)
        if step:
            state[number] = {"step": step, **dict(zip(MOMENTS, moments, strict=True))}
        own = {key: value for key, value in group.settings.items() if key not in _OWN}
        settings.append({"bias_correction": True, "amsgrad": False, **own, "step": step, "params": [number]})
    return {
        "overflow": False,
        "base_optimizer_state": {"state": state, "param_groups": settings},
        "single_partition_of_fp32_groups": masters,
        "zero_stage": STAGE,
        "group_paddings": paddings,
        "partition_count": [ranks] * len(groups),
        "ds_version": version,
    }
