"""The knobs that a training begins with: those of its ds_config, or of a preset that was proven for it."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from zenflow import ConfigError, ZenFlowConfig
from zenflow.ranks import several_ranks
from zenflow.sharded import ranks_with_rows
from zftune.errors import BadInputError, StoreError
from zftune.exactness import EXACT
from zftune.integrations.deepspeed.section import BEST, NO_PRESET, Section
from zftune.store.types import STALENESS, Backend, Key, Preset, PresetState, Quality, Query
from zftune.tuner.ranks import hosts_of_ranks
from zftune.tuner.space import TRAJECTORY_KNOBS
from zftune.variables import FRESH

if TYPE_CHECKING:
    from zftune.store.store import Store

_logger = logging.getLogger("zftune")


@dataclass(frozen=True, slots=True)
class Training:
    """What is known of a training before its first step."""

    module: nn.Module
    backend: Backend
    stage: int
    dtype: str
    micro_batch: int
    world_size: int
    quality: Quality
    nodes: int = 1
    shards: int = 1
    """Ranks that share out the state of whole weights; of weights that are sharded they tell it themselves."""

    def key(self) -> Key:
        """Under which presets are looked up; the sequence is not known yet, so the shortest will do."""
        from zftune.telemetry.fingerprint import fingerprint, recomputes

        return Key(
            **fingerprint(self.module),
            backend=self.backend,
            stage=self.stage,
            dtype=self.dtype,
            world_size=self.world_size,
            nodes=self.nodes,
            shards=max([self.shards, *map(ranks_with_rows, self.module.parameters())]),
            micro_batch=self.micro_batch,
            sequence=0,
            checkpointing=recomputes(self.module),
            quality=self.quality,
        )


@dataclass(frozen=True, slots=True)
class Chosen:
    """Knobs by name, and where they come from."""

    knobs: Mapping[str, Any]
    origin: str
    because: str = ""

    @property
    def sentence(self) -> str:
        return f"{self.because}, so {self.origin}" if self.because else self.origin


def choose(training: Training, section: Section) -> Chosen:
    """The knobs of a preset that is asked for, or that is exactly for this training; on rank 0, for all.

    Raises:
        BadInputError: the preset that is asked for by name is not there, cannot be read or is for something else.
    """
    if not several_ranks():
        return _choose(training, section)
    training = replace(training, nodes=len(set(hosts_of_ranks())))
    told: list[Any] = [None]
    if torch.distributed.get_rank() == 0:
        try:
            told = [_choose(training, section)]
        except BadInputError as error:
            told = [str(error)]
    torch.distributed.broadcast_object_list(told, src=0)
    if isinstance(told[0], str):
        raise BadInputError(told[0])
    chosen: Chosen = told[0]
    return chosen


def _choose(training: Training, section: Section) -> Chosen:
    from zftune.store import open_store

    begins_anew = section.preset is None and os.environ.get(FRESH) == "1"
    if section.preset == NO_PRESET or begins_anew:
        return Chosen({}, "the settings are the ds_config's", "--fresh takes no preset" if begins_anew else "")
    with open_store() as store:
        for notice in store.notices:
            _logger.warning("%s", notice)
        if section.named_preset is None:
            return _best(store, training, asked=section.preset == BEST)
        return _named(store, training, section.named_preset)


def _best(store: Store, training: Training, *, asked: bool) -> Chosen:
    from zftune.store.presets import find
    from zftune.telemetry.fingerprint import hardware

    query = Query(key=training.key(), ratios=None, usable_cores=hardware()["usable_cores"])
    try:
        presets = list(store.presets())
        match = find(query, presets)
    except StoreError as error:  # it trains all the same
        return Chosen({}, "the settings are the ds_config's", str(error))
    if match is None:
        return Chosen({}, "the settings are the ds_config's", _why_none(presets, query.key) if asked else "")
    return Chosen(match.knobs, match.reason)


def _why_none(presets: Sequence[Preset], key: Key) -> str:
    from zftune.store.presets import differences

    here = [one for one in presets if (one.key.model_id, one.key.hw_id) == (key.model_id, key.hw_id)]
    active = [differences(key, one.key) for one in here if one.state is PresetState.ACTIVE]
    if active:
        nearest = min(active, key=len)
        return f"the nearest preset for this model on this hardware is of {', '.join(nearest) or 'another machine'}"
    gone = (
        "the presets for this model on this hardware are withdrawn"
        if here
        else "no preset is for this model on this hardware yet"
    )
    return f"{gone} (zftune run --online makes one)"


def _named(store: Store, training: Training, name: str) -> Chosen:
    from zftune.integrations.deepspeed.presets import is_file, named
    from zftune.store.preset_file import read_preset
    from zftune.store.presets import knobs_here
    from zftune.telemetry.fingerprint import hardware

    try:
        preset: Preset = read_preset(name) if is_file(name) else named(store, name)
    except StoreError as error:
        raise BadInputError(f"preset '{name}': {error}") from error
    key = training.key()
    knobs, about_cores = knobs_here(preset, hardware()["usable_cores"])
    sentence = f"the settings are of preset {preset.name}{provisional(preset, key)}"
    return Chosen(knobs, sentence if about_cores is None else f"{sentence}; {about_cores}")


def provisional(preset: Preset, key: Key) -> str:
    """Why a preset that is asked for by name is not proven for a training; empty: it is."""
    from zftune.store.presets import differences

    if others := differences(replace(key, sequence=min(key.sequence, preset.key.sequence)), preset.key):
        return f", provisional: it was proven for something else ({'; '.join(others)})"
    return ", provisional: it was imported, not measured here" if preset.imported else ""


def late_knobs(own: ZenFlowConfig, quality: Quality, device: torch.device) -> tuple[ZenFlowConfig, str]:
    """The initial knobs, and their origin, if late updates are allowed and neither ds_config nor preset has knobs."""
    from zftune.hiding import FIRST_STEPS, late_defaults, named

    if device.type != "cpu":
        return own, f"the planner finds the settings in {FIRST_STEPS} steps, each of which waits for every update"
    late = late_defaults(quality, own)
    return (
        late,
        (
            f"the settings are the default of this quality ({named(late)}), since on a plain CPU there is nothing to "
            "plan; what they cost is not bounded here: compare the loss with that of quality exact"
        ),
    )


def knobs_on_host(config: ZenFlowConfig, quality: Quality, topk_ratio: object) -> tuple[ZenFlowConfig, str]:
    """The knobs where weights are on the host: no column is selected, and what may come late is one step late.

    Args:
        topk_ratio: the ds_config's own; None: it has none.

    Returns:
        The knobs, and what to say of them; nothing where they are as they were.

    Raises:
        BadInputError: the ds_config asks for columns that are updated on the device.
    """
    if topk_ratio:
        raise BadInputError(
            f"zero_optimization.zenflow.topk_ratio is {topk_ratio} and the weights are on the host (offload_param), "
            "where no column is selected; it must be 0"
        )
    if topk_ratio is not None:
        return config, ""
    late: dict[str, Any] = {"update_interval": STALENESS[quality], "apply_lag": None, "overlap_step": True}
    changed = replace(config, topk_ratio=0.0, **(late if quality != "exact" else {}))
    if changed == config:
        return config, ""
    window = "" if quality == "exact" else f" and update_interval {changed.update_interval}"
    return changed, f", but for topk_ratio 0{window}, since no column of weights on the host is selected"


def waited(own: ZenFlowConfig, quality: Quality) -> ZenFlowConfig:
    """The ds_config's knobs as a promise has them: with "exact", every update is waited for."""
    return replace(own, **EXACT) if quality == "exact" else own


