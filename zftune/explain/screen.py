"""What `zftune explain` shows. All text of the store is shown as text: no markup, nothing that steers a terminal."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from zftune.explain import words
from zftune.quality import summarized
from zftune.store.preset_file import escaped
from zftune.words import DECISIONS, RUN_STATES, TRAINED_ON, seconds

_STYLES = {
    "adopt": "bold green",
    "guard": "bold red",
    "crash": "red",
    "abort": "yellow",
    "void": "yellow",
    "reopen": "yellow",
}


_SOURCES = {"start": "the starting point", "reference": "what others gain over"}
_LONG, _NEWEST = 30, 8
"""Decisions that are shown whole; of more the newest, and those that changed something."""
_ALWAYS_TOLD = frozenset(DECISIONS) - {"start", "keep", "abort", "void", "hold", "reopen"}


def render(document: Mapping[str, Any], *, verbose: bool = False) -> RenderableType:
    """The document of a run as a screen; `verbose` has every decision with its measurements."""
    parts: list[RenderableType] = [*_head(document), Text("")]
    if document["decisions"] or document["history"]:
        parts += [_decisions(document, verbose=verbose), Text("")]
    unseen = list(_unseen(document))
    parts += [*unseen, Text("")] if unseen else []
    title = "cost and gain" if document["run"] is not None else "result"
    parts.append(Panel(_text("\n".join(document["verdict"])), title=title, title_align="left"))
    return Group(*parts)


def _head(document: Mapping[str, Any]) -> Iterator[Text]:
    run, work = document["run"], document["workload"]
    head = _text("zftune explain" if run is not None else "zftune tune", "bold")
    name = f"  {escaped(run['run_id'][:8])}" if run is not None else ""
    yield head.append(f"{name}  {escaped(work['model'] or 'your model')} on {escaped(document['device'])}")
    if document["rig"] is not None:
        yield _text(f"  emulated hardware (rig {document['rig']['name']}): times do not come from a GPU")
    if run is not None:
        began = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(run["began_unix_s"]))
        again = run["resumed"]
        resumed = "" if not again else ", resumed once" if again == 1 else f", resumed {again} times"
        state = TRAINED_ON if run["trained_on"] else RUN_STATES[run["state"]]
        yield _text(f"  {run['backend']}, quality {document['quality']}, began {began}{resumed}, {state}")
    if (work.get("world_size") or 1) > 1:
        yield _text(f"  {work['ranks']}; measured on rank 0, since ranks wait for each other in each step")
    bound = words.lateness_bound(document)
    if bound:
        yield _text(f"  {bound}")
    if document.get("loss") is not None:
        loss = document["loss"]
        yield _text(f"  loss {loss['sentence']} ({summarized(loss['count'])})")
    for notice in document["notices"]:
        yield _text(f"  {notice}", "yellow")


def _decisions(document: Mapping[str, Any], *, verbose: bool) -> Table:
    """Each decision under the time of the search's clock, and under it what was measured."""
    table = Table(box=None, pad_edge=False, padding=(0, 1), show_header=False)
    table.add_column(justify="right", no_wrap=True, style="dim")
    table.add_column(overflow="fold", ratio=1)
    found = list(words.entries(document))
    first = 0 if verbose or len(found) <= _LONG else len(found) - _NEWEST
    hidden = sum(not _is_always_told(one) for one in found[:first])
    if hidden:
        table.add_row("", _text(f"{hidden} decisions changed nothing: zftune explain -v has them", "dim"))
    cause: str | None = None
    for index, one in enumerate(found):
        if index < first and not _is_always_told(one):
            continue
        what, style = ("", "") if one.note is None else (subject(document, one.note), _STYLES.get(one.note["kind"], ""))
        before, cause = cause, _cause_of_crash(document, one.note)
        reason = one.reason if cause is None or cause != before else _crashed_too(document, one.note)
        cell = _text(what, "bold").append(_text(reason, style))
        measured = one.measured if verbose or len(found) <= _LONG else []
        table.add_row(_text(seconds(one.at_s)), _with_measured(cell, measured))
    return table


def _is_always_told(entry: words.Entry) -> bool:
    return entry.note is not None and entry.note["kind"] in _ALWAYS_TOLD


def _cause_of_crash(document: Mapping[str, Any], note: Mapping[str, Any] | None) -> str | None:
    """Why the setting of a decision crashed; None: it is about something else."""
    if note is None or note["kind"] != "crash" or note["trial"] is None:
        return None
    found: str | None = document["trials"][note["trial"]]["reason"]
    return found


def _crashed_too(document: Mapping[str, Any], note: Mapping[str, Any] | None) -> str:
    """What is said of a setting that crashed for the reason of the one before it."""
    knobs = {} if note is None else document["trials"][note["trial"]]["knobs"]
    return f"Crashed, and not tried again, for the same reason: {words.setting(knobs)}."


def _with_measured(cell: Text, measured: Sequence[str]) -> Text:
    for one in measured:
        cell.append(f"\n  {escaped(one)}", "dim")
    return cell


def subject(document: Mapping[str, Any], note: Mapping[str, Any]) -> str:
    """Which setting a decision is about; by what differs from the incumbent, unless its reason says so."""
    if note["trial"] is None or note["kind"] not in ("adopt", "keep", "abort", "void", "crash"):
        return ""
    trial, incumbent = (document["trials"][note[name]] for name in ("trial", "incumbent"))
    what = words.candidate(trial, incumbent)
    more = "" if what in note["reason"] else f", {what}"
    source = _SOURCES.get(trial["source"], f"from the {trial['source']}")
    return f"Setting {trial['number']} ({source}){more}. "


def _unseen(document: Mapping[str, Any]) -> Iterator[Text]:
    """What was never applied, and what did not survive."""
    rejected: Sequence[Mapping[str, Any]] = document["rejected"]
    if rejected:
        count = sum(one["count"] for one in rejected)
        yield _text(f"Never applied: {count} setting{'' if count == 1 else 's'}, rejected unseen.")
        for one in rejected:
            yield _text(f"  {one['count']}: {one['reason']}", "dim")
    told = {note["trial"] for note in document["decisions"] if note["kind"] == "crash"}
    newest = {words.identity(trial["knobs"]): trial["number"] for trial in document["trials"]}
    for state, name in (
        ("crashed", "Crashed, and not tried again"),
        ("void", "Not counted"),
        ("in_flight", "Being measured"),
    ):
        for trial in document["trials"]:
            again = newest[words.identity(trial["knobs"])] != trial["number"]  # it is told of the later one
            if trial["state"] == state and trial["number"] not in told and not (state == "void" and again):
                why = f": {trial['reason']}" if trial["reason"] else ""
                yield _text(f"{name}: {words.setting(trial['knobs'])}{why}.")


def _text(text: str, style: str = "") -> Text:
    return Text("\n".join(escaped(line) for line in text.split("\n")), style)
