"""Choosing the preset for a ds_config, and refusing one that was proven for something else."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from importlib import metadata
from typing import TYPE_CHECKING, Any

from zftune.errors import BadInputError
from zftune.integrations.deepspeed.ds_config import read
from zftune.store.apply import apply
from zftune.store.document import escaped, read_preset
from zftune.store.lookup import differences, knobs_here
from zftune.store.presets import near_names
from zftune.store.types import Preset, PresetState

if TYPE_CHECKING:
    from zftune.store.store import Store

BEST = "best"
_MAKES_ONE = "`zftune tune` makes one where it finds faster knobs"


@dataclass(frozen=True, slots=True, kw_only=True)
class Wish:
    """What the user wants to be applied."""

    preset: str
    """A name, a file, or "best"."""
    model: str | None = None
    """Name or model_id."""
    sequence: int | None = None
    """Tokens."""
    provisional: bool = False
    """Take one that was proven for something else."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AppliedPreset:
    """A ds_config with a preset's knobs."""

    preset: Preset
    provisional: bool
    notes: tuple[str, ...]
    config: Mapping[str, Any]

    @property
    def text(self) -> str:
        """The ds_config as a file holds it."""
        return json.dumps(self.config, indent=2) + "\n"

    def document(self) -> dict[str, Any]:
        """What was done, as JSON."""
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
    what = f"preset '{escaped(name)[:80]}': is not in the store"
    if not found:
        raise BadInputError(f"{what}, which has no presets yet: {_MAKES_ONE}")
    near = near_names(name, list(found))
    allowed = ", ".join(near) if near else "one that `zftune presets list` shows"
    raise BadInputError(f"{what}, allowed is {allowed}")


def apply_preset(store: Store, ds_config: str, wish: Wish) -> AppliedPreset:
    """Put a preset's knobs into a ds_config.

    Args:
        store: where presets are.
        ds_config: path of the user's.
        wish: which preset.

    Raises:
        BadInputError: there is no such preset, it was proven for something else, or upstream cannot train with it.
        StoreError: the store could not be read.
    """
    from zftune.telemetry.fingerprint import hw_id
    from zftune.telemetry.hardware import hardware

    config, machine = read(ds_config).config, hardware()
    preset = _chosen(store, wish, hw_id(machine))
    others = _differences(preset, config, wish, hw_id(machine))
    if others and not wish.provisional:
        raise BadInputError(
            f"preset '{preset.name}': was proven for something else ({'; '.join(others)}), allowed with --provisional"
        )
    knobs, about_cores = knobs_here(preset, machine["usable_cores"])
    applied = apply(config, knobs, stage=preset.key.stage, backend=preset.key.backend)
    reasons = []
    if others:
        reasons.append(f"provisional: the preset was proven for something else ({'; '.join(others)})")
    elif preset.imported:
        reasons.append("provisional: the preset was imported, not measured here")
    if preset.state is PresetState.WITHDRAWN:
        reasons.append(f"the preset is withdrawn: it lost {preset.lost_comparisons} later comparisons")
    if preset.key.world_size > 1:
        reasons.append(f"the preset was found on {preset.key.ranks}")
    reasons += [*_not_compared(config, wish), *([about_cores] if about_cores else [])]
    notes = (*reasons, *applied.notes, *_about_deepspeed(applied.config))
    is_provisional = bool(others) or preset.imported
    return AppliedPreset(preset=preset, provisional=is_provisional, notes=notes, config=applied.config)


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
        raise BadInputError(f"{what}, allowed is a name or a file; {_MAKES_ONE}")
    models = {one.key.model_id: one.model.name or one.key.model_id for one in here}
    if len(models) > 1:
        raise BadInputError(f"--preset 'best': needs --model, allowed are {', '.join(sorted(models.values()))}")
    return min(here, key=lambda one: (one.imported, -one.created_unix_s))


def _differences(preset: Preset, config: Mapping[str, Any], wish: Wish, hw_id: str) -> list[str]:
    known: dict[str, Any] = {"hw_id": hw_id}
    if wish.sequence is not None:
        known["sequence"] = wish.sequence
    if wish.model is not None and not _is_of(preset, wish.model):
        known["model_id"] = escaped(wish.model)[:80]
    zero = config.get("zero_optimization")
    stage = zero.get("stage") if isinstance(zero, Mapping) else None
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
    """What is wrong with the installed version under ZenFlow."""
    from zftune.doctor.deepspeed import defects

    if "zenflow" not in config["zero_optimization"]:
        return []
    try:
        version = metadata.version("deepspeed")
    except metadata.PackageNotFoundError:
        return []
    return [f"{found.finding} {found.fix}".rstrip(".") for found in defects(version) if found.status == "broken"]