def instead_of(given: ZenFlowConfig | None, config: ZenFlowConfig, chosen: Chosen, *, asked: bool) -> str:
    """What a preset that nobody asked for replaces of the ds_config's settings, for its sentence; "": nothing.

    Args:
        given: of the ds_config's "zenflow" section; None: it has none.
    """
    if given is None or asked or not chosen.knobs:
        return ""
    own = {name: getattr(given, name) for name in TRAJECTORY_KNOBS if getattr(given, name) != getattr(config, name)}
    told = ", ".join(f"{name} {value}" for name, value in own.items() if value is not None)
    return f", instead of the ds_config's {told} (which --preset none keeps)" if told else ""


def with_knobs(own: ZenFlowConfig, chosen: Chosen, quality: Quality) -> ZenFlowConfig:
    """The ds_config's knobs with a preset's.

    Raises:
        BadInputError: a knob has a value that is not allowed, or breaks the promise.
    """
    known = {field.name for field in fields(ZenFlowConfig)}
    whole: dict[str, Any] = {"apply_lag": None} if "update_interval" in chosen.knobs else {}
    whole |= {name: value for name, value in chosen.knobs.items() if name in known}
    try:
        config = replace(own, **whole)
    except ConfigError as error:
        raise BadInputError(f"zftune.preset: {error}") from error
    if quality == "exact" and (config.update_interval != 1 or config.overlap_step):
        late = {name: value for name, value in asdict(config).items() if name in TRAJECTORY_KNOBS}
        raise BadInputError(
            f'zftune.preset has {late}, under which updates come late; quality "exact" waits for every one: '
            'set "quality": "published" to allow late ones'
        )
    return config
