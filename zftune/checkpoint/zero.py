"""DeepSpeed's ZeRO-1 and ZeRO-2.

Each rank's file holds, for every parameter group, its part of the flat masters and of the flat moments. The parts in
the order of the ranks are the group's parameters behind each other, in the order of `param_shapes`, and padding.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from zftune.checkpoint.plain import check_settings
from zftune.checkpoint.sources import Source, load
from zftune.checkpoint.state import MOMENTS, Group, TrainingState, Weight, tied
from zftune.ds_config.facts import FILES_SINCE
from zftune.ds_config.reading import read_given
from zftune.errors import BadInputError
from zftune.telemetry.fingerprint import installed

STAGE = 2


def engine_state(training: TrainingState, model: dict[str, torch.Tensor]) -> dict[str, Any]:
    """State of the engine and the model, and the owners of the masters, without the optimizer."""
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
        **_shapes(training, model),
        "dp_world_size": 1,
        "ds_version": str(training.engine.get("ds_version") or installed("deepspeed") or FILES_SINCE),
    }


def _shapes(training: TrainingState, model: dict[str, torch.Tensor]) -> dict[str, Any]:
    aliases = tied(model)
    names = [[weight.name for weight in group.weights] for group in training.groups]
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
    """
    return f"{'bf16_' if bf16 else ''}zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"


def masters_alone(masters: Sequence[torch.Tensor], config: object, version: str, ranks: int = 1) -> dict[str, Any]:
    """Such a file's content with masters and no more, which is what `zero_to_fp32` reads of it.

    Args:
        masters: each group's, behind each other in one fp32 vector; of several ranks, this one's part of it.
    """
    part = {
        "zero_stage": STAGE,
        "partition_count": [ranks] * len(masters),
        "single_partition_of_fp32_groups": list(masters),
        "ds_version": version,
    }
    return {"optimizer_state_dict": part, "ds_config": config, "ds_version": version}


_OF_ENGINE = ("module", "optimizer", "param_shapes", "frozen_param_shapes", "frozen_param_fragments", "shared_params")
_OF_SCALER = ("cur_scale", "cur_iter", "last_overflow_iter", "cur_hysteresis")
_MOST_DIFFERENT = 0.01  # share of elements: a few that somebody wrote to; another layout differs nearly everywhere


def read_zero(source: Source, *, trust: bool) -> TrainingState:
    """Read a checkpoint of ZeRO-1 or ZeRO-2.

    Args:
        trust: whether code in the files may run.

    Raises:
        BadInputError: it is not whole, of DeepSpeed's ZenFlow, or of an optimizer that nothing else has.
    """
    document, what = source.document, source.what
    config = ds_config(document)
    if _section(_section(config, "zero_optimization"), "zenflow"):
        raise _of_zenflow(what)
    parts = [_part(load(path, trust=trust), path, what) for path in source.parts]
    _check_ranks(parts, document, what)
    shapes = document.get("param_shapes")
    base = parts[0]["base_optimizer_state"]
    if not isinstance(base, Mapping) or not isinstance(shapes, list):
        raise BadInputError(f"{what}: is an elastic checkpoint or an old one; save it without elastic_checkpoint")
    settings = base["param_groups"]
    check_settings(settings, what)
    if len(settings) != len(shapes):
        raise BadInputError(f"{what}: has {len(settings)} parameter groups and the shapes of {len(shapes)}")
    groups = [_group(parts, number, of_group, what) for number, of_group in enumerate(shapes)]
    for group in groups if shuffles(config) else ():
        group.weights = _unshuffled(group.weights, len(parts))
    model = dict(document["module"])
    for alias, name in (document.get("shared_params") or {}).items():
        model[alias] = model[name]
    training = TrainingState(
        rule=_rule(settings[0], config),
        groups=groups,
        model=model,
        engine={key: value for key, value in document.items() if key not in _OF_ENGINE},
    )
    _compare(training, what)
    training.loss_scaler = _loss_scaler(parts[0])
    return training


def ds_config(document: Mapping[str, Any]) -> Mapping[str, Any]:
    """The configuration in one of the engine's files, however it was given; empty where it cannot be read."""
    return read_given(document.get("ds_config")) or {}


def shuffles(config: Mapping[str, Any]) -> bool:
    """Whether DeepSpeed lays the parameters of a group out in turns, one for each rank."""
    zero = _section(config, "zero_optimization")
    return zero.get("stage") == 2 and bool(zero.get("round_robin_gradients", False))


def _unshuffled(weights: Sequence[Weight], ranks: int) -> list[Weight]:
    places = [place for first in range(ranks) for place in range(len(weights))[first::ranks]]
    return [weight for _, weight in sorted(zip(places, weights, strict=True), key=lambda pair: pair[0])]


def _part(document: Any, path: Path, what: str) -> Mapping[str, Any]:
    part = document.get("optimizer_state_dict") if isinstance(document, Mapping) else None
    wanted = {"base_optimizer_state", "single_partition_of_fp32_groups", "partition_count"}
    if not isinstance(part, Mapping) or not wanted <= part.keys():
        raise BadInputError(f"{what}: {path.name} is not a file that DeepSpeed's engine saved at ZeRO stage 1 or 2")
    if int(part.get("zero_stage", 1)) not in (1, 2):
        raise BadInputError(f"{what}: is of ZeRO stage {int(part['zero_stage'])}; it must be of stage 1 or 2")
    if _section(_section(ds_config(document), "zero_optimization"), "zenflow"):
        raise _of_zenflow(what)
    return part


