"""What a check finds: a setting, what happens with it, and a safe value; as a document and on a screen."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.padding import Padding
from rich.rule import Rule
from rich.text import Text

from zftune.ds_config.reading import MISSING, Place, SettingPath, path_of, shown
from zftune.integrations.deepspeed.outcome import Outcome, in_accelerate
from zftune.integrations.deepspeed.section import Refusal
from zftune.store.types import Backend

SCHEMA_NAME = "zftune.check/1"

Severity = Literal["crashes", "wrong", "ignored", "slow", "note"]
SEVERITIES: tuple[Severity, ...] = ("crashes", "wrong", "ignored", "slow", "note")
"""In a word, the worst first. "crashes": refused, or the run ends. "wrong": it trains, otherwise than the setting says.
"ignored": without effect. "slow": costs time only. "note": nothing to mend."""
_FAULTS = ("crashes", "wrong", "ignored")
AUTO = "auto-filled-elsewhere"
"""A note that is shown without being asked for: what the file says depends on who reads it."""
THE_FILE: SettingPath = ("the file",)
"""Stands for a setting where a finding is about none."""


@dataclass(frozen=True, slots=True)
class Change:
    """A setting with another value; MISSING takes it out."""

    path: SettingPath
    value: Any

    def sentence(self) -> str:
        return (
            f"{shown_path(self.path)} {'left out' if self.value is MISSING else f'= {shown(self.value, whole=True)}'}"
        )

    def placed(self, places: Mapping[str, Place]) -> Change | None:
        """The same where Accelerate reads it; None: it has no such setting."""
        place = places.get(".".join(self.path))
        if place is None:
            return None
        if place.name == "mixed_precision":
            return Change((place.name,), self.path[0] if self.value is True else "no")
        return Change(path_of(place.name), self.value)

    def document(self) -> dict[str, Any]:
        removed = self.value is MISSING
        return {
            "path": ".".join(self.path),
            "remove": removed,
            "value": None if removed else finite(self.value),
        }


_IN_A_FILE = ", in a file that deepspeed_config_file names"


def _beside(change: Change) -> str:
    if change.path == ("zftune", "backend"):
        return f"zftune run --backend {change.value}"
    return change.sentence() + _IN_A_FILE


_DESTROYS = ("update-interval-auto", "scrambled-weights")
"""Rules about weights that become NaN, or noise."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """A setting that does not do what it says."""

    rule: str
    """Its name, the same in every version."""
    path: SettingPath
    value: Any
    """As it is in the file; MISSING: it is not there."""
    severity: Severity
    reason: str
    """A sentence or two."""
    backends: tuple[Backend, ...]
    """With which it matters: "deepspeed" is upstream's own, "zenflow" the runtime of `zftune run`."""
    changes: tuple[Change, ...] = ()
    """What `--fix` does about it; nothing where no value is safe, or where it is no fault."""
    advice: str = ""
    """What to do, in words, beside the changes or where there are none."""
    refusal: Refusal | None = None
    """Of `zftune run`, where that is the reason."""

    @property
    def is_fault(self) -> bool:
        """Whether the training is not what the file says."""
        return self.severity in _FAULTS

    @property
    def ends_deepspeed(self) -> bool:
        """Whether the training ends, or its weights are lost, with DeepSpeed's own runtime: `zftune run` refuses it."""
        ends = self.severity == "crashes" or self.rule in _DESTROYS
        return self.is_fault and "deepspeed" in self.backends and ends

    @property
    def safe(self) -> str:
        """What to do about it; empty: nothing."""
        changes = ", ".join(change.sentence() for change in self.changes)
        return "; ".join(part for part in (changes, self.advice) if part)

    def without_value(self) -> Finding:
        """The same of a name that stands in some section."""
        return replace(self, value=MISSING)

    def placed(self, places: Mapping[str, Place]) -> Finding:
        """The same in the names that settings have where Accelerate reads them."""
        if not places:
            return self
        dotted = ".".join(self.path)
        place = places.get(dotted, Place(dotted, self.value))
        changes = [(change, change.placed(places)) for change in self.changes]
        elsewhere = (_beside(change) for change, placed in changes if placed is None)
        advice = self.advice
        if advice and dotted not in places:
            advice += _IN_A_FILE
        return replace(
            self,
            path=path_of(place.name),
            value=place.value,
            reason=self.reason if self.refusal is None else in_accelerate(self.refusal, places).reason,
            changes=tuple(placed for _, placed in changes if placed is not None),
            advice="; ".join(filter(None, (*elsewhere, advice))),
        )

    def document(self) -> dict[str, Any]:
        given = self.value is not MISSING
        return {
            "rule": self.rule,
            "path": ".".join(self.path),
            "given": given,
            "value": finite(self.value) if given else None,
            "severity": self.severity,
            "reason": self.reason,
            "safe": self.safe or None,
            "changes": [change.document() for change in self.changes],
            "backends": list(self.backends),
        }


