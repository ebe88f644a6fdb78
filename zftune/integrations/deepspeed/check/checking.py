"""All rules over one ds_config, and the changes that mend what they find."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeAlias

from zftune.ds_config.facts import GOOD
from zftune.ds_config.reading import MISSING, Source, at, path_of, put, shown
from zftune.integrations.deepspeed.asking import Ask
from zftune.integrations.deepspeed.check.findings import Change, Finding, Report, by_severity, shown_path
from zftune.integrations.deepspeed.check.general import GENERAL, GENERAL_RULES
from zftune.integrations.deepspeed.check.rules import RULES, Rule
from zftune.integrations.deepspeed.check.subject import FaultOfPreset, Subject, changes
from zftune.integrations.deepspeed.outcome import Outcome
from zftune.integrations.deepspeed.section import Refusal
from zftune.store.types import Backend

Mended: TypeAlias = tuple[dict[str, Any], list[tuple[Change, Finding]], Report]
_MOST = 200  # far more than there are settings: a circle of changes must not go on for ever


def check(
    source: Source | Mapping[str, Any],
    *,
    backend: Backend | None = None,
    version: str | None,
    ask: Ask | None = None,
    world_size: int | None = None,
    fault_of_preset: FaultOfPreset | None = None,
    upstream_asked: bool | None = None,
) -> Report:
    """What is wrong with a ds_config.

    Args:
        backend: for which to judge; None: as its "zftune" section says, and for both where that says nothing.
        version: of DeepSpeed; None: it is not installed, and is judged as 0.19.6.
        ask: puts a ds_config to the installed DeepSpeed; None: what that refuses is not found.
        world_size: number of ranks; None: any that the batch sizes fit.
        upstream_asked: whether somebody asks for DeepSpeed's own runtime, to which clipping and accumulation may have
            to give way; None: where it is the one that is judged.
    """
    if not isinstance(source, Source):
        source = Source(dict(source))
    chosen = backend or _said(source.config)
    subject = Subject(
        config=source.config,
        backend=chosen,
        forced=backend is not None,
        upstream_asked=chosen == "deepspeed" if upstream_asked is None else upstream_asked,
        version=version or GOOD,
        duplicates=source.duplicates,
        flaw=source.flaw,
        through_hugging_face=source.hugging_face,
        world_size=world_size,
        ask=ask,
        fault_of_preset=fault_of_preset,
    )
    found = [_finding(rule, subject) for rule in RULES if rule.applies(subject)]
    found += [finding for rule in GENERAL_RULES for finding in rule(subject)]
    kept = [finding for finding in found if chosen is None or chosen in finding.backends]
    told, places = by_severity(_once(kept)), source.places or {}
    outcome = _refused(told, subject.outcome) if subject.outcome.backend == "deepspeed" else subject.outcome
    return Report(version, chosen, tuple(one.placed(places) for one in told), outcome.placed(places), ask is not None)


def _finding(rule: Rule, subject: Subject) -> Finding:
    path = path_of(rule.field)
    mends = subject.elsewhere() if rule.elsewhere else ()
    advice = "zftune run then trains it as the file says" if mends else _value(rule.advice, subject)
    return Finding(
        rule=rule.name,
        path=path,
        value=at(subject.config, path),
        severity=rule.severity,
        reason=_value(rule.reason, subject),
        backends=_value(rule.backends, subject),
        changes=mends or tuple(changes(_value(rule.fix, subject))),
        advice=advice,
    )


def _value(one: Any, subject: Subject) -> Any:
    return one(subject) if callable(one) else one


def _said(config: Mapping[str, Any]) -> Backend | None:
    said = at(config, ("zftune", "backend"))
    return "zenflow" if said == "zenflow" else "deepspeed" if said == "deepspeed" else None


def _refused(findings: Sequence[Finding], outcome: Outcome) -> Outcome:
    """With DeepSpeed's own runtime, what `zftune run` does where it refuses what would end the training there.

    What is not there is left to the script, which may set it.
    """
    ends = next((one for one in findings if one.ends_deepspeed and one.value is not MISSING), None)
    if ends is None or outcome.kind != "trains":
        return outcome
    allowed = "something else with DeepSpeed's own runtime (its finding tells why)"
    return Outcome("refused", "deepspeed", refusals=(Refusal(shown_path(ends.path), shown(ends.value), allowed),))


def _once(findings: list[Finding]) -> Iterator[Finding]:
    """Without the refusals, by general rules, of what another rule tells of for the same backend."""
    told: set[tuple[Any, str]] = set()
    for finding in sorted(findings, key=lambda one: one.rule in GENERAL):
        whom = {(finding.path, backend) for backend in finding.backends}
        if finding.rule in GENERAL and whom <= told:
            continue
        if finding.severity == "crashes":
            told |= whom
        yield finding


def fix(
    source: Source,
    *,
    backend: Backend | None,
    version: str | None,
    ask: Ask | None = None,
    world_size: int | None = None,
    fault_of_preset: FaultOfPreset | None = None,
) -> Mended:
    """Apply changes one finding after another, since one safe value may need another one.

    Args:
        source: the ds_config; not changed.

    Returns:
        The changed ds_config; every change with the finding that it mends; what is left to be found.
    """
    config = copy.deepcopy(source.config)
    upstream_asked = (backend or _said(config)) == "deepspeed"  # not where a change of ours says so
    done: list[tuple[Change, Finding]] = []
    for _ in range(_MOST):
        report = check(
            Source(config, hugging_face=source.hugging_face),
            backend=backend,
            version=version,
            ask=ask,
            world_size=world_size,
            fault_of_preset=fault_of_preset,
            upstream_asked=upstream_asked,
        )
        helping = [finding for finding in report.findings if _helps(config, finding)]
        finding = min(helping, key=_turn, default=None)
        if finding is None:
            break
        for each in finding.changes:
            put(config, each.path, each.value)
            done.append((each, finding))
    return config, done, report


def _turn(finding: Finding) -> int:
    """Which findings are mended first, as what is left of others depends on them.

    What keeps the backend zenflow from training comes before faults of DeepSpeed's own runtime. Where one of those is
    mended by going to zenflow, the others are none there, and their settings stay as they are. Going to DeepSpeed's own
    comes last.
    """
    backend = next((each.value for each in finding.changes if each.path == ("zftune", "backend")), None)
    if backend is not None:
        return 1 if backend == "zenflow" else 3
    return 0 if "zenflow" in finding.backends else 2


def _helps(config: Mapping[str, Any], finding: Finding) -> bool:
    return any(at(config, each.path) != each.value for each in finding.changes)


def document(done: list[tuple[Change, Finding]], left: Report) -> dict[str, Any]:
    """What was changed, as JSON."""
    return {
        "ok": left.ok,
        "changes": [{**each.document(), "rule": finding.rule} for each, finding in done],
        "left": [finding.document() for finding in left.findings if finding.is_fault],
    }
