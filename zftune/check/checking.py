"""All rules over one ds_config."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from zftune.check import rules_file, rules_intervals, rules_offload, rules_own, rules_precision, rules_zenflow
from zftune.check import rules_zenflow_notes as notes
from zftune.check.config import Source
from zftune.check.findings import Finding, Report, by_severity
from zftune.check.subject import FaultOfPreset, Rule, Subject
from zftune.doctor.deepspeed import GOOD
from zftune.store.types import Backend

RULES: tuple[Rule, ...] = (
    *rules_file.RULES,
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
    fault_of_preset: FaultOfPreset | None = None,
) -> Report:
    """What is wrong with a ds_config.

    Args:
        source: the ds_config.
        backend: for which to judge; None: as its "zftune" section says, and for both where that says nothing.
        version: of DeepSpeed; None: it is not installed, and is judged as 0.19.6.
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
        is_json=source.is_json,
        fault_of_preset=fault_of_preset,
    )
    found = [finding for rule in RULES for finding in rule(subject)]
    kept = [finding for finding in found if chosen is None or chosen in finding.backends]
    return Report(version, chosen, by_severity(_once(kept)))


def _once(findings: list[Finding]) -> Iterator[Finding]:
    """Without the refusals of a backend that another rule tells of for it, with a safe value."""
    told = {
        (finding.path, backend)
        for finding in findings
        if finding.rule not in rules_own.NAMES and finding.severity == "crashes"
        for backend in finding.backends
    }
    for finding in findings:
        if finding.rule not in rules_own.NAMES or (finding.path, finding.backends[0]) not in told:
            yield finding
