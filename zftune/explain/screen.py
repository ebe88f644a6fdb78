"""The screen of `zftune explain`. All text of the store is shown as text: no markup, nothing that steers a terminal."""

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

_STYLES = {"adopt": "bold green", "guard": "bold red", "crash": "red", "void": "yellow", "reopen": "yellow"}
_MINOR = ("start", "keep", "void", "hold", "reopen", "remark", "resume")
"""Decisions that changed nothing."""
_CHANGES, _NEWEST, _REASONS = 6, 4, 3
"""Lines of a screen: the last decisions that changed something, the newest ones, and reasons of rejections."""


def render(document: Mapping[str, Any], *, verbose: bool = False) -> RenderableType:
    """The document of a run as a screen; `verbose` has every decision and every measurement."""
    parts: list[RenderableType] = [*_head(document), Text("")]
    if document["decisions"] or document["history"]:
        parts += [_decisions(document, verbose=verbose), Text("")]
    rejected = list(_rejected(document, verbose=verbose))
    parts += [*rejected, Text("")] if rejected else []
    title = "cost and gain" if document["run"] is not None else "result"
    parts.append(Panel(_text("\n".join(document["verdict"])), title=title, title_align="left"))
    return Group(*parts)


def _head(document: Mapping[str, Any]) -> Iterator[Text]:
    run, work, cost = document["run"], document["workload"], document["cost"]
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
    if bound := words.lateness_bound(document):
        yield _text(f"  {bound}")
    if document["budget"] is not None and document["budget"]["fixed_because"]:
        yield _text(f"  settings that change the trajectory stay: {document['budget']['fixed_because']}")
    if cost is not None and cost["change_s"] is not None:
        yield _text(f"  a change of settings costs {seconds(cost['change_s'])}, part of what exploring cost")
    if document["loss"] is not None:
        loss = document["loss"]
        yield _text(f"  loss {loss['sentence']} ({summarized(loss['count'])})")
    for notice in document["notices"]:
        yield _text(f"  {notice}", "yellow")


def _decisions(document: Mapping[str, Any], *, verbose: bool) -> Table:
    """Each decision under the time of the training's clock; verbose: each measurement where it was made."""
    table = Table(box=None, pad_edge=False, padding=(0, 1), show_header=False)
    table.add_column(justify="right", no_wrap=True, style="dim")
    table.add_column(overflow="fold", ratio=1)
    found = document["decisions"]
    major = [note for note in found if note["kind"] not in _MINOR][-_CHANGES:]
    shown = [note for note in found if verbose or note in major or note in found[-_NEWEST:]]
    rows = [(note["at_unix_s"], seconds(note["at_s"]), _decision(document, note)) for note in shown]
    if verbose:
        measured = document["history"]
        rows += [(one["at_unix_s"], "", _text(f"  {words.measurement(document, one)}", "dim")) for one in measured]
        rows.sort(key=lambda row: row[0])
    for _, at, text in rows:
        table.add_row(at, text)
    if not verbose:
        more = len(found) - len(shown)
        what = f"{more} more decisions and every" if more else "every"
        table.add_row("", _text(f"{what} measurement: zftune explain -v", "dim"))
    return table


def _decision(document: Mapping[str, Any], note: Mapping[str, Any]) -> Text:
    """Its setting, where it is about one, and its sentence."""
    about = ""
    if note["trial"] is not None and note["kind"] in ("adopt", "keep", "void", "crash"):
        trial = document["trials"][note["trial"]]
        about = f"Setting {note['trial']} (from the {trial['source']}). "
    title = f"{DECISIONS.get(note['kind'], note['kind'])}: " if note["kind"] == "remark" else ""
    return _text(title + about, "bold").append(_text(note["reason"], _STYLES.get(note["kind"], "")))


def _rejected(document: Mapping[str, Any], *, verbose: bool) -> Iterator[Text]:
    """Settings that were never applied, and those without a decision of their own."""
    rejected: Sequence[Mapping[str, Any]] = document["rejected"]
    if rejected:
        count = sum(one["count"] for one in rejected)
        yield _text(f"Never applied: {count} setting{'' if count == 1 else 's'}, rejected unseen.")
        for one in rejected if verbose else rejected[:_REASONS]:
            yield _text(f"  {one['count']}: {one['reason']}", "dim")
    for trial in document["trials"]:
        if trial["state"] == "in_flight":
            yield _text(f"Being measured: {words.setting(trial['knobs'])}.")


def _text(text: str, style: str = "") -> Text:
    return Text("\n".join(escaped(line) for line in text.split("\n")), style)
