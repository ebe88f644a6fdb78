"""The findings on a screen of 80 columns or more. Nothing is told by colour alone."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.padding import Padding
from rich.rule import Rule
from rich.text import Text

from zftune.check.findings import SEVERITIES, THE_FILE, Change, Finding, Report, Severity, shown_path
from zftune.integrations.deepspeed.ds_config import MISSING, shown
from zftune.integrations.deepspeed.tables import versions

_MAX_WIDTH = 110
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
    "note": "to be known",
}


def render(report: Report, *, notes: bool = False) -> RenderableType:
    """The findings, grouped by severity, what sums them up, and a last line with what `zftune run` does.

    Args:
        report: what was found.
        notes: whether to show what nobody needs to mend.
    """
    return _Screen(list(_findings(report, notes)))


def render_changes(heading: str, changes: Sequence[Change], left: Report) -> RenderableType:
    """What `--fix` changed.

    Args:
        heading: what was done, and with which file.
        changes: in the order in which they were made.
        left: what is found in the written file.
    """
    parts: list[RenderableType] = [Rule(Text(heading, style="bold"), align="left", style="dim")]
    parts += [Text(line) for line in dict.fromkeys(change.sentence() for change in changes)]
    faults = [finding for finding in left.findings if finding.is_fault]
    if faults:
        parts += [Text(), Text("No safe value is known for what is left:", style="bold")]
        parts += [_entry(finding, left) for finding in faults]
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
    version = "DeepSpeed is not installed" if report.deepspeed is None else f"DeepSpeed {report.deepspeed}"
    asked = "" if report.deepspeed in (None, *versions()) else ", by its own word"
    yield Text(f"{version}, {judged}{asked}.", style="dim")
    for severity in SEVERITIES if notes else SEVERITIES[:-1]:
        group = [finding for finding in report.findings if finding.severity == severity]
        if group:
            yield Rule(Text(_HEADINGS[severity], style=_STYLES[severity]), align="left", style="dim")
            for finding in group:
                yield _entry(finding, report)
    yield Text()
    yield _sum(report, "found")
    hidden = sum(finding.severity == "note" for finding in report.findings)
    if hidden and not notes:
        yield Text(f"{hidden} {'note' if hidden == 1 else 'notes'} more with --all.", style="dim")
    yield Text(f"Under zftune run it {report.outcome}.")


def _entry(finding: Finding, report: Report) -> RenderableType:
    value = " (not there)" if finding.value is MISSING else f" = {shown(finding.value)}"
    if finding.value is MISSING and (finding.path == THE_FILE or finding.rule == "duplicate-name"):
        value = ""
    head = Text.assemble((shown_path(finding.path), "bold"), value)
    if report.backend is None:
        head.append(_whom(finding), style="dim")
    body = Text(finding.reason)
    if finding.safe:
        body.append("\nsafe: ", style="bold")
        body.append(finding.safe)
    return Group(head, Padding(body, (0, 0, 0, 4)))


def _whom(finding: Finding) -> str:
    if len(finding.backends) > 1:
        return "  [both]"
    return "  [zftune run]" if finding.backends == ("zenflow",) else "  [DeepSpeed's own]"


def _sum(report: Report, found: str) -> Text:
    counts = {name: sum(finding.severity == name for finding in report.findings) for name in SEVERITIES[:-1]}
    words = ", ".join(f"{name} {counts[name]}" for name in counts if counts[name])
    if report.ok:
        return Text(f"No fault {found}{f' ({words})' if words else ''}.", style="bold green")
    return Text(f"{found[:1].upper()}{found[1:]}: {words}.", style="bold red")
