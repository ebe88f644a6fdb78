"""What `zftune tune` shows: every setting that was measured, what was decided, and the knobs that were found."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from rich.console import Group, RenderableType
from rich.markup import escape
from rich.panel import Panel
from rich.table import Table

from zftune.explain import words
from zftune.tuner.settings import Setting


def render(document: Mapping[str, Any]) -> RenderableType:
    """The document of a tuned run as a screen."""
    parts: list[RenderableType] = [_head(document)]
    if any(trial["step_ms"] is not None for trial in document["trials"]):
        parts.append(_history(document))
    decisions = [note for note in document["decisions"] if note["kind"] in ("adopt", "guard", "crash", "reopen")]
    parts += [escape(f"  {note['reason']}") for note in decisions]
    parts.append(_result(document))
    if document.get("ds_config") is not None:
        parts.append(_config(document["ds_config"]))
    parts += [f"[yellow]note: {escape(notice)}[/yellow]" for notice in document["notices"]]
    return Group(*parts)


def _config(found: Mapping[str, Any]) -> Panel:
    """What to write into the ds_config."""
    text = json.dumps({name: value for name, value in found.items() if name != "notes"}, indent=2)
    notes = "".join(f"\n{note}" for note in found.get("notes", ()))
    return Panel(escape(text + notes), title="for your ds_config", title_align="left")


def _head(document: Mapping[str, Any]) -> str:
    work = document["workload"]
    lines = [f"[bold]zftune tune[/bold]  {escape(work['model'] or 'your command')} on {escape(document['device'])}"]
    if document["rig"] is not None:
        lines.append(f"  rig {escape(document['rig']['name'])}: times are of an emulated accelerator")
    if (work.get("world_size") or 1) > 1:
        lines.append(f"  {work['ranks']}")
    if document.get("origin"):
        lines.append(f"  {escape(document['origin'])}")
    budget = document["budget"]
    if budget is None:
        return "\n".join(lines)
    what = f"(1 - coverage) x staleness at most {budget['steps']:.2f} steps; coverage {document['coverage']}"
    if budget["fixed_because"]:
        what = f"knobs that change the trajectory stay: {budget['fixed_because']}"
    return "\n".join([*lines, f"  quality {document['quality']}: {escape(what)}"])


def _history(document: Mapping[str, Any]) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2))
    table.add_column("")
    table.add_column("setting", overflow="fold")
    planned = any(trial["predicted_step_ms"] is not None for trial in document["trials"])  # there is a planner for it
    for name in (*(["planner ms"] if planned else []), "measured ms", "staleness"):
        table.add_column(name, justify="right")
    table.add_column("")
    best, fates = document["best"]["number"], words.fates(document)
    for trial in document["trials"]:
        if trial["state"] in ("rejected", "planned"):
            continue
        measured = "" if trial["step_ms"] is None else f"{trial['step_ms']:.1f}"
        predicted = [] if trial["predicted_step_ms"] is None else [f"{trial['predicted_step_ms']:.1f}"]
        table.add_row(
            str(trial["number"]),
            escape(str(Setting.from_knobs(trial["knobs"]))),
            *(predicted or [""] if planned else []),
            measured,
            f"{trial['staleness_steps']:.1f}",
            fates[trial["number"]],
            style="bold" if trial["number"] == best else None,
        )
    return table


def _counts(document: Mapping[str, Any]) -> str:
    made, rejected = document["measurements"], sum(trial["state"] == "rejected" for trial in document["trials"])
    return (
        f"{made} measurement{'' if made == 1 else 's'} in {document['steps']} steps; "
        f"{rejected} setting{' was' if rejected == 1 else 's were'} rejected unseen."
    )


def _result(document: Mapping[str, Any]) -> Panel:
    lines = []
    if document["interrupted"]:
        lines.append("Interrupted: this is what was found so far.")
    best, gain, cost = document["best"], document["gain"], document["cost"]
    if best is None:
        lines.append("The search had not begun.")
    elif gain is None:
        lines.append(words.nothing_adopted(document))
    else:
        lines.append(f"Keep {Setting.from_knobs(best['knobs'])}")
        verb = "saves" if gain["share"] >= 0 else "costs"
        lines.append(f"It {verb} {100 * abs(gain['share']):.1f} +/- {100 * gain['error']:.1f}% of the step time.")
    if cost is not None:
        lines.append(_counts(document))
        lines += [words.cost_and_gain(document)] if words.is_measured(document) else []
    if document["stopped"] and not (document.get("command") or {}).get("too_short"):  # the command's last words
        lines.append(document["stopped"])
    if document.get("run_id"):
        lines.append(f"zftune explain {document['run_id'][:8]} tells why.")
    return Panel(escape("\n".join(lines)), title="result", title_align="left")
