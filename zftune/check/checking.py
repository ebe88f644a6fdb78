"""All rules over one ds_config."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from zftune.check import (
    rules_deepspeed,
    rules_file,
    rules_intervals,
    rules_offload,
    rules_own,
    rules_precision,
    rules_zenflow,
)
from zftune.check import rules_zenflow_notes as notes
from zftune.check.findings import Finding, Report, by_severity
from zftune.check.subject import FaultOfPreset, Rule, Subject
from zftune.integrations.deepspeed.ds_config import Source
from zftune.integrations.deepspeed.facts import GOOD
from zftune.store.types import Backend

RULES: tuple[Rule, ...] = (
    *rules_file.RULES,
    *rules_deepspeed.RULES,
    *rules_intervals.RULES,
    *rules_zenflow.RULES,
    *rules_precision.RULES,
    *rules_offload.RULES,
    *notes.RULES,
    *rules_own.RULES,
)


def check(
    source: Source | Mapping[str, Any],
    *,
    backend: Backend | None = None,
    version: str | None,
    world_size: int | None = None,
    fault_of_preset: FaultOfPreset | None = None,
) -> Report:
    """What is wrong with a ds_config.

    Args:
        source: the ds_config.
        backend: for which to judge; None: as its "zftune" section says, and for both where that says nothing.
        version: of DeepSpeed; None: it is not installed, and is judged as 0.19.6.
        world_size: number of ranks; None: any that the batch sizes fit.
        fault_of_preset: tells what is wrong with a preset's name; None: presets are not looked up.
    """
    if not isinstance(source, Source):
        source = Source(dict(source))
    section = source.config.get("zftune")
    said = section.get("backend") if isinstance(section, Mapping) else None
    chosen: Backend | None = backend or (
        "zenflow" if said == "zenflow" else "deepspeed" if said == "deepspeed" else None
    )
    subject = Subject(
        config=source.config,
        backend=chosen,
        forced=backend is not None,
        version=version or GOOD,
        duplicates=source.duplicates,
        flaw=source.flaw,
        through_hugging_face=source.hugging_face,
        world_size=world_size,
        fault_of_preset=fault_of_preset,
    )
    found = [finding for rule in RULES for finding in rule(subject)]
    kept = [finding for finding in found if chosen is None or chosen in finding.backends]
    told, places = by_severity(_once(kept)), source.places or {}
    return Report(version, chosen, tuple(one.placed(places) for one in told), subject.outcome.placed(places))


_GENERAL = (*rules_own.NAMES, *rules_deepspeed.NAMES)
"""Rules that tell of everything which is refused. Others know a better value for some of it, or a better reason."""


def _once(findings: list[Finding]) -> Iterator[Finding]:
    """Without the refusals, by general rules, of what another rule tells of for the same backend."""
    told: set[tuple[Any, str]] = set()
    for finding in sorted(findings, key=lambda one: one.rule in _GENERAL):
        whom = {(finding.path, backend) for backend in finding.backends}
        if finding.rule in _GENERAL and whom <= told:
            continue
        if finding.severity == "crashes":
            told |= whom
        yield finding
