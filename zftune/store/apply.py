"""A preset's knobs in a ds_config that stock DeepSpeed accepts and trains with.

Upstream's ZenFlow is not ours: what it would get wrong is set to something that works, or refused; every difference is
a sentence. Facts are those of DeepSpeed 0.19.6.
"""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from zftune.errors import BadInputError

if TYPE_CHECKING:
    from zenflow import ZenFlowConfig
    from zftune.store.types import Backend

# Every selection of upstream's resets moments and truncates masters: where ours would watch, its must be rare.
RARE_SELECTION_STEPS = 128
_UPDATE_INTERVAL = 4
_OPTIMIZERS = ("adam", "adamw")
_NOT_FOR_ZENFLOW = ("adam_w_mode", "fp32_optimizer_states", "torch_adam")
_OWN = ("full_warm_up_rounds", "auto_ratio", "pt_reserved_cores_perc")  # a preset does not speak of these


@dataclass(slots=True)
class Applied:
    """A ds_config, and what is to be known about it."""

    config: dict[str, Any]
    notes: list[str] = field(default_factory=list)
    """A sentence for each thing that upstream does differently, or that was changed beside the knobs."""


def apply(
    ds_config: Mapping[str, Any], knobs: Mapping[str, Any], *, stage: int, backend: Backend = "zenflow"
) -> Applied:
    """A ds_config with knobs.

    Args:
        ds_config: as the user has it; not changed.
        knobs: of a preset.
        stage: ZeRO stage of the preset, for a ds_config that has none.
        backend: what the preset was measured with.

    Raises:
        BadInputError: upstream cannot train this with these knobs; names the field, the value and what is allowed.
    """
    applied = Applied(copy.deepcopy(dict(ds_config)))
    if applied.config.pop("zftune", None) is not None:
        applied.notes.append("the zftune section was left out: its preset is in the file now")
    zero = _zero_section(applied, stage)
    config = _config(zero.pop("zenflow", None), knobs)
    if config.offload_ratio == 0:
        zero.pop("offload_optimizer", None)
        applied.notes.append("nothing is offloaded: this is what was measured to be the fastest")
        return applied
    _offload(applied, zero, config)
    if config.topk_ratio == 0:
        _without_selection(applied, config)
    else:
        _refuse_what_zenflow_breaks(applied.config)
        _prepare_for_zenflow(applied, zero)
        zero["zenflow"] = _zenflow_section(applied, config)
        _say_what_differs(applied, zero, config)
        if backend == "zenflow":
            applied.notes.append("upstream moves all gradients, selected ones too: expect a slower step than measured")
    return applied


def _config(section: Any, knobs: Mapping[str, Any]) -> ZenFlowConfig:
    """The knobs, and what the user's own section says beside them."""
    from zenflow import ConfigError, ZenFlowConfig

    own = {name: section[name] for name in _OWN if name in section} if isinstance(section, dict) else {}
    try:
        return ZenFlowConfig(**{**own, **knobs})
    except ConfigError as error:
        raise BadInputError(f"zero_optimization.zenflow: {error}") from error


def _zero_section(applied: Applied, stage: int) -> dict[str, Any]:
    zero = applied.config.setdefault("zero_optimization", {})
    if not isinstance(zero, dict):
        raise BadInputError(f"zero_optimization is {zero!r}, allowed is a JSON object")
    if zero.get("stage", 0) == 0:
        zero["stage"] = stage or 2
        applied.notes.append(f"zero_optimization.stage is {zero['stage']}, since offloading needs ZeRO")
    if isinstance(zero["stage"], bool) or zero["stage"] not in (1, 2, 3):
        raise BadInputError(f"zero_optimization.stage is {zero['stage']!r}, allowed is 1, 2 or 3")
    return zero


def _offload(applied: Applied, zero: dict[str, Any], config: ZenFlowConfig) -> None:
    offload = zero.get("offload_optimizer")
    if offload is None:
        offload = zero["offload_optimizer"] = {}
    if not isinstance(offload, dict):
        raise BadInputError(f"zero_optimization.offload_optimizer is {offload!r}, allowed is a JSON object")
    device = offload.get("device", "none")
    if device not in ("cpu", "none"):
        raise BadInputError(f'zero_optimization.offload_optimizer.device is {device!r}, allowed is "cpu" or "none"')
    offload["device"] = "cpu"
    offload.pop("ratio", None)
    if config.offload_ratio == 1:
        return
    if config.topk_ratio == 0 and zero["stage"] == 3:
        offload["ratio"] = config.offload_ratio
        applied.notes.append("upstream splits whole sub-groups, so that a ratio near it may be met instead")
        applied.notes.append("the learning rate scheduler does not reach the share that upstream keeps on the GPU")
        return
    applied.notes.append(
        f"offload_ratio {config.offload_ratio:g} was left out: upstream has it at stage 3 without ZenFlow only, so "
        "that all of the state is on the host, and the step is slower than measured"
    )


