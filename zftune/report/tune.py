"""A search as one HTML file that needs nothing else: of a document of `zftune tune` or of `zftune explain`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from html import escape
from typing import Any

from zftune.explain import words
from zftune.profile.units import amount, ms, number, percent
from zftune.report.chart import Chart
from zftune.report.html import page, section
from zftune.report.tables import table
from zftune.report.tune_history import history_chart
from zftune.report.tune_knobs import importance_chart, knobs_chart, plane_chart

Document = Mapping[str, Any]


def tune_page(document: Document) -> str:
    """The page of a search.

    Args:
        document: what `zftune tune --json` or `zftune explain --json` writes.
    """
    charts = _charts(document)
    body = [_head(document), *(text for text, _ in charts.values()), *_tables(document), _foot(document)]
    figures = {name: chart.figure.to_plotly_json() for name, (_, chart) in charts.items() if chart is not None}
    return page(_title(document), "\n".join(body), document, figures)


def _title(document: Document) -> str:
    run = document.get("run")
    command = "tune" if run is None else f"explain {run['run_id'][:8]}"
    return f"zftune {command}: {_subject(document)}"


def _subject(document: Document) -> str:
    work, command = document["workload"], document.get("command") or {}
    name = work.get("model") or command.get("script") or "a command"
    return f"{name}, {amount(work['parameters'])} parameters" if work.get("parameters") else str(name)


# --- the head ---------------------------------------------------------------------------------------------------------


def _head(document: Document) -> str:
    work = document["workload"]
    sentences = document.get("verdict") or words.verdict(document)
    stopped = [document["stopped"]] if document["stopped"] else []
    place = [document["device"], f"quality {document['quality']}"]
    if work.get("micro_batch") and work.get("sequence"):
        place.insert(1, f"{work['micro_batch']} × {work['sequence']} tokens")
    place += [str(document["run"]["backend"])] if "run" in document else []
    place += [work["ranks"]] if (work.get("world_size") or 1) > 1 else []
    lines = "\n".join(f'<p class="verdict">{escape(sentence)}</p>' for sentence in (*sentences, *stopped))
    title = escape(_title(document).replace(": ", " · ", 1))
    return (
        f'<header>\n<h1>{title}</h1>\n<p class="place">{escape(" · ".join(map(str, place)))}</p>\n'
        f"{lines}\n{_rig(document)}{_tiles(document)}\n</header>"
    )


def _rig(document: Document) -> str:
    rig = document["rig"]
    if rig is None:
        return ""
    text = f"Emulated: times come from the rig {rig['name']}, not from a GPU. {rig.get('source', '')}"
    return f'<p class="rig">{escape(text.strip())}</p>\n'


def _tiles(document: Document) -> str:
    cells = "".join(
        f"<div><dt>{escape(title)}</dt><dd>{escape(value)}<small>{escape(more)}</small></dd></div>"
        for title, value, more in _figures(document)
    )
    return f'<dl class="tiles">{cells}</dl>' if cells else ""


def _figures(document: Document) -> Iterator[tuple[str, str, str]]:
    best, start, gain, cost = (document[name] for name in ("best", "start", "gain", "cost"))
    if best is None or cost is None:
        return
    if best["step_ms"] is not None:
        before = "" if start["step_ms"] is None or best == start else f"{ms(start['step_ms'])} before"
        yield "Step", ms(best["step_ms"]), before
    if gain is not None:
        title = "Gained" if gain["share"] >= 0 else "Given up"
        error = "" if gain["error"] is None else f"± {100 * gain['error']:.1f}% of the step time"
        yield title, f"{100 * abs(gain['share']):.1f}%", error
    share = percent(cost["spent_s"] / cost["elapsed_s"]) if cost["elapsed_s"] else "0%"
    yield "Spent on exploring", share, f"{words.seconds(cost['spent_s'])} of {words.seconds(cost['elapsed_s'])}"
    if cost.get("break_even_s") is not None and cost["spent_s"] > 0:
        after = words.seconds(cost["break_even_s"]) if cost["break_even_s"] > 0 else "at once"
        yield "Broke even", after, "of training since the search began"
    elif cost.get("remaining_s") is not None:
        yield "Breaks even in", words.seconds(cost["remaining_s"]), "of training with these knobs"
    tried = sum(trial["step_ms"] is not None for trial in document["trials"])
    unseen = sum(trial["state"] == "rejected" for trial in document["trials"])
    yield "Measurements", str(document["measurements"]), f"of {tried} settings; {unseen} more rejected unseen"


def _foot(document: Document) -> str:
    version = document.get("zftune") or (document.get("software") or {}).get("zftune") or ""
    text = f"Written by zftune {version} from a {document['schema']} document, which this page holds as JSON."
    return f"<footer>{escape(text)}</footer>"


# --- charts -----------------------------------------------------------------------------------------------------------


def _charts(document: Document) -> dict[str, tuple[str, Chart | None]]:
    """Sections with their charts, by id."""
    importance: Chart | str = importance_chart(document) if document["start"] is not None else "Nothing was measured."
    why = importance if isinstance(importance, str) else ""
    found = (
        ("history", "Search history", _HISTORY, history_chart(document), "Nothing was measured."),
        ("plane", "Step time over k and S", _PLANE, plane_chart(document), _flat(document)),
        ("knobs", "Step time over the other knobs", _KNOBS, knobs_chart(document) if document["best"] else None, _SAME),
        ("importance", "What matters", _IMPORTANCE, None if isinstance(importance, str) else importance, why),
    )
    return {name: (section(name, title, lead, chart, empty), chart) for name, title, lead, chart, empty in found}


_HISTORY = (
    "Each measurement in order, with two standard errors. A setting is adopted after the incumbent was measured before "
    "and after it; dotted lines mark where that happened, and where the search began again or was stopped."
)
_PLANE = (
    "Circles were measured, fast ones dark; small squares were not. Settings of the same k and S that differ in other "
    "knobs stand beside each other."
)
_KNOBS = "Measured settings, whatever their other knobs were."
_IMPORTANCE = "By PED-ANOVA: how much the fastest settings differ from all others in a knob. Few settings say little."
_SAME = "No other knob was set in more than one way."


def _flat(document: Document) -> str:
    budget = document["budget"]
    why = f": {budget['fixed_because']}" if budget is not None and budget["fixed_because"] else ""
    return f"k and S were not both searched{why}."


# --- tables -----------------------------------------------------------------------------------------------------------


def _tables(document: Document) -> Iterator[str]:
    tried = [trial for trial in document["trials"] if trial["state"] != "rejected"]
    unseen = [trial for trial in document["trials"] if trial["state"] == "rejected"]
    if document["decisions"]:
        yield _details("Decisions", _decisions(document), is_open=True)
    if tried:
        yield _details("Settings", _trials(document, tried), is_open=True)
    if unseen:
        reasons = table(
            ("settings", "why"), [(str(one["count"]), one["reason"]) for one in words.rejected(unseen)], ("value",)
        )
        yield _details("Why settings were rejected unseen", reasons, is_open=True)
        yield _details("Settings that were rejected unseen", _trials(document, unseen), is_open=False)
    if document["notices"]:
        lines = "".join(f'<p class="note">{escape(notice)}</p>' for notice in document["notices"])
        yield _details("Notices", lines, is_open=True)


def _details(title: str, content: str, *, is_open: bool) -> str:
    return f"<details{' open' if is_open else ''}><summary>{escape(title)}</summary>\n{content}</details>"


def _decisions(document: Document) -> str:
    rows = []
    for note in document["decisions"]:
        at_s = note.get("at_s", note["details"].get("elapsed_s"))
        figures = "; ".join(words.measured(document, note))
        setting = "" if note["trial"] is None else str(note["trial"])
        rows.append(("" if at_s is None else words.seconds(at_s), note["kind"], setting, note["reason"], figures))
    return table(("at", "decision", "setting", "reason", "measured"), rows, ("value", "", "value", "", "source"))


def _trials(document: Document, trials: Sequence[Mapping[str, Any]]) -> str:
    fates = words.fates(document)
    heads = ("", "setting", "by", "measured", "planner", "staleness", "state", "why")
    rows = [
        (
            str(trial["number"]),
            words.setting(trial["knobs"]),
            str(trial["source"]),
            _ms(trial["step_ms"]),
            _ms(trial["predicted_step_ms"]),
            "" if trial["staleness_steps"] is None else number(trial["staleness_steps"]),
            fates[trial["number"]],
            trial["reason"] or "",
        )
        for trial in trials
    ]
    return table(heads, rows, ("value", "", "", "value", "value", "value", "", "source"))


def _ms(value: float | None) -> str:
    return "" if value is None else ms(value)
