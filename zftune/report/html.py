"""A profile as one HTML file that needs nothing else: plotly.js, figures and numbers are all in it.

A content security policy keeps the page from asking any server for anything. The whole document is embedded under
the id "profile", and the figures under "figures", both as JSON.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from html import escape
from importlib import resources
from pathlib import Path
from typing import Any

from zftune.plotly_js import plotly_js
from zftune.report import tables
from zftune.report.run import roofs_chart, run_chart
from zftune.report.trace import timeline_chart
from zftune.report.values import Chart, Document, reason
from zftune.text import amount, ms, number, write_text

_POLICY = "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data: blob:"


def write_html(document: Document, path: str | Path) -> None:
    """Write the report of a profile.

    Raises:
        ZftuneError: the file cannot be written.
    """
    write_text(html(document), path, option="--html")


def html(document: Document) -> str:
    """The report of a valid profile document."""
    body, figures = contents(document)
    return page(f"zftune profile: {_subject(document)}", body, document, figures)


def page(title: str, body: str, document: Document, figures: Mapping[str, Any]) -> str:
    """A page that holds everything it needs."""
    return _PAGE.format(
        policy=_POLICY,
        title=escape(title),
        style=_asset("style.css"),
        body=body,
        profile=_json(document),
        figures=_json(figures),
        plotly=plotly_js(),
        script=_asset("page.js"),
    )


def contents(document: Document) -> tuple[str, dict[str, Any]]:
    """What the page says, as HTML, and its figures by the ids of their places, as plotly.js takes them."""
    charts = {"timeline": timeline_chart(document), "run": run_chart(document), "roofs": roofs_chart(document)}
    figures = {name: chart.figure.to_plotly_json() for name, chart in charts.items() if chart is not None}
    sections = (_head(document), *_charts(document, charts), *_tables(document), foot(document))
    return "\n".join(sections), figures


_PAGE = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<link rel="icon" href="data:,">
<title>{title}</title>
<style>
{style}</style>
</head>
<body>
<noscript>The charts need JavaScript; every figure is in the tables below.</noscript>
<main>
{body}
</main>
<script type="application/json" id="profile">{profile}</script>
<script type="application/json" id="figures">{figures}</script>
<script>{plotly}</script>
<script>
{script}</script>
</body>
</html>
"""


def _json(value: Any) -> str:
    """JSON that no HTML parser takes for markup."""
    text = json.dumps(value, allow_nan=False, separators=(",", ":"))
    return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")


def _asset(name: str) -> str:
    return resources.files("zftune.report").joinpath("page", name).read_text(encoding="utf-8")


# --- sections ---------------------------------------------------------------------------------------------------------


def _head(document: Document) -> str:
    verdict = document["verdict"] or ["No verdict: the figures follow."]
    sentences = "\n".join(f'<p class="verdict">{escape(sentence)}</p>' for sentence in verdict)
    subject, place = escape(_subject(document)), escape(_place(document))
    figures = ((title, value, tables.unbroken(more)) for title, value, more in tables.key_figures(document))
    named = f'<h1>zftune profile · {subject}</h1>\n<p class="place">{place}</p>'
    return f"<header>\n{named}\n{sentences}\n{about_rig(document['rig'])}{tables.tiles(figures)}\n</header>"


def foot(document: Document) -> str:
    """What wrote a page, and from what."""
    version = document.get("zftune") or document["software"]["zftune"]
    text = f"Written by zftune {version} from a {document['schema']} document, which this page holds as JSON."
    return f"<footer>{escape(text)}</footer>"


def _subject(document: Document) -> str:
    workload, command = document["workload"], document["command"]
    parts = [command["script"] or "a command"] if command is not None else []
    parts += [workload["model"]] if workload["model"] is not None else []
    if workload["parameters"] is not None:
        parts.append(f"{amount(workload['parameters'])} parameters")
    parts += [workload["dtype"]] if workload["dtype"] is not None else []
    if workload["micro_batch"] is not None and workload["sequence"] is not None:
        parts.append(f"{workload['micro_batch']} × {workload['sequence']} tokens")
    return ", ".join(parts)


