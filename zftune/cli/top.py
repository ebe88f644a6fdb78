"""`zftune top`: the runs of the daemon on a screen that follows them."""

from __future__ import annotations

import sys
import textwrap
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import typer
from rich.console import Group, RenderableType
from rich.text import Text

from zftune.daemon.client import http
from zftune.daemon.client.http import DaemonClient, called
from zftune.errors import BadInputError, DaemonError
from zftune.quality import adopted_from, coverage_advice
from zftune.store.account import saved_in_words
from zftune.store.preset_file import escaped
from zftune.text import STANDARD_OUTPUT, check_output_path, percent, write_json
from zftune.words import NONE, colour, seconds, short_setting

Run = Mapping[str, Any]


def name(run: Run) -> str:
    """How a run is called on the command line."""
    return escaped(called(run))


def model(run: Run) -> str:
    """Of a run."""
    return escaped(run["model"]) or NONE


def count(steps: int) -> str:
    """Steps in at most six characters."""
    if steps < 1_000_000:
        return str(steps)
    return f"{steps / 1e6:.4g}M" if steps < 1_000_000_000 else f"{steps / 1e9:.3g}G"


def step_ms(ms: float | None) -> str:
    """A step time without its unit, three figures and more."""
    if ms is None:
        return NONE
    return f"{ms:.2f}" if ms < 10 else f"{ms:.1f}" if ms < 1000 else f"{ms:.0f}"


def knobs(found: Mapping[str, Any] | None, *, few: bool = False) -> str:
    """Settings in short; see `short_setting`."""
    return NONE if found is None else escaped(short_setting(found, few=few))


def gain(found: Mapping[str, Any] | None) -> str:
    """With two standard errors."""
    return NONE if found is None else escaped(found["text"])


def stalls(run: Run) -> tuple[tuple[str, float], ...]:
    """Causes with their share of the step, most first; none where nothing is known."""
    ms = run["step_ms"]
    if not ms:
        return ()
    shares = ((escaped(cause), stall / ms) for cause, stall in run["stall_ms"].items() if stall > 0)
    return tuple(sorted(shares, key=lambda one: -one[1]))


def account(run: Run, gain: Mapping[str, Any] | None) -> str:
    """What a run took, spent and saved so far."""
    found = run["account"]
    took, spent_s = found["elapsed_s"], found["spent_s"]
    text = f"tuned for {count(found['steps'])} steps in {seconds(took)}, exploring cost "
    text += f"{seconds(spent_s)} ({percent(spent_s / took)})" if took and spent_s else "nothing"
    return ", ".join([text, *saved_in_words(found, gain)])


def state(run: Run) -> str:
    """Where a run stands, as a sentence."""
    reason = escaped(run["reason"]).rstrip(".")
    return f"Run {name(run)} is {run['title']}" + (f": {reason}." if reason else ".")


def line(run: Run) -> str:
    """A run at a glance."""
    ms = run["step_ms"]
    waits = "".join(f", {100 * share:.0f}% {cause}" for cause, share in stalls(run)[:2])
    time_taken = "no step yet" if ms is None else f"{step_ms(ms)} ms a step{waits}"
    now, best = run["knobs"] or run["incumbent"], run["incumbent"]
    settings = "" if now is None else f", {knobs(now)}"
    settings += "" if best is None or knobs(best) == knobs(now) else f" (the best so far: {knobs(best)})"
    at = f"step {run['step']}, {time_taken}{settings}"
    counted = f", {account(run, run['gain'])}" if run["account"]["steps"] else ""
    why = f"; {escaped(run['reason']).rstrip('.')}" if run["state"] == "ended" else ""
    return f"{name(run)}  {run['title']:<10}  {at}{counted}  ({model(run)}){why}"


def decision(one: Mapping[str, Any]) -> str:
    """A decision with its time."""
    at = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(one["at_unix_s"]))
    return f"{at}  {escaped(one['title']):<11}  {escaped(one['reason'])}"


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
_KINDS = {"adopt": "bold green", "guard": "bold red", "crash": "red", "void": "yellow"}
_BAR = 5
_WIDE_BAR = 20
_MOST_LINES = 4
_NOTICE_LINES = 12
_TRIED = ("measured", "in_flight", "crashed", "void")


