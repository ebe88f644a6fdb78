"""The runs as a screen: one row a run, and below the one that is looked at. Nothing is read as markup."""

from __future__ import annotations

import textwrap
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text

from zftune.daemon.top import words
from zftune.report.palette import colour
from zftune.store.document import escaped

Document = Mapping[str, Any]
WIDE = 140
"""Columns from which on reasons stand beside their runs."""
_STATES = {
    "warming": "dim",
    "baseline": "cyan",
    "searching": "cyan",
    "confirming": "bold cyan",
    "frozen": "green",
    "drifted": "yellow",
    "paused": "bold yellow",
    "ended": "dim",
}
_KINDS = {"adopt": "bold green", "guard": "bold red", "crash": "red", "abort": "yellow", "void": "yellow"}
_BAR = 5
_WIDE_BAR = 20
_MOST_LINES = 4
"""Of a decision on a screen."""
_TRIED = ("measured", "in_flight", "aborted", "crashed", "void")


@dataclass(frozen=True, slots=True, kw_only=True)
class Frame:
    """What is shown at one moment."""

    source: str
    """Of it: the socket."""
    runs: Sequence[Document]
    """At a glance, all of them."""
    shown: Sequence[Document]
    """Details of those that have a row."""
    looked_at: Document | None
    """Details of the one below; None: of none."""
    trouble: str = ""
    """Why this is not the newest."""