def _place(document: Document) -> str:
    machine, steps, command = document["hardware"], document["steps"], document["command"]
    parts = [document["device"]]
    parts += [machine["cpu_model"]] if machine["cpu_model"] is not None else []
    parts += [f"{number(machine['usable_cores'])} cores"] if machine["usable_cores"] is not None else []
    if command is not None:
        parts += [*command["systems"], _count(command["ranks"], "rank")]
    elif len(document["ranks"]) > 1:
        parts.append(_count(len(document["ranks"]), "rank"))
    parts.append(f"{_count(steps['measured'], 'step')}, {steps['discarded']} more discarded")
    return " · ".join(parts)


def _count(count: int, name: str) -> str:
    return f"{count} {name}" if count == 1 else f"{count} {name}s"


def about_rig(rig: Mapping[str, Any] | None) -> str:
    """That times are an emulated accelerator's, where they are."""
    if rig is None:
        return ""
    text = f"Emulated hardware: times come from the rig {rig['name']}, not from a GPU: {rig.get('source', '')}"
    return f'<p class="rig">{escape(text.strip(": "))}</p>\n'


def _charts(document: Document, charts: dict[str, Chart | None]) -> Iterable[str]:
    timeline = document["timeline"]
    yield section(
        "timeline",
        "One update window" if document["knobs"] is not None else "A few steps",
        None if timeline is None else _timeline_lead(document),
        charts["timeline"],
        f"There is no timeline: {reason(document, 'timeline')}.",
    )
    lead = "What each measured step was spent on, and what was sampled meanwhile"
    lead += "; the steps of the timeline above lie on the blue band." if timeline is not None else "."
    yield section("run", "Every measured step", lead, charts["run"], "")
    yield section(
        "roofs",
        "The least possible step",
        "How long each resource alone would need for a step, at its measured rate or that of the emulated hardware. "
        "No step can be shorter than the slowest of them needs. What this run's step takes beyond that is waiting, "
        "which better overlap can win. The deferred share is offload_ratio × (1 − topk_ratio): what the host updates.",
        charts["roofs"],
        f"No lower bound is known: {reason(document, 'roofs')}.",
    )


def _timeline_lead(document: Document) -> str:
    timeline = document["timeline"]
    first, last = timeline["first_step"], timeline["first_step"] + timeline["steps"] - 1
    steps = f"Step {first}" if first == last else f"Steps {first} to {last}"
    return f"{steps}, {ms(timeline['length_ms'])} in all, by resource. Drag to zoom, double-click to see all again."


def section(name: str, title: str, lead: str | None, chart: Chart | None, empty: str) -> str:
    """A chart with its title, legend and notes."""
    parts = [f'<section aria-labelledby="about-{name}">', f'<h2 id="about-{name}">{escape(title)}</h2>']
    if chart is None:
        parts.append(f'<p class="empty">{escape(empty)}</p>')
    else:
        if lead is not None:
            parts.append(f'<p class="lead">{escape(lead)}</p>')
        swatches = (f'<li><i style="background:{fill}"></i>{escape(kind)}</li>' for kind, fill in chart.legend.items())
        parts.append(f'<ul class="legend">{"".join(swatches)}</ul>')
        shape = f'role="img" aria-labelledby="about-{name}" style="height:{chart.figure.layout.height}px"'
        parts.append(f'<div class="plot" id="{name}" {shape}></div>')
        parts += [f'<p class="note">{escape(note)}</p>' for note in chart.notes]
    return "\n".join([*parts, "</section>"])


def _tables(document: Document) -> Iterable[str]:
    for title, content, is_open in (
        ("Figures and their sources", tables.figures_table(document), True),
        ("What is missing, and why", tables.missing_table(document), True),
        ("Ranks", tables.ranks_table(document), True),
        ("Knobs", tables.knobs_table(document), False),
        ("Workload, machine and versions", tables.machine_table(document), False),
    ):
        yield details(title, content, is_open=is_open)


def details(title: str, content: str, *, is_open: bool) -> str:
    """A part of a page that can be folded."""
    return f"<details{' open' if is_open else ''}><summary>{escape(title)}</summary>\n{content}</details>"