@dataclass(frozen=True, slots=True)
class Report:
    """All findings about one ds_config, the worst first."""

    deepspeed: str | None
    """The installed version; None: there is none."""
    backend: Backend | None
    """For which it was judged; None: for both."""
    findings: tuple[Finding, ...]
    outcome: Outcome
    """What `zftune run` does with it."""
    asked: bool = False
    """Whether DeepSpeed itself was asked; else what it refuses is not among the findings."""

    @property
    def ok(self) -> bool:
        return not any(finding.is_fault for finding in self.findings)

    def document(self, version: str, fixed: Mapping[str, Any] | None = None) -> dict[str, Any]:
        return {
            "schema": SCHEMA_NAME,
            "zftune": version,
            "deepspeed": self.deepspeed,
            "asked": self.asked,
            "backend": self.backend,
            "ok": self.ok,
            "run": {"does": self.outcome.kind, "backend": self.outcome.backend, "says": str(self.outcome)},
            "findings": [finding.document() for finding in self.findings],
            "fixed": fixed,
        }


def by_severity(findings: Iterable[Finding]) -> tuple[Finding, ...]:
    """The worst first; else as they were found."""
    return tuple(sorted(findings, key=lambda finding: SEVERITIES.index(finding.severity)))


def shown_path(path: SettingPath) -> str:
    """A setting's name, fit for a terminal."""
    return "".join(letter if letter.isprintable() else "?" for letter in ".".join(path))