@dataclass(frozen=True, slots=True, kw_only=True)
class Frame:
    """What is shown at one moment."""

    source: str
    runs: Sequence[Document]
    shown: Sequence[Document]
    looked_at: Document | None
    trouble: str = ""


def most_rows(height: int) -> int:
    """Runs that have a row on a screen of so many lines."""
    return max(1, (height - 14) // 2)


def frame(found: Frame, width: int, height: int) -> RenderableType:
    """A screen of this size, or a smaller one."""
    lines = [_headline(found, width)]
    if found.trouble:
        lines.append(_text(escaped(found.trouble), "bold yellow"))
    if found.runs:
        lines += _rows(found.shown, width)
    else:
        lines += [Text(), _text("No run is followed. Start one with: zftune run --online -- CMD", "dim")]
        lines += [_text(f"{http.PAST_RUNS.capitalize()}", "dim")]
    hidden = len(found.runs) - len(found.shown)
    if hidden > 0:
        lines.append(_text(f"and {hidden} more: zftune top RUN looks at one of them", "dim"))
    if found.looked_at is not None:
        lines += _details(found.looked_at, width, height - len(lines))
    return Group(*lines[:height])


def whole(details: Document, width: int) -> RenderableType:
    """A run with everything that is known of it, however long."""
    notices = details["run"]["notices"]
    lines = [*_facts(details), *_notices(notices, len(notices))]
    trials = _tried(details)
    decisions = details["decisions"]
    if decisions:
        lines += [
            Text(),
            _heading("decisions", len(decisions), len(decisions)),
            *(line for one in decisions for line in _decision(one, width, None)),
        ]
    if trials:
        lines += [Text(), _heading("settings", len(trials), len(trials))]
        lines += [_trial(one, details) for one in trials]
    for line in lines:
        line.no_wrap, line.overflow = False, "fold"
    return Group(*lines)


def _headline(found: Frame, width: int) -> Text:
    live = sum(one["state"] != "ended" for one in found.runs)
    ended = len(found.runs) - live
    count = f"{live} run{'' if live == 1 else 's'}{f' and {ended} ended' if ended else ''}"
    text = _text("zftune top", "bold").append(f"  {count} on {escaped(found.source)}", "dim")
    clock = time.strftime("%H:%M:%S")
    text.truncate(width - len(clock) - 2, overflow="ellipsis")
    return text.append(" " * max(2, width - text.cell_len - len(clock))).append(clock, "dim")


def _rows(shown: Sequence[Document], width: int) -> list[Text]:
    wide = width >= WIDE
    bar = _WIDE_BAR if wide else _BAR
    sizes = {"run": 8, "state": 10, "step": 6, "ms": 6, "stall": bar + 11, "gain": 11, "settings": 20}
    if not wide:
        sizes["settings"] += width - sum(sizes.values()) - len(sizes) + 1
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
        _text(name(run), "bold"),
        _text(run["title"], _STATES.get(run["state"], "")),
        _text(count(run["step"])),
        _text(step_ms(run["step_ms"])),
        _stall(run, bar),
        _text(gain(details["gain"])),
        _text(knobs(run["knobs"] or run["incumbent"], few=True)),
    )


def _cell(text: Text, size: int, title: str) -> Text:
    text.truncate(size, overflow="ellipsis")
    blanks = " " * (size - text.cell_len)
    return Text(blanks).append_text(text).append(" ") if title in ("step", "ms") else text.append(blanks + " ")


def _stall(run: Document, bar: int) -> Text:
    parts = stalls(run)
    if not parts:
        return _text(NONE if run["step_ms"] is None or run["stall_ms"] else "no GPU stream", "dim")
    text, filled, share = Text(), 0, 0.0
    for cause, part in parts:
        share += part
        until = min(bar, round(share * bar))
        text.append("█" * (until - filled), colour(cause))
        filled = max(filled, until)
    text.append("░" * (bar - filled), "dim")
    return text.append(f" {100 * parts[0][1]:.0f}% {parts[0][0]}")


def _reason(decisions: Sequence[Document]) -> Text:
    last = next((one for one in reversed(decisions) if one["kind"] != "remark"), None)
    if last is None:
        return _text("nothing was decided yet", "dim")
    return _text(escaped(last["reason"]), _KINDS.get(last["kind"], "dim"))


