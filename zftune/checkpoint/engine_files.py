"""Files as DeepSpeed's engine writes them: of itself and the model, and of the fp32 masters for `zero_to_fp32`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from importlib import metadata
from typing import Any

import torch

from zftune.checkpoint.state import Group, TrainingState, tied

_OLDEST = "0.16.0"
"""The version that is written where DeepSpeed is not installed: files have looked the same since."""
STAGE = 2
"""That files say they are of: those of stage 1 are alike."""


def engine_state(
    training: TrainingState, groups: Iterable[Group], model: dict[str, torch.Tensor], ranks: int
) -> dict[str, Any]:
    """What DeepSpeed's engine saves of itself and the model, and of whose the masters are; the optimizer is left out.

    Args:
        training: the run.
        groups: the parameters that have masters, in their order.
        model: the model's `state_dict`.
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
        **_shapes(training, groups, model),
        "dp_world_size": ranks,
        "ds_version": deepspeed_version(training),
    }


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


def in_bf16(training: TrainingState) -> bool:
    """Whether the model was trained in it, which is in the names of files."""
    return any(training.model[weight.name].dtype == torch.bfloat16 for weight in training.weights)


def optimizer_file(rank: int, *, bf16: bool) -> str:
    """The name of the file with a rank's part of the optimizer, masters included.

    Args:
        rank: of data parallelism.
        bf16: whether the model is.
    """
    return f"{'bf16_' if bf16 else ''}zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"


def masters_alone(masters: Sequence[torch.Tensor], config: object, version: str, ranks: int = 1) -> dict[str, Any]:
    """Such a file's content with masters and no more, which is what `zero_to_fp32` reads of it.

    Args:
        masters: each group's, behind each other in one fp32 vector; of several ranks, this one's part of it.
        config: DeepSpeed's.
        version: DeepSpeed's.
        ranks: whose files belong together.
    """
    part = {
        "zero_stage": STAGE,
        "partition_count": [ranks] * len(masters),
        "single_partition_of_fp32_groups": list(masters),
        "ds_version": version,
    }
    return {"optimizer_state_dict": part, "ds_config": config, "ds_version": version}


def deepspeed_version(training: TrainingState) -> str:
    """DeepSpeed's, as the run was saved with or else as it is installed."""
    return str(training.engine.get("ds_version") or _installed())


def _installed() -> str:
    try:
        return metadata.version("deepspeed")
    except metadata.PackageNotFoundError:
        return _OLDEST
