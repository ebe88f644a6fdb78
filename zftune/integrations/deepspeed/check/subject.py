"""A ds_config under examination: what the rules ask of it."""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, TypeAlias

from zenflow.config import is_number
from zftune.doctor.software import numbers
from zftune.ds_config.facts import GOOD, ZENFLOW_DEFAULTS
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
)
from zftune.ds_config.tables import newest, table
from zftune.integrations.deepspeed.asking import AskingError, ask
from zftune.integrations.deepspeed.check.findings import THE_FILE, Change, Finding, Severity
from zftune.integrations.deepspeed.outcome import Outcome, outcome
from zftune.integrations.deepspeed.section import Refusal, Section
from zftune.integrations.deepspeed.verdict import Fault, faults, ranks_that_fit, undecided
from zftune.store.types import Backend
from zftune.telemetry.fingerprint import installed

UPSTREAM: tuple[Backend, ...] = ("deepspeed",)
OURS: tuple[Backend, ...] = ("zenflow",)
BOTH: tuple[Backend, ...] = ("deepspeed", "zenflow")

ZERO = "zero_optimization"
ZENFLOW = f"{ZERO}.zenflow"
OFFLOAD = f"{ZERO}.offload_optimizer"

FaultOfPreset: TypeAlias = Callable[[str], str | None]
"""What is wrong with a preset of this name, in words; None: nothing is."""