def finite(value: Any) -> Any:
    """A value that JSON can hold: numbers that are not finite become words."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, Mapping):
        return {str(name): finite(inner) for name, inner in value.items()}
    return [finite(inner) for inner in value] if isinstance(value, list) else value


_MAX_WIDTH = 110
_QUESTION = "did you mean "
_STYLES: dict[Severity, str] = {
    "crashes": "bold red",
    "wrong": "bold red",
    "ignored": "red",
    "slow": "yellow",
    "note": "yellow",
}
_HEADINGS: dict[Severity, str] = {
    "crashes": "crashes: refused, or the run ends",
    "wrong": "wrong: it trains otherwise than the file says",
    "ignored": "ignored: without effect",
    "slow": "slow",
    "note": "notes: nothing to change",
}


def render(report: Report, *, notes: bool = False) -> RenderableType:
    """The findings, grouped by severity, what sums them up, and a last line with what `zftune run` does."""
    return _Screen(list(_findings(report, notes)))


def render_changes(heading: str, changes: Sequence[Change], left: Report) -> RenderableType:
    """What `--fix` changed."""
    parts: list[RenderableType] = [Rule(Text(heading, style="bold"), align="left", style="dim")]
    parts += [Text(line) for line in dict.fromkeys(change.sentence() for change in changes)]
    faults = [finding for finding in left.findings if finding.is_fault]
    if faults:
        parts += [Text(), Text("Left as it is, since what is right is not for zftune to say:", style="bold")]
        parts += _entries(faults, left)
    parts += [Text(), _sum(left, "left in the written file")]
    return _Screen(parts)


class _Screen:
    def __init__(self, parts: list[RenderableType]) -> None:
        self._parts = parts

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        width = min(options.max_width, _MAX_WIDTH)
        yield from console.render(Group(*self._parts), options.update_width(width))


def _findings(report: Report, notes: bool) -> Iterator[RenderableType]:
    judged = {
        None: "judged for zftune run (backend zenflow) and for DeepSpeed's own runtime",
        "zenflow": "judged for zftune run (backend zenflow)",
        "deepspeed": "judged for DeepSpeed's own runtime",
    }[report.backend]
    if report.deepspeed is None:
        yield Text("DeepSpeed is not installed: only what zftune itself knows of it is checked.", style="bold yellow")
    elif not report.asked:
        yield Text("DeepSpeed was not asked: what it refuses is not checked.", style="bold yellow")
    version = "" if report.deepspeed is None else f"DeepSpeed {report.deepspeed}, "
    yield Text(f"{version}{judged}.".capitalize() if not version else f"{version}{judged}.", style="dim")
    for severity in SEVERITIES if notes else SEVERITIES[:-1]:
        group = [finding for finding in report.findings if finding.severity == severity]
        if group:
            yield Rule(Text(_HEADINGS[severity], style=_STYLES[severity]), align="left", style="dim")
            yield from _entries(group, report)
    yield Text()
    yield _sum(report, "found")
    told = [finding for finding in report.findings if finding.rule == AUTO and not notes]
    yield from (Text(f"{finding.reason} {finding.advice}.") for finding in told)
    hidden = sum(finding.severity == "note" for finding in report.findings) - len(told)
    if hidden and not notes:
        yield Text(f"{hidden} {'note' if hidden == 1 else 'notes'} more with --all.", style="dim")
    crashes = any(one.severity == "crashes" and "zenflow" in one.backends for one in report.findings)
    first = "crashes as above; once that is mended it " if crashes and report.outcome.kind == "trains" else ""
    yield Text(f"Under zftune run it {first}{report.outcome}.")


def _entries(findings: Sequence[Finding], report: Report) -> Iterator[RenderableType]:
    """As many as `_sum` counts: what each backend says of a setting in words of its own stands under its one name."""
    together: dict[tuple[Severity, Any], list[Finding]] = {}
    for finding in findings:
        together.setdefault(_counted(finding), []).append(finding)
    for same in together.values():
        first = same[0]
        value = " (not there)" if first.value is MISSING else f" = {shown(first.value)}"
        if first.value is MISSING and (first.path == THE_FILE or first.rule == "duplicate-name"):
            value = ""
        head = Text.assemble((shown_path(first.path), "bold"), value)
        whom = "" if report.backend is not None else _whom(first)
        is_one = len({finding.backends for finding in same}) == 1
        if is_one:
            head.append(whom, style="dim")
        bodies = [_body(one, "" if is_one or report.backend is not None else _whom(one)) for one in same]
        yield Group(head, *(Padding(body, (0, 0, 0, 4)) for body in bodies))


def _body(finding: Finding, whom: str) -> Text:
    body = Text.assemble(finding.reason, (whom, "dim"))
    if finding.safe.startswith(_QUESTION):  # what was meant is the user's to say
        body.append("" if finding.safe in finding.reason else f"\n{finding.safe}?")
    elif finding.safe:
        body.append("\nsafe: ", style="bold")
        body.append(finding.safe)
    return body


def _counted(finding: Finding) -> tuple[Severity, Any]:
    """A value that each backend refuses in words of its own is one fault."""
    return finding.severity, finding.path if finding.path != THE_FILE else finding.reason


def _whom(finding: Finding) -> str:
    if len(finding.backends) > 1:
        return "  [both]"
    return "  [zftune run]" if finding.backends == ("zenflow",) else "  [DeepSpeed's own]"


def _sum(report: Report, found: str) -> Text:
    told = {_counted(one) for one in report.findings}
    counts = {name: sum(severity == name for severity, _ in told) for name in SEVERITIES[:-1]}
    words = ", ".join(f"{name} {counts[name]}" for name in counts if counts[name])
    if report.ok:
        return Text(f"No fault {found}{f' ({words})' if words else ''}.", style="bold green")
    return Text(f"{found[:1].upper()}{found[1:]}: {words}.", style="bold red")
