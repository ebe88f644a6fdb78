"""What DeepSpeed's engine loads at ZeRO stage 1 or 2, for any number of ranks."""

from __future__ import annotations

from collections.abc import Iterable
from importlib import metadata
from typing import Any

import torch

from zftune.checkpoint.reading_zero import ds_config, shuffled, shuffles
from zftune.checkpoint.sources import MODEL_STATES
from zftune.checkpoint.state import MOMENTS, Group, TrainingState, Weight, tied

_OLDEST = "0.16.0"
"""The version that is written where DeepSpeed is not installed: files have looked the same since."""
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
    dtype = next((model[weight.name].dtype for group in groups for weight in group.weights), torch.float32)
    version = training.engine.get("ds_version") or _version()
    prefix = "bf16_" if dtype == torch.bfloat16 else ""
    files: dict[str, Any] = {
        MODEL_STATES: {**engine_state(training, model, version, ranks), **_shapes(training, groups, model)}
    }
    flats = [_flat(group, ranks) for group in groups]
    for rank in range(ranks):
        files[f"{prefix}zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"] = {
            "optimizer_state_dict": _part(groups, flats, rank, ranks, version),
            "ds_config": training.engine.get("ds_config", {}),
            "ds_version": version,
        }
    return files


def engine_state(training: TrainingState, model: dict[str, torch.Tensor], version: str, ranks: int) -> dict[str, Any]:
    """What DeepSpeed's engine saves of itself and the model; the optimizer is left out.

    Args:
        training: the run.
        model: the model's `state_dict`.
        version: DeepSpeed's.
        ranks: how many ranks it is for.
    """
    return {
        "buffer_names": [],
        "lr_scheduler": None,
        "data_sampler": None,
        "random_ltd": None,
        "sparse_tensor_module_names": set(),
        "skipped_steps": 0,
        "global_steps": training.steps,
        "global_samples": 0,
        "mp_world_size": 1,
        "ds_config": {},
        **training.engine,
        "module": model,
        "optimizer": None,
        "param_shapes": None,
        "frozen_param_shapes": None,
        "frozen_param_fragments": None,
        "shared_params": None,
        "dp_world_size": ranks,
        "ds_version": version,
    }


def deepspeed_version(training: TrainingState) -> str:
    """DeepSpeed's, as the run was saved with or else as it is installed."""
    return str(training.engine.get("ds_version") or _version())


def _version() -> str:
    try:
        return metadata.version("deepspeed")
    except metadata.PackageNotFoundError:
        return _OLDEST


def _trained(training: TrainingState) -> list[Group]:
    """The groups as DeepSpeed has them, without what is frozen: what has no state, where anything has."""
    return [
        Group(group.settings, [weight for weight in group.weights if weight.moments or not training.steps])
        for group in training.groups
    ]


def _shapes(training: TrainingState, groups: Iterable[Group], model: dict[str, torch.Tensor]) -> dict[str, Any]:
    aliases = tied(model)
    names = [[weight.name for weight in group.weights] for group in groups]
    known = {*aliases, *(training.engine.get("buffer_names") or ()), *(name for of in names for name in of)}
    frozen = {name: tensor for name, tensor in model.items() if name not in known}
    return {
        "param_shapes": [{name: model[name].shape for name in of_group} for of_group in names],
        "frozen_param_shapes": {name: tensor.shape for name, tensor in frozen.items()},
        "frozen_param_fragments": frozen,
        "shared_params": aliases,
    }


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
        "zero_stage": 2,
        "group_paddings": paddings,
        "partition_count": [ranks] * len(groups),
        "ds_version": version,
    }
