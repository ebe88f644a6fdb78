"""Presets for a ds_config: how one is chosen, which are refused, and how its settings are put in."""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from importlib import metadata
from typing import TYPE_CHECKING, Any

from zftune.ds_config.facts import RARE_SELECTION_STEPS, SAFE_UPDATE_INTERVAL, ZENFLOW_OPTIMIZERS
from zftune.ds_config.reading import at, read, require_unique, rewritten
from zftune.errors import BadInputError
from zftune.integrations.deepspeed.section import BEST
from zftune.store.preset_file import escaped, read_preset
from zftune.store.presets import differences, knobs_here
from zftune.store.types import Backend, Preset, PresetState
from zftune.text import either

if TYPE_CHECKING:
    from zenflow import ZenFlowConfig
    from zftune.store.store import Store


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
        stage: ZeRO stage of the preset, for a ds_config that has none.

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
    from zenflow import ConfigError, ZenFlowConfig

    own = {name: section[name] for name in _OWN if name in section} if isinstance(section, dict) else {}
    try:
        return ZenFlowConfig(**{**own, **knobs})
    except ConfigError as error:
        raise BadInputError(f"zero_optimization.zenflow: {error}") from error


def _zero_section(applied: Applied, stage: int) -> dict[str, Any]:
    zero = applied.config.setdefault("zero_optimization", {})
    if not isinstance(zero, dict):
        raise BadInputError.of("zero_optimization", zero, "a JSON object")
    if zero.get("stage", 0) == 0:
        zero["stage"] = stage or 2
        applied.notes.append(f"zero_optimization.stage is {zero['stage']}, since offloading needs ZeRO")
    if isinstance(zero["stage"], bool) or zero["stage"] not in (1, 2, 3):
        raise BadInputError.of("zero_optimization.stage", zero["stage"], "1, 2 or 3")
    return zero


def _offload(applied: Applied, zero: dict[str, Any], config: ZenFlowConfig) -> None:
    offload = zero.get("offload_optimizer")
    if offload is None:
        offload = zero["offload_optimizer"] = {}
    if not isinstance(offload, dict):
        raise BadInputError.of("zero_optimization.offload_optimizer", offload, "a JSON object")
    device = offload.get("device", "none")
    if device not in ("cpu", "none"):
        raise BadInputError.of("zero_optimization.offload_optimizer.device", device, '"cpu" or "none"')
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
    if not isinstance(kind, str) or kind.lower() not in ZENFLOW_OPTIMIZERS:
        raise BadInputError(
            f'optimizer.type is {kind!r}; it must be "Adam" or "AdamW" in the ds_config: '
            "upstream's ZenFlow takes no optimizer from the script"
        )
    passes = config.get("gradient_accumulation_steps")
    if passes not in (None, 1, "auto"):
        raise BadInputError(
            f"gradient_accumulation_steps is {passes!r}; it must be 1: upstream's ZenFlow steps at every backward pass"
        )
    half = config.get("fp16")
    if isinstance(half, Mapping) and half.get("enabled", False) not in (False, "auto"):
        raise BadInputError(
            "fp16.enabled is true; use bf16: upstream's ZenFlow does not unscale the selected columns' gradients"
        )


def _prepare_for_zenflow(applied: Applied, zero: dict[str, Any]) -> None:
    optimizer = applied.config["optimizer"]
    parameters = optimizer.setdefault("params", {})
    if not isinstance(parameters, dict):
        raise BadInputError.of("optimizer.params", parameters, "a JSON object")
    for name in _NOT_FOR_ZENFLOW:
        if parameters.pop(name, None) is not None:
            applied.notes.append(f"optimizer.params.{name} was left out: upstream's ZenFlow fails on it")
    if "weight_decay" not in parameters:
        parameters["weight_decay"] = 0.0
        applied.notes.append("optimizer.params.weight_decay is 0, set explicitly: else selected columns decay by 0.01")
    if zero.get("reduce_scatter") is False:
        del zero["reduce_scatter"]
        applied.notes.append("zero_optimization.reduce_scatter was left out: upstream's ZenFlow fails without it")


def _zenflow_section(applied: Applied, config: ZenFlowConfig) -> dict[str, Any]:
    update = config.update_interval
    if update == "auto":
        update = SAFE_UPDATE_INTERVAL
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


_MAKES_ONE = "`zftune run --online` makes one where it finds faster settings"


@dataclass(frozen=True, slots=True, kw_only=True)
class Wish:
    """What the user wants to be applied."""

    preset: str
    model: str | None = None
    """Name or model_id."""
    sequence: int | None = None
    provisional: bool = False
    """Take one that was proven for something else."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AppliedPreset:
    """A ds_config with a preset's knobs."""

    preset: Preset
    provisional: bool
    notes: tuple[str, ...]
    config: Mapping[str, Any]
    text: str
    """The ds_config as a file holds it: what the preset leaves alone stands as in the user's file."""

    def document(self) -> dict[str, Any]:
        return {
            "schema": "zftune.applied/1",
            "preset": self.preset.name,
            "provisional": self.provisional,
            "notes": list(self.notes),
            "ds_config": dict(self.config),
        }


def is_file(text: str) -> bool:
    """Whether the text names a file, not a preset of the store."""
    return "/" in text or text.endswith(".json")


