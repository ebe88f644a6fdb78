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
from zftune.store.document import escaped

_STYLES = {"adopt": "bold green", "guard": "bold red", "crash": "red", "abort": "yellow", "void": "yellow"}


def render(document: Mapping[str, Any]) -> RenderableType:
    """The document of a run as a screen."""
    parts: list[RenderableType] = [*_head(document), Text("")]
    parts += [_decisions(document), Text("")] if document["decisions"] or document["history"] else []
    unseen = list(_unseen(document))
    parts += [*unseen, Text("")] if unseen else []
    parts.append(Panel(_text("\n".join(document["verdict"])), title="cost and gain", title_align="left"))
    return Group(*parts)


def _head(document: Mapping[str, Any]) -> Iterator[Text]:
    run, work = document["run"], document["workload"]
    head = _text("zftune explain", "bold")
    yield head.append(f"  {escaped(run['run_id'][:8])}  {escaped(work['model'])} on {escaped(document['device'])}")
    if document["rig"] is not None:
        yield _text(f"  rig {document['rig']['name']}: times are of an emulated accelerator")
    began = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(run["began_unix_s"]))
    again = run["resumed"]
    resumed = "" if not again else ", resumed once" if again == 1 else f", resumed {again} times"
    yield _text(f"  {run['backend']}, quality {document['quality']}, began {began}{resumed}, {run['state']}")
    if work["world_size"] > 1:
        yield _text(f"  {work['ranks']}; measured by the first rank, which the others wait for in each step")
    for notice in document["notices"]:
        yield _text(f"  {notice}", "yellow")


def _decisions(document: Mapping[str, Any]) -> Table:
    """Each decision under the time of the search's clock, and under it what was measured."""
    table = Table(box=None, pad_edge=False, padding=(0, 1), show_header=False)
    table.add_column(justify="right", no_wrap=True, style="dim")
    table.add_column(overflow="fold", ratio=1)
    for note in document["decisions"]:
        cell = _text(subject(document, note), "bold").append(_text(note["reason"], _STYLES.get(note["kind"], "")))
        table.add_row(_text(words.seconds(note["at_s"])), _with_measured(cell, words.measured(document, note)))
    open_ones = words.measured(document, None)
    if open_ones:
        at_s = max(one["ended_s"] for one in document["history"])
        table.add_row(_text(words.seconds(at_s)), _with_measured(_text("Nothing was decided since."), open_ones))
    return table


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
    return f"Trial {trial['number']} ({trial['source']}){more}. "


def _unseen(document: Mapping[str, Any]) -> Iterator[Text]:
    """What was never applied, and what did not survive."""
    rejected: Sequence[Mapping[str, Any]] = document["rejected"]
    if rejected:
        count = sum(one["count"] for one in rejected)
        yield _text(f"Never applied: {count} setting{'' if count == 1 else 's'}, rejected unseen.")
        for one in rejected:
            yield _text(f"  {one['count']}: {one['reason']}", "dim")
    for state, name in (("crashed", "Never again"), ("void", "Did not count"), ("in_flight", "In flight")):
        for trial in document["trials"]:
            if trial["state"] == state:
                why = f": {trial['reason']}" if trial["reason"] else ""
                yield _text(f"{name}: {words.setting(trial['knobs'])}{why}.")


def _text(text: str, style: str = "") -> Text:
    return Text("\n".join(escaped(line) for line in text.split("\n")), style)