def _without_selection(applied: Applied, config: ZenFlowConfig) -> None:
    if config.update_interval != 1 or config.overlap_step:
        applied.notes.append(
            "topk_ratio 0 with windows or overlap was left out: upstream has neither without a selection, and "
            "updates everything in every step"
        )


def _refuse_what_zenflow_breaks(config: Mapping[str, Any]) -> None:
    optimizer = config.get("optimizer")
    kind = optimizer.get("type") if isinstance(optimizer, Mapping) else None
    if not isinstance(kind, str) or kind.lower() not in _OPTIMIZERS:
        raise BadInputError(
            f'optimizer.type is {kind!r}, allowed is "Adam" or "AdamW" in the ds_config: '
            "upstream's ZenFlow takes no optimizer from the script"
        )
    passes = config.get("gradient_accumulation_steps")
    if passes not in (None, 1, "auto"):
        raise BadInputError(
            f"gradient_accumulation_steps is {passes!r}, allowed is 1: upstream's ZenFlow steps at every backward pass"
        )
    half = config.get("fp16")
    if isinstance(half, Mapping) and half.get("enabled", False) not in (False, "auto"):
        raise BadInputError(
            "fp16.enabled is true, allowed is bf16: upstream's ZenFlow does not unscale the selected columns' gradients"
        )


def _prepare_for_zenflow(applied: Applied, zero: dict[str, Any]) -> None:
    optimizer = applied.config["optimizer"]
    parameters = optimizer.setdefault("params", {})
    if not isinstance(parameters, dict):
        raise BadInputError(f"optimizer.params is {parameters!r}, allowed is a JSON object")
    for name in _NOT_FOR_ZENFLOW:
        if parameters.pop(name, None) is not None:
            applied.notes.append(f"optimizer.params.{name} was left out: upstream's ZenFlow fails on it")
    if "weight_decay" not in parameters:
        parameters["weight_decay"] = 0.0
        applied.notes.append("optimizer.params.weight_decay is 0, said aloud: else selected columns decay by 0.01")
    if zero.get("reduce_scatter") is False:
        del zero["reduce_scatter"]
        applied.notes.append("zero_optimization.reduce_scatter was left out: upstream's ZenFlow fails without it")


def _zenflow_section(applied: Applied, config: ZenFlowConfig) -> dict[str, Any]:
    update = config.update_interval
    if update == "auto":
        update = _UPDATE_INTERVAL
        applied.notes.append(
            f'update_interval is {update} instead of "auto", which turns all weights into NaN upstream'
        )
    return {
        "topk_ratio": config.topk_ratio,
        "select_strategy": "step",
        "select_interval": _select_interval(applied, config, update),
        "update_interval": update,
        "full_warm_up_rounds": _warm_up(applied, config, update),
        "overlap_step": config.overlap_step,
        "offload": False,
        "auto_ratio": config.auto_ratio,
        "pt_reserved_cores_perc": config.pt_reserved_cores_perc,
    }


def _warm_up(applied: Applied, config: ZenFlowConfig, update: int) -> int:
    """Whole windows of it. Else a selection would cut a window short, and two updates would share a buffer."""
    least = update if config.overlap_step else 0
    steps = max(least, update * math.ceil(config.full_warm_up_rounds / update))
    if steps != config.full_warm_up_rounds:
        applied.notes.append(
            f"full_warm_up_rounds is {steps} instead of {config.full_warm_up_rounds}: upstream needs whole windows"
            + (", and at least one before it overlaps" if least else "")
        )
    return steps


def _select_interval(applied: Applied, config: ZenFlowConfig, update: int) -> int:
    """In whole windows."""
    wanted = RARE_SELECTION_STEPS if config.select_interval == "auto" else config.select_interval
    steps = update * math.ceil(wanted / update)
    if steps != config.select_interval:
        applied.notes.append(
            f"select_interval is {steps} instead of {json.dumps(config.select_interval)}: upstream needs a number of "
            f"steps, and whole windows of {update}"
        )
    return steps


def _say_what_differs(applied: Applied, zero: Mapping[str, Any], config: ZenFlowConfig) -> None:
    if config.deferred_update == "replay" and config.update_interval != 1:
        applied.notes.append("upstream makes one update a window, of the mean gradient; replay makes one for each step")
    applied.notes.append("upstream fails on weights of more than two dimensions, and on matrices of a single row")
    applied.notes.append("upstream does not clip the gradients of selected columns")
    applied.notes.append("at each selection upstream resets the selected columns' moments and rounds all masters")
    if zero["stage"] == 3:
        applied.notes.append("at stage 3 with several ranks upstream fails when a selection changes a rank's share")