def named(store: Store, name: str) -> Preset:
    """A preset of the store.

    Raises:
        BadInputError: there is none of that name; names those that are near.
        StoreError: the store could not be read.
    """
    found = {preset.name: preset for preset in store.presets()}
    if name in found:
        return found[name]
    what = f"preset '{escaped(name)[:80]}' is not in the store"
    if not found:
        raise BadInputError(f"{what}, which has no presets yet: {_MAKES_ONE}")
    from zenflow.names import near_names

    near = near_names(name, found, 0.4) or list(found)
    there = ", ".join(near) if len(near) <= 3 else "those that `zftune presets list` shows"
    raise BadInputError(f"{what}; there are {there}")


def apply_preset(store: Store, ds_config: str, wish: Wish) -> AppliedPreset:
    """Put a preset's knobs into a ds_config.

    Raises:
        BadInputError: there is no such preset, it was proven for something else, or upstream cannot train with it.
        StoreError: the store could not be read.
    """
    from zftune.telemetry.fingerprint import hardware, hw_id

    source, machine = read(ds_config), hardware()
    require_unique(source)
    config = source.config
    preset = _chosen(store, wish, hw_id(machine))
    others = _differences(preset, config, wish, hw_id(machine))
    if others and not wish.provisional:
        raise BadInputError(
            f"preset '{preset.name}': was proven for something else ({'; '.join(others)}); --provisional takes it"
        )
    knobs, about_cores = knobs_here(preset, machine["usable_cores"])
    applied = apply(config, knobs, stage=preset.key.stage, backend=preset.key.backend)
    reasons = ["nothing has changed: DeepSpeed can do nothing of this preset"] if applied.config == config else []
    if others:
        reasons.append(f"provisional: the preset was proven for something else ({'; '.join(others)})")
    elif preset.imported:
        reasons.append("provisional: the preset was imported, not measured here")
    if preset.state is PresetState.WITHDRAWN:
        reasons.append(f"the preset is withdrawn: {preset.withdrawn_because}")
    if preset.key.world_size > 1:
        reasons.append(f"the preset was found on {preset.key.ranks}")
    reasons += [*_not_compared(config, wish), *([about_cores] if about_cores else [])]
    if source.flaw is not None:
        reasons.append("the file is written anew as plain JSON, without its comments")
    return AppliedPreset(
        preset=preset,
        provisional=bool(others) or preset.imported,
        notes=(*reasons, *applied.notes, *_about_deepspeed(applied.config)),
        config=applied.config,
        text=rewritten(source, applied.config),
    )


def _chosen(store: Store, wish: Wish, hw_id: str) -> Preset:
    if is_file(wish.preset):
        return read_preset(wish.preset)
    if wish.preset != BEST:
        return named(store, wish.preset)
    presets = store.presets()
    if not presets:
        raise BadInputError(f"--preset 'best': the store has no presets yet: {_MAKES_ONE}, or give a preset's file")
    here = [one for one in presets if one.key.hw_id == hw_id and one.state is PresetState.ACTIVE]
    if wish.model is not None:
        here = [one for one in here if _is_of(one, wish.model)]
    if not here:
        of = "" if wish.model is None else f" and model '{escaped(wish.model)[:80]}'"
        what = f"--preset 'best': there is none for this hardware{of}"
        raise BadInputError(f"{what}: give a name or a file; {_MAKES_ONE}")
    models = {one.key.model_id: one.model.name or one.key.model_id for one in here}
    if len(models) > 1:
        raise BadInputError(f"--preset 'best' needs --model: {either(sorted(models.values()))}")
    return min(here, key=lambda one: (one.imported, -one.created_unix_s))


def _differences(preset: Preset, config: Mapping[str, Any], wish: Wish, hw_id: str) -> list[str]:
    known: dict[str, Any] = {"hw_id": hw_id}
    if wish.sequence is not None:
        known["sequence"] = wish.sequence
    if wish.model is not None and not _is_of(preset, wish.model):
        known["model_id"] = escaped(wish.model)[:80]
    stage = at(config, ("zero_optimization", "stage"))
    if stage in (1, 2, 3):
        known["stage"] = stage
    if isinstance(config.get("train_micro_batch_size_per_gpu"), int):
        known["micro_batch"] = config["train_micro_batch_size_per_gpu"]
    dtype = _dtype(config)
    if dtype is not None:
        known["dtype"] = dtype
    return differences(replace(preset.key, **known), preset.key)


def _not_compared(config: Mapping[str, Any], wish: Wish) -> list[str]:
    unknown = [] if wish.model is not None else ["the model (--model)"]
    unknown += [] if wish.sequence is not None else ["the sequence (--sequence)"]
    if not isinstance(config.get("train_micro_batch_size_per_gpu"), int):
        unknown.append("the micro-batch")
    unknown.append("the number of GPUs")
    return [f"a ds_config does not tell {', '.join(unknown)}: whether the preset is for them was not compared"]


def _dtype(config: Mapping[str, Any]) -> str | None:
    """None where somebody else fills it in."""
    for section, dtype in (("bf16", "bfloat16"), ("bfloat16", "bfloat16"), ("fp16", "float16")):
        found = config.get(section)
        enabled = found.get("enabled", False) if isinstance(found, Mapping) else False
        if enabled == "auto":
            return None
        if enabled:
            return dtype
    return "float32"


def _is_of(preset: Preset, model: str) -> bool:
    return model in (preset.key.model_id, preset.model.name)


def _about_deepspeed(config: Mapping[str, Any]) -> list[str]:
    from zftune.doctor.software import defects

    if "zenflow" not in config["zero_optimization"]:
        return []
    try:
        version = metadata.version("deepspeed")
    except metadata.PackageNotFoundError:
        return []
    return [f"{found.finding} {found.fix}".rstrip(".") for found in defects(version) if found.status == "broken"]