def _check_ranks(parts: Sequence[Mapping[str, Any]], document: Mapping[str, Any], what: str) -> None:
    counts = parts[0]["partition_count"]
    counts = set(counts) if isinstance(counts, (list, tuple)) else {counts}
    counts.add(document.get("dp_world_size", len(parts)))
    if counts != {len(parts)}:
        raise BadInputError(
            f"{what}: has the optim_states of {len(parts)} ranks; it must have those of all "
            f"{' or '.join(map(str, sorted(counts)))} that trained"
        )


def _group(parts: Sequence[Mapping[str, Any]], number: int, shapes: Mapping[str, Any], what: str) -> Group:
    lengths = {name: math.prod(shape) for name, shape in shapes.items()}
    total = sum(lengths.values())
    master = _joined([part["single_partition_of_fp32_groups"][number] for part in parts], total, what)
    states = [part["base_optimizer_state"]["state"].get(number, {}) for part in parts]
    settings = {
        key: value
        for key, value in parts[0]["base_optimizer_state"]["param_groups"][number].items()
        if key not in ("params", "step", "bias_correction")
    }
    if all(name in state for state in states for name in MOMENTS):
        moments = [_joined([state[name] for state in states], total, what) for name in MOMENTS]
        count = _count(parts, number, states, what)
    elif any(states):
        raise BadInputError(f"{what}: the optimizer's state is not Adam's, which has {' and '.join(MOMENTS)}")
    else:
        moments, count = [], 0
    weights, low = [], 0
    for name, shape in shapes.items():
        high = low + lengths[name]
        streams = [flat[low:high].view(tuple(shape)) for flat in (master, *moments)]
        weights.append(Weight(name, streams[0], tuple(streams[1:]), count))
        low = high
    return Group(settings, weights)


def _joined(pieces: Sequence[torch.Tensor], total: int, what: str) -> torch.Tensor:
    length, alignment = sum(piece.numel() for piece in pieces), 2 * len(pieces)
    if not total <= length < total + alignment:
        raise BadInputError(f"{what}: its partitions hold {length} elements; they must hold {total} and padding")
    flat = pieces[0] if len(pieces) == 1 else torch.cat(list(pieces))
    return flat.detach()[:total].float()


def _count(parts: Sequence[Mapping[str, Any]], number: int, states: Sequence[Mapping[str, Any]], what: str) -> int:
    found = {
        int(state.get("step", part["base_optimizer_state"]["param_groups"][number].get("step", -1)))
        for part, state in zip(parts, states, strict=True)
    }
    if len(found) != 1 or found == {-1}:
        raise BadInputError(f"{what}: its ranks have taken {sorted(found)} steps; all must have taken the same number")
    return found.pop()


def _rule(settings: Mapping[str, Any], config: Mapping[str, Any]) -> str:
    """AdamW, which DeepSpeed's "Adam" is too unless it is told otherwise."""
    if "decoupled_weight_decay" in settings:
        return "adamw" if settings["decoupled_weight_decay"] else "adam"
    optimizer = _section(config, "optimizer")
    plain_adam = str(optimizer.get("type", "")).lower() == "adam"
    decoupled = _section(optimizer, "params").get("adam_w_mode", True)
    return "adam" if plain_adam and not decoupled else "adamw"


def _compare(training: TrainingState, what: str) -> None:
    """Masters must round to the weights: those of DeepSpeed's ZenFlow, which are transposed, do not."""
    different, total = 0, 0
    for weight in training.weights:
        saved = training.model.get(weight.name)
        if saved is None or saved.shape != weight.master.shape:
            raise BadInputError(f"{what}: the model has no '{weight.name}' of {list(weight.master.shape)}")
        rounded = weight.master.to(saved.dtype)
        different += int(((rounded != saved) & ~(rounded.isnan() & saved.isnan())).sum())
        total += saved.numel()
    if different > _MOST_DIFFERENT * total:
        raise BadInputError(
            f"{what}: {different} of {total} masters do not round to the weights, as those of plain ZeRO do; "
            "DeepSpeed's ZenFlow saves them transposed"
        )
    if different:
        training.notes.append(f"{different} weights differ from their masters, which win")


def _loss_scaler(part: Mapping[str, Any]) -> dict[str, float]:
    """Of dynamic loss scaling what changes; a static scale stands in the configuration."""
    scaler = part.get("loss_scaler")
    found = {name: getattr(scaler, name, None) for name in _OF_SCALER}
    return {name: value for name, value in found.items() if value is not None} if found["cur_iter"] is not None else {}


def _of_zenflow(what: str) -> BadInputError:
    return BadInputError(
        f"{what}: is of DeepSpeed's ZenFlow, which saves masters transposed and leaves the selected columns' state "
        "out: it must be of ZeRO-1 or ZeRO-2 without a zenflow section"
    )


def _section(config: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    section = config.get(name)
    return section if isinstance(section, Mapping) else {}