def _details(details: Document, width: int, height: int) -> list[Text]:
    """What is known of one run, in so many lines; where room is little, the newest of its decisions and trials."""
    lines = [Text(), *_facts(details), *_notices(details["run"]["notices"], height // _NOTICE_LINES)]
    trials = _tried(details)
    for_trials = min(len(trials), max(0, height - len(lines) - 2) // 3)
    room = height - len(lines) - 2 - (for_trials + 2 if for_trials else 0)
    decisions, count = _newest(details["decisions"], width, room)
    if decisions:
        lines += [Text(), _heading("decisions", count, len(details["decisions"])), *decisions]
    if for_trials:
        shown = trials[-min(len(trials), max(for_trials, height - len(lines) - 2)) :]
        lines += [Text(), _heading("settings", len(shown), len(trials))]
        lines += [_trial(one, details) for one in shown]
    for line in lines:
        line.truncate(width, overflow="ellipsis")
    return lines[: max(height, 0)]


def _newest(decisions: Sequence[Document], width: int, room: int) -> tuple[list[Text], int]:
    lines: list[Text] = []
    for count, one in enumerate(reversed(decisions)):
        more = _decision(one, width, _MOST_LINES)
        if len(lines) + len(more) > room:
            return lines, count
        lines = more + lines
    return lines, len(decisions)


def _facts(details: Document) -> list[Text]:
    run = details["run"]
    head = _text(name(run), "bold").append(f"  {model(run)}  {escaped(run['ranks'])}  pid {run['pid']}", "")
    head.append("  " + escaped(" ".join(run["argv"])), "dim")
    state = _text(run["title"], _STATES.get(run["state"], "")).append(f": {escaped(run['reason'])}", "not bold default")
    now, best = knobs(run["knobs"]), knobs(run["incumbent"])
    chosen = f"{now}, the best so far" if now == best else f"{now}; the best so far: {best}"
    lines = [head, state, _text(f"settings  {chosen}")]
    lines += [_text(f"account   {account(run, details['gain'])}")] if run["account"]["steps"] else []
    waits = []
    for cause, share in stalls(run):
        figures = f"{cause} {run['stall_ms'].get(cause, 0):.1f} ms ({100 * share:.0f}%)  "
        waits.append(Text.assemble(("█ ", colour(cause)), figures))
    begin = [Text("stall     ")] if run["stall_ms"] else []
    label = "loss  " if begin else "loss      "
    loss = [] if run["losses"] is None else [Text(f"{label}{escaped(run['losses']['sentence'])}  ")]
    # Where there is little room the first wait and the loss are seen.
    stall = Text.assemble(*begin, *waits[:1], *loss, *waits[1:], no_wrap=True, overflow="ellipsis")
    lines += [stall] if stall else []
    if run["coverage"] is not None and run["coverage"]["warning"] is not None:
        covered, assumed = (f"{100 * run['coverage'][name]:.0f}%" for name in ("measured", "assumed"))
        lines.append(_text(f"coverage  {covered} where {assumed} is assumed: {_turn(details)}", "yellow"))
    if run["dropped"]:
        lines.append(_text(f"{run['dropped']} statistics found no room in the training process", "yellow"))
    return lines


def _notices(notices: Sequence[str], most: int) -> list[Text]:
    shown, hidden = notices[: max(1, most)], len(notices[max(1, most) :])
    lines = [_text(escaped(one), "yellow") for one in shown]
    return [*lines, *([_text(f"and {hidden} more: zftune runs show", "dim")] if hidden else [])]


def _turn(details: Document) -> str:
    knobs, best, trials = details["run"]["knobs"], details["incumbent"], details["trials"]
    start = None if best is None else adopted_from(knobs, trials[0]["knobs"], trials[best]["knobs"])
    return coverage_advice(knobs, start)


def _heading(title: str, shown: int, count: int) -> Text:
    return _text(title, "bold").append("" if shown >= count else f"  the last {shown} of {count}", "dim")


def _decision(one: Document, width: int, most_lines: int | None) -> list[Text]:
    at = time.strftime("%H:%M:%S", time.localtime(one["at_unix_s"]))
    head = _text(f"{at}  ", "dim").append(f"{escaped(one['title']):<11}  ", _KINDS.get(one["kind"], "bold"))
    indent = " " * head.cell_len
    size = max(20, width - head.cell_len)
    first, *others = textwrap.wrap(escaped(one["reason"]), size, max_lines=most_lines, placeholder=" …") or [""]
    return [head.append(first), *(_text(indent + other) for other in others)]


def _tried(details: Document) -> list[Document]:
    """Settings that were measured or were to be."""
    return [one for one in details["trials"] if one["state"] in _TRIED]


def _trial(one: Document, details: Document) -> Text:
    best = "◆" if one["number"] == details["incumbent"] else " "
    line = _text(f"{best} {one['number']:>3}  ").append(f"{escaped(one['fate']):<16}", "bold")
    line.append(f"  {step_ms(one['step_ms']):>7} ms")
    line.append(f"  {knobs(one['knobs'])}  ")
    line.append(f"from {escaped(one['source'])}" + (f": {escaped(one['reason'])}" if one["reason"] else ""), "dim")
    return line


def _text(text: str, style: str = "") -> Text:
    return Text(text, style, no_wrap=True, overflow="ellipsis")


SCHEMA = "zftune.top/1"
_LEAST_S, _MOST_S = 0.1, 3600.0


def top(
    run: Annotated[
        str | None,
        typer.Argument(
            metavar="RUN",
            help="The run that is looked at: its id, or its beginning. Default: the newest that trains.",
            show_default=False,
        ),
    ] = None,
    once: Annotated[bool, typer.Option("--once", help="Print it once; in a pipe that is the default.")] = False,
    interval_s: Annotated[float, typer.Option("--interval-s", metavar="SECONDS", help="Between two looks.")] = 1.0,
    json_path: Annotated[
        str | None, typer.Option("--json", metavar="PATH", help="Write what is shown once; '-': standard output.")
    ] = None,
) -> None:
    """Watch the runs that the daemon tunes: waiting by cause, settings, gain, decisions. Ctrl-C ends it."""
    if not _LEAST_S <= interval_s <= _MOST_S:
        raise BadInputError(f"--interval-s is {interval_s:g}; it must be from {_LEAST_S:g} to {_MOST_S:g}")
    check_output_path(json_path)
    with DaemonClient() as client:
        if json_path is not None:
            _write(client, run, json_path)
        if json_path == STANDARD_OUTPUT:
            return
        if once or json_path is not None or not sys.stdout.isatty():
            _print(client, run)
        else:
            _watch(client, run, interval_s)


def look(client: DaemonClient, run: str | None, height: int) -> Frame:
    """What there is to see now.

    Args:
        run: the one that is looked at; None: the newest that trains.

    Raises:
        BadInputError: there is no such run, or more than one.
        DaemonError: the daemon cannot be asked.
    """
    runs = sorted(http.all_runs(client), key=lambda one: one["state"] == "ended")  # those that train first
    if run is not None:
        wanted = http.among(runs, run)["run"]
    else:
        wanted = max(runs, key=lambda one: (one["state"] != "ended", one["began_unix_s"]))["run"] if runs else None
    rows = runs[: most_rows(height)]
    found = {one["run"]: http.details(client, one["run"]) for one in rows}
    looked_at = None if wanted is None else found.get(wanted) or http.details(client, wanted)
    return Frame(source=str(client.path), runs=runs, shown=tuple(found.values()), looked_at=looked_at)


def _write(client: DaemonClient, run: str | None, json_path: str) -> None:
    runs = http.all_runs(client)
    wanted = runs if run is None else [http.among(runs, run)]
    documents: list[dict[str, Any]] = [http.details(client, one["run"]) for one in wanted]
    write_json({"schema": SCHEMA, "runs": documents}, json_path)


def _print(client: DaemonClient, run: str | None) -> None:
    from rich.console import Console

    console = Console(highlight=False)
    console.print(frame(look(client, run, console.height), console.width, console.height))


def _watch(client: DaemonClient, run: str | None, interval_s: float) -> None:
    from dataclasses import replace

    from rich.console import Console
    from rich.live import Live

    console = Console(highlight=False)
    found = look(client, run, console.height)  # what is wrong now is said on the terminal as it is
    try:
        with Live(console=console, screen=True, auto_refresh=False, redirect_stderr=False) as live:
            while True:
                live.update(frame(found, console.width, console.height), refresh=True)
                time.sleep(interval_s)
                try:
                    found = look(client, run, console.height)
                except DaemonError as error:  # it may come back
                    found = replace(found, trouble=f"what is below is old: {error}")
    except KeyboardInterrupt:
        return