@dataclass(frozen=True)
class Subject:
    """What is judged, and for whom.

    `backend` None judges for both; `forced` says that it comes from the command line, `upstream_asked` that somebody
    asks for DeepSpeed's own runtime. `flaw` says why the text is not plain JSON. `world_size` None is any number of
    ranks. Without `fault_of_preset` presets are not looked up, without `script` no script is read.
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
    fault_of_preset: FaultOfPreset | None = None
    script: Path | None = None

    def at(self, dotted: str) -> Any:
        """A setting's value; MISSING where it is not there."""
        return at(self.config, path_of(dotted))

    def section(self, dotted: str) -> Mapping[str, Any]:
        """A section; empty where there is none."""
        found = self.at(dotted)
        return found if isinstance(found, Mapping) else {}

    def enabled(self, *names: str) -> bool:
        """Whether one of these sections is switched on."""
        return any(self.at(f"{name}.enabled") is True for name in names)

    @cached_property
    def hugging_face(self) -> bool:
        """Whether it is of the Trainer or Accelerate: "auto" says so."""
        return self.through_hugging_face or is_hugging_face(self.config)

    @cached_property
    def stage(self) -> int:
        """ZeRO stage as DeepSpeed has it; 0 where it is nothing that DeepSpeed knows."""
        stage = self.at(f"{ZERO}.stage")
        if stage == "auto":
            return 2
        if isinstance(stage, str) and stage.strip().isdecimal():
            stage = int(stage)
        return int(stage) if isinstance(stage, (int, float)) and stage in (1, 2, 3) else 0

    @cached_property
    def device(self) -> str:
        """Where upstream keeps the optimizer's state."""
        device = offload_device(self.config)
        return device if device in ("cpu", "nvme") else "none"

    @cached_property
    def has_zenflow(self) -> bool:
        """Whether there is a "zenflow" section."""
        return isinstance(self.at(ZENFLOW), Mapping)

    @cached_property
    def zenflow(self) -> Mapping[str, Any]:
        """Its settings with upstream's defaults, as upstream has them after dropping "auto"."""
        section = self.section(ZENFLOW)
        return {**ZENFLOW_DEFAULTS, **{name: value for name, value in section.items() if value != "auto"}}

    @property
    def flattens(self) -> bool:
        """Whether it is ZenFlow at a stage whose optimizer is that of stages 1 and 2."""
        return self.has_zenflow and self.stage in (1, 2)

    @cached_property
    def update_interval(self) -> int | None:
        """In steps; None where it is no number that upstream takes."""
        value = self.zenflow["update_interval"]
        return int(value) if is_whole(value) and value >= 1 else None

    @cached_property
    def optimizer(self) -> str | None:
        """What is the optimizer's type, in small letters; None: the ds_config names none."""
        kind = self.at("optimizer.type")
        return kind.lower() if isinstance(kind, str) else None

    @property
    def release(self) -> tuple[int, ...]:
        """Of DeepSpeed."""
        return numbers(self.version)

    @cached_property
    def outcome(self) -> Outcome:
        """What `zftune run` does with it, which asks no DeepSpeed before it starts: that would take seconds."""
        known = table(self.version) is not None and not self._sections_to_ask
        asked = Section(backend=self.backend if self.forced else None)
        return outcome(self.given, asked, self.faults if known else ())

    @cached_property
    def own_refusals(self) -> tuple[Refusal, ...]:
        """What the backend zenflow refuses where it trains; nothing where `zftune run` leaves DeepSpeed alone."""
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
        """What DeepSpeed itself refuses: by the table of its version, else by the installed one's own word."""
        known = table(self.version)
        if known is not None and not self._sections_to_ask:
            return tuple(faults(self.given, known, self.world_size))
        if self._answers is not None:
            return tuple(self._answers)
        return tuple(faults(self.given, known or newest(), self.world_size))

    @property
    def is_guessed(self) -> bool:
        """Whether `faults` are another version's, since nobody knows this one."""
        return table(self.version) is None and self._answers is None

    @cached_property
    def undecided(self) -> tuple[str, ...]:
        """Sections that no table is about, where DeepSpeed could not be asked either."""
        return self._sections_to_ask if self._sections_to_ask and self._answers is None else ()

    @cached_property
    def _sections_to_ask(self) -> tuple[str, ...]:
        return undecided(self.given)

    @cached_property
    def _answers(self) -> list[Fault] | None:
        """None: there is no DeepSpeed to be asked, or it is another one than what is judged for."""
        if installed("deepspeed") != self.version:
            return None
        try:
            (answers,) = ask([self.given], self.world_size or ranks_that_fit(self.given))
        except AskingError:
            return None
        return [Fault(tuple(one["path"] or THE_FILE), f"something else: {one['error']}") for one in answers]

    @cached_property
    def given(self) -> Mapping[str, Any]:
        """What DeepSpeed is given: with Hugging Face's values for "auto"."""
        return given(Source(dict(self.config), hugging_face=self.hugging_face))

    def number_in(self, path: SettingPath) -> Change | None:
        """What a string, or a list of them, spells in numbers; None: no numbers, or some that are refused."""
        value = at(self.config, path)
        number = _spelled(value)
        if number == value or (isinstance(number, float) and not math.isfinite(number)):
            return None
        config = copy.deepcopy(dict(self.config))
        put(config, path, number)
        mended, dotted = replace(self, config=config), ".".join(path)
        refused = {one.field for one in mended.own_refusals if self.backend != "deepspeed"}
        if dotted in refused or (self.backend != "zenflow" and path in {one.path for one in mended.faults}):
            return None
        return Change(path, number)

    def elsewhere(self) -> tuple[Change, ...]:
        """What makes the backend zenflow train it, which has no such fault; nothing where that is not to be had."""
        if self.backend is not None or self.own_refusals:
            return ()
        return (Change(("zftune", "backend"), "zenflow"),)

    def where_asked(self, *changes: Change) -> tuple[Change, ...]:
        """Changes that only DeepSpeed's own ZenFlow needs, of what both runtimes train by, such as clipping.

        Args:
            changes: nothing is left of them where nobody asks for that runtime.
        """
        return changes if self.upstream_asked else ()

    def finding(
        self,
        rule: str,
        setting: str | SettingPath,
        severity: Severity,
        reason: str | Refusal,
        *changes: Change,
        backends: tuple[Backend, ...] = UPSTREAM,
        advice: str = "",
    ) -> Finding:
        """A finding about a setting.

        Args:
            rule: its name.
            setting: by its name with dots, or by the names on the way to it.
            severity: how bad.
            reason: a sentence or two, or what `zftune run` refuses.
            changes: what mends it.
            backends: with which it matters.
            advice: what to do, in words.
        """
        path = path_of(setting) if isinstance(setting, str) else setting
        if not advice and changes == (Change(("zftune", "backend"), "zenflow"),):
            advice = "zftune run then trains it as the file says"
        return Finding(
            rule=rule,
            path=path,
            value=at(self.config, path),
            severity=severity,
            reason=reason.reason if isinstance(reason, Refusal) else reason,
            refusal=reason if isinstance(reason, Refusal) else None,
            backends=backends,
            changes=changes,
            advice=advice,
        )


Rule: TypeAlias = Callable[[Subject], Iterator[Finding]]


def of_zenflow(*rules: Rule) -> Rule:
    """Rules as one, which finds nothing where there is no "zenflow" section."""

    def all_of_them(subject: Subject) -> Iterator[Finding]:
        for rule in rules if subject.has_zenflow else ():
            yield from rule(subject)

    return all_of_them


def _spelled(value: Any) -> Any:
    """A value with the numbers that strings in it spell, "[0.9, 0.999]" being a list of them."""
    if isinstance(value, str) and value.strip().startswith("["):
        try:
            value = json.loads(value)
        except ValueError:
            return value
    return [number_of(one) for one in value] if isinstance(value, list) else number_of(value)


def change(dotted: str, value: Any) -> Change:
    """Set a setting."""
    return Change(path_of(dotted), value)


def left_out(dotted: str) -> Change:
    """Take a setting out."""
    return Change(path_of(dotted), MISSING)


def is_whole(value: object) -> bool:
    """Whether it is an integer, be it written as 4.0."""
    return is_number(value) and value == int(value)  # type: ignore[call-overload]
