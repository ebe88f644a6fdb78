"""A ds_config under examination: what the rules ask of it."""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, TypeAlias

from zenflow.config import is_number
from zftune.doctor.software import numbers
from zftune.ds_config.facts import GOOD, SAFE_UPDATE_INTERVAL, ZENFLOW_DEFAULTS
from zftune.ds_config.reading import (
    MISSING,
    SettingPath,
    Source,
    at,
    given,
    is_hugging_face,
    number_of,
    offload_device,
    path_of,
    put,
    stage_of,
)
from zftune.integrations.deepspeed.asking import Ask, Fault, ranks_that_fit
from zftune.integrations.deepspeed.check.findings import Change
from zftune.integrations.deepspeed.outcome import Outcome, outcome
from zftune.integrations.deepspeed.section import Refusal, Section
from zftune.store.types import Backend

ZERO = "zero_optimization"
ZENFLOW = f"{ZERO}.zenflow"
OFFLOAD = f"{ZERO}.offload_optimizer"

FaultOfPreset: TypeAlias = Callable[[str], str | None]
"""What is wrong with a preset of this name, in words; None: nothing is."""


@dataclass(frozen=True)
class Subject:
    """What is judged, and for whom.

    `backend` None judges for both; `forced`: it comes from the command line; `upstream_asked`: somebody asks for
    DeepSpeed's own runtime. `flaw`: why the text is not plain JSON. `world_size` None is any number of ranks. Without
    `ask` DeepSpeed is not asked, without `fault_of_preset` presets are not looked up.
    """

    config: Mapping[str, Any]
    backend: Backend | None = None
    forced: bool = False
    upstream_asked: bool = False
    version: str = GOOD
    duplicates: tuple[str, ...] = ()
    flaw: str | None = None
    through_hugging_face: bool = False
    world_size: int | None = None
    ask: Ask | None = None
    fault_of_preset: FaultOfPreset | None = None

    def at(self, dotted: str) -> Any:
        """A setting's value; MISSING where it is not there."""
        return at(self.config, path_of(dotted))

    def has(self, dotted: str) -> bool:
        return self.at(dotted) is not MISSING

    def enabled(self, *names: str) -> bool:
        return any(self.at(f"{name}.enabled") is True for name in names)

    @cached_property
    def hugging_face(self) -> bool:
        """Whether it is of the Trainer or Accelerate: the word "auto" shows it."""
        return self.through_hugging_face or is_hugging_face(self.config)

    @cached_property
    def stage(self) -> int:
        """ZeRO stage as DeepSpeed has it; 0 where it is nothing that DeepSpeed knows."""
        stage = stage_of(self.config)
        return 2 if stage == "auto" else stage if is_number(stage) and stage in (1, 2, 3) else 0

    @cached_property
    def device(self) -> str:
        device = offload_device(self.config)
        return device if device in ("cpu", "nvme") else "none"

    @cached_property
    def has_zenflow(self) -> bool:
        return isinstance(self.at(ZENFLOW), Mapping)

    @cached_property
    def zenflow(self) -> Mapping[str, Any]:
        """Its settings with upstream's defaults, as upstream has them after dropping "auto"."""
        section = self.at(ZENFLOW) if self.has_zenflow else {}
        return {**ZENFLOW_DEFAULTS, **{name: value for name, value in section.items() if value != "auto"}}

    @property
    def flattens(self) -> bool:
        """Whether it is ZenFlow at a stage whose optimizer is that of stages 1 and 2."""
        return self.has_zenflow and self.stage in (1, 2)

    @property
    def overlaps(self) -> bool:
        return self.zenflow["overlap_step"] is True

    @cached_property
    def update_interval(self) -> int | None:
        """In steps; None where it is no number that upstream takes."""
        value = self.zenflow["update_interval"]
        return int(value) if is_whole(value) and value >= 1 else None

    @cached_property
    def selects_every(self) -> int | None:
        """Steps between two selections of columns, where they are counted and valid; None elsewhere."""
        select = self.zenflow["select_interval"]
        counts = self.zenflow["select_strategy"] == "step" and is_whole(select)
        return int(select) if counts and select >= (self.update_interval or 1) else None

    def windows(self, steps: float) -> int:
        whole = self.update_interval or SAFE_UPDATE_INTERVAL
        return whole * max(1, math.ceil(steps / whole))

    @cached_property
    def optimizer(self) -> str | None:
        """The optimizer's type, in small letters; None: the ds_config names none."""
        kind = self.at("optimizer.type")
        return kind.lower() if isinstance(kind, str) else None

    @property
    def release(self) -> tuple[int, ...]:
        return numbers(self.version)

    @cached_property
    def outcome(self) -> Outcome:
        return outcome(self.given, Section(backend=self.backend if self.forced else None), self.faults)

    @cached_property
    def own_refusals(self) -> tuple[Refusal, ...]:
        return self._refusals("zenflow")

    @cached_property
    def upstream_refusals(self) -> tuple[Refusal, ...]:
        """What `zftune run` refuses with the backend deepspeed, likewise."""
        return self._refusals("deepspeed")

    def _refusals(self, backend: Backend) -> tuple[Refusal, ...]:
        done = outcome(self.given, Section(backend=backend))
        return done.refusals if done.backend is not None else ()

    @cached_property
    def faults(self) -> tuple[Fault, ...]:
        if self.ask is None:
            return ()
        return tuple(self.ask(self.given, self.world_size or ranks_that_fit(self.given)))

    @cached_property
    def given(self) -> Mapping[str, Any]:
        """What DeepSpeed is given: with Hugging Face's values for "auto"."""
        return given(Source(dict(self.config), hugging_face=self.hugging_face))

    def is_taken(self, *changes: Change) -> bool:
        """Whether nobody who judges refuses the settings that are changed so."""
        config = copy.deepcopy(dict(self.config))
        for change in changes:
            put(config, change.path, change.value)
        mended, paths = replace(self, config=config), [change.path for change in changes]
        refused = {path_of(one.field) for one in mended.own_refusals} if self.backend != "deepspeed" else set()
        refused |= {one.path for one in mended.faults} if self.backend != "zenflow" else set()
        return refused.isdisjoint(paths)

    def number_in(self, path: SettingPath) -> Change | None:
        """What a string, or a list of them, spells in numbers; None: no numbers, or some that are refused."""
        value = at(self.config, path)
        number = _spelled(value)
        if number == value or (isinstance(number, float) and not math.isfinite(number)):
            return None
        change = Change(path, number)
        return change if self.is_taken(change) else None

    def elsewhere(self) -> tuple[Change, ...]:
        """What makes the backend zenflow train it, which has no such fault; nothing where that is not to be had."""
        if self.backend is not None or self.own_refusals or offload_device(self.given) == "none":
            return ()
        return (Change(("zftune", "backend"), "zenflow"),)


def _spelled(value: Any) -> Any:
    """A value with the numbers that strings in it spell, "[0.9, 0.999]" being a list of them."""
    if isinstance(value, str) and value.strip().startswith("["):
        try:
            value = json.loads(value)
        except ValueError:
            return value
    return [number_of(one) for one in value] if isinstance(value, list) else number_of(value)


def changes(settings: Mapping[str, Any]) -> Iterator[Change]:
    """Settings, by their names with dots, with other values; MISSING takes one out."""
    for dotted, value in settings.items():
        yield Change(path_of(dotted), value)


def is_whole(value: Any) -> bool:
    """Whether it is an integer, be it written as 4.0."""
    return is_number(value) and value == int(value)