def most_rows(height: int) -> int:
    """Runs that have a row on a screen of so many lines."""
    return max(1, (height - 14) // 2)


def frame(found: Frame, width: int, height: int) -> RenderableType:
    """A screen of this size, or a smaller one.

    Args:
        found: what is shown.
        width: columns.
        height: lines.
    """
    lines = [_headline(found, width)]
    if found.trouble:
        lines.append(_text(escaped(found.trouble), "bold yellow"))
    if found.runs:
        lines += _rows(found.shown, width)
    else:
        lines += [Text(), _text("No run is followed. Start one with: zftune run --online -- CMD", "dim")]
    hidden = len(found.runs) - len(found.shown)
    if hidden > 0:
        lines.append(_text(f"and {hidden} more: zftune top RUN looks at one of them", "dim"))
    if found.looked_at is not None:
        lines += _details(found.looked_at, width, height - len(lines))
    return Group(*lines[:height])


def whole(details: Document, width: int) -> RenderableType:
    """A run with everything that is known of it, however long.

    Args:
        details: as the daemon gives them.
        width: columns.
    """
    lines = _facts(details)
    trials = [one for one in details["trials"] if one["state"] in _TRIED]
    decisions = details["decisions"]
    if decisions:
        lines += [
            Text(),
            _heading("decisions", len(decisions), len(decisions)),
            *(line for one in decisions for line in _decision(one, width, None)),
        ]
    if trials:
        lines += [Text(), _heading("trials", len(trials), len(trials))]
        lines += [_trial(one, details["run"]) for one in trials]
    for line in lines:
        line.no_wrap, line.overflow = False, "fold"
    return Group(*lines)


def _headline(found: Frame, width: int) -> Text:
    live = sum(one["state"] != "ended" for one in found.runs)
    count = f"{live} run{'' if live == 1 else 's'}"
    text = _text("zftune top", "bold").append(f"  {count} on {escaped(found.source)}", "dim")
    clock = time.strftime("%H:%M:%S")
    text.truncate(width - len(clock) - 2, overflow="ellipsis")
    return text.append(" " * max(2, width - text.cell_len - len(clock))).append(clock, "dim")


def _rows(shown: Sequence[Document], width: int) -> list[Text]:
    """A heading and the runs; the last decision's reason beside a run, or below it where there is no room."""
    wide = width >= WIDE
    bar = _WIDE_BAR if wide else _BAR
    sizes = {"run": 8, "state": 10, "step": 6, "ms": 6, "stall": bar + 11, "gain": 11, "knobs": 20}
    if not wide:
        sizes["knobs"] += width - sum(sizes.values()) - len(sizes) + 1
    heading = Text.assemble(*(_cell(_text(title), size, title) for title, size in sizes.items()), style="dim")
    lines = [heading.append("last decision" if wide else "")]
    for one in shown:
        cells = zip(_cells(one, bar), sizes.items(), strict=True)
        line = Text.assemble(*(_cell(cell, size, title) for cell, (title, size) in cells))
        reason = _reason(one["decisions"])
        lines += [line.append_text(reason)] if wide else [line, Text("  ").append_text(reason)]
    for line in lines:
        line.rstrip()
        line.truncate(width, overflow="ellipsis")
    return lines


def _cells(details: Document, bar: int) -> tuple[Text, ...]:
    run = details["run"]
    return (
        _text(words.name(run), "bold"),
        _text(run["state"], _STATES.get(run["state"], "")),
        _text(words.count(run["step"])),
        _text(words.step_ms(run["step_ms"])),
        _stall(run, bar),
        _text(words.gain(details["gain"])),
        _text(words.knobs(run["incumbent"], few=True)),
    )


def _cell(text: Text, size: int, title: str) -> Text:
    """A cell and the blank after it; numbers stand at the right."""
    text.truncate(size, overflow="ellipsis")
    blanks = " " * (size - text.cell_len)
    return Text(blanks).append_text(text).append(" ") if title in ("step", "ms") else text.append(blanks + " ")


def _stall(run: Document, bar: int) -> Text:
    """What of a step is waiting, by cause, as a bar; and the most frequent cause in words."""
    stalls = words.stalls(run)
    if not stalls:
        return _text(words.NONE if run["step_ms"] is None or run["stall_ms"] else "no GPU stream", "dim")
    text, filled, share = Text(), 0, 0.0
    for cause, part in stalls:
        share += part
        until = min(bar, round(share * bar))
        text.append("█" * (until - filled), colour(cause))
        filled = max(filled, until)
    text.append("░" * (bar - filled), "dim")
    return text.append(f" {100 * stalls[0][1]:.0f}% {stalls[0][0]}")


def _reason(decisions: Sequence[Document]) -> Text:
    if not decisions:
        return _text("nothing was decided yet", "dim")
    last = decisions[-1]
    return _text(escaped(last["reason"]), _KINDS.get(last["kind"], "dim"))


def _details(details: Document, width: int, height: int) -> list[Text]:
    """What is known of one run, in so many lines; where room is little, the newest of its decisions and trials."""
    lines = [Text(), *_facts(details)]
    trials = [one for one in details["trials"] if one["state"] in _TRIED]
    for_trials = min(len(trials), max(0, height - len(lines) - 2) // 3)
    room = height - len(lines) - 2 - (for_trials + 2 if for_trials else 0)
    decisions, count = _newest(details["decisions"], width, room)
    if decisions:
        lines += [Text(), _heading("decisions", count, len(details["decisions"])), *decisions]
    if for_trials:
        shown = trials[-min(len(trials), max(for_trials, height - len(lines) - 2)) :]
        lines += [Text(), _heading("trials", len(shown), len(trials))]
        lines += [_trial(one, details["run"]) for one in shown]
    for line in lines:
        line.truncate(width, overflow="ellipsis")
    return lines[: max(height, 0)]


def _newest(decisions: Sequence[Document], width: int, room: int) -> tuple[list[Text], int]:
    """The lines of the newest decisions that have room, and how many decisions these are."""
    lines: list[Text] = []
    for count, one in enumerate(reversed(decisions)):
        more = _decision(one, width, _MOST_LINES)
        if len(lines) + len(more) > room:
            return lines, count
        lines = more + lines
    return lines, len(decisions)


def _facts(details: Document) -> list[Text]:
    run = details["run"]
    head = _text(words.name(run), "bold").append(f"  {words.model(run)}  {escaped(run['ranks'])}  pid {run['pid']}", "")
    head.append("  " + escaped(" ".join(run["argv"])), "dim")
    state = _text(run["state"], _STATES.get(run["state"], "")).append(f": {escaped(run['reason'])}", "not bold default")
    now, best = words.knobs(run["knobs"]), words.knobs(run["incumbent"])
    knobs = f"{now}, the best so far" if now == best else f"{now}; the best so far: {best}"
    lines = [head, state, _text(f"knobs     {knobs}")]
    stall = Text("stall     " if run["stall_ms"] else "")
    for cause, share in words.stalls(run):
        stall.append("█ ", colour(cause)).append(
            f"{cause} {run['stall_ms'].get(cause, 0):.1f} ms ({100 * share:.0f}%)  "
        )
    lines += [stall] if run["stall_ms"] else []
    if run["dropped"]:
        lines.append(_text(f"{run['dropped']} statistics found no room in the training process", "yellow"))
    return [*lines, *(_text(escaped(one), "yellow") for one in run["notices"])]


def _heading(title: str, shown: int, count: int) -> Text:
    return _text(title, "bold").append("" if shown >= count else f"  the last {shown} of {count}", "dim")


def _decision(one: Document, width: int, most_lines: int | None) -> list[Text]:
    at = time.strftime("%H:%M:%S", time.localtime(one["at_unix_s"]))
    head = _text(f"{at}  ", "dim").append(f"{escaped(one['kind']):<8}  ", _KINDS.get(one["kind"], "bold"))
    indent = " " * head.cell_len
    size = max(20, width - head.cell_len)
    first, *others = textwrap.wrap(escaped(one["reason"]), size, max_lines=most_lines, placeholder=" …") or [""]
    return [head.append(first), *(_text(indent + other) for other in others)]


def _trial(one: Document, run: Document) -> Text:
    best = "◆" if one["knobs"] == run["incumbent"] else " "
    line = _text(f"{best} {one['number']:>3}  ").append(f"{one['state'].replace('_', ' '):<9}", "bold")
    line.append(f"  {words.step_ms(one['step_ms']):>7} ms  {words.knobs(one['knobs'])}  ")
    return line.append(
        f"from {escaped(one['source'])}" + (f": {escaped(one['reason'])}" if one["reason"] else ""), "dim"
    )


def _text(text: str, style: str = "") -> Text:
    return Text(text, style, no_wrap=True, overflow="ellipsis")
