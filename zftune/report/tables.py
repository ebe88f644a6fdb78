"""The page's tables and tiles, as HTML in which all text is escaped."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import Any

from zftune.profile.units import ms, number, percent, size, times
from zftune.report.values import Document, figures, leaves, rate, shown, source_of

_GROUPS = {
    "step_ms": "step",
    "phases_ms": "phases of a step",
    "hidden_ms_per_step": "hidden waits",
    "waits_ms": "waits of the training thread, per step",
    "link": "link",
    "host": "host update",
    "nvml": "GPU counters (NVML)",
    "system": "host counters",
    "overhead_fraction": "cost of measuring",
}


def table(head: Sequence[str], rows: Iterable[Sequence[str]], classes: Sequence[str] = ()) -> str:
    """A table of plain text.

    Args:
        head: the columns' titles.
        rows: cells; a row of one cell is the heading of those that follow.
        classes: of each column's cells.
    """
    kinds = [*classes, *([""] * (len(head) - len(classes)))]
    titles = "".join(f'<th scope="col">{escape(title)}</th>' for title in head)
    body = []
    for row in rows:
        if len(row) == 1:
            body.append(f'<tr class="group"><th colspan="{len(head)}" scope="colgroup">{escape(row[0])}</th></tr>')
        else:
            cells = "".join(f'<td class="{kind}">{escape(cell)}</td>' for cell, kind in zip(row, kinds, strict=True))
            body.append(f"<tr>{cells}</tr>")
    return f'<div class="scroll"><table><thead><tr>{titles}</tr></thead><tbody>{"".join(body)}</tbody></table></div>'


def figures_table(document: Document) -> str:
    """Every figure with its source."""
    rows: list[Sequence[str]] = []
    group = ""
    for name, value in figures(document):
        if name.partition(".")[0] != group:
            group = name.partition(".")[0]
            rows.append((_GROUPS.get(group, group),))
        rows.append((name, shown(name, value), source_of(document, name)))
    return table(("figure", "value", "source"), rows, ("name", "value", "source"))


def missing_table(document: Document) -> str:
    """What is null, and why."""
    rows = [*document["missing"].items()]
    for field in ("hardware", "software"):
        rows += [(f"{field}.{name}", reason) for name, reason in document[field]["missing"].items()]
    return table(("field", "why it is missing"), rows, ("name",)) if rows else "<p>Nothing is missing.</p>"


def ranks_table(document: Document) -> str:
    """The measured ranks beside each other."""
    phases = ("data", "forward", "backward", "optimizer", "other")
    rows = [
        (
            str(rank["rank"]),
            str(rank["steps"]),
            *(ms(rank["step_ms"][key]) for key in ("mean", "p50", "p95")),
            *(shown(f"phases_ms.{phase}", (rank["phases_ms"] or {}).get(phase)) for phase in phases),
        )
        for rank in document["ranks"]
    ]
    return table(("rank", "steps", "step mean", "p50", "p95", *phases), rows, ["value"] * 10)


def knobs_table(document: Document) -> str:
    """The knobs that the run had."""
    knobs = document["knobs"]
    if knobs is None:
        return "<p>This run has no knobs of zenflow.</p>"
    rows = [(name, "off" if value is None else shown("", value)) for name, value in knobs.items()]
    return table(("knob", "value"), rows, ("name", "value"))


def machine_table(document: Document) -> str:
    """Hardware, software, workload and what they hash to."""
    rows: list[Sequence[str]] = []
    for field in ("command", "workload", "hardware", "software", "fingerprint", "rig"):
        known = [(name, value) for name, value in leaves(document[field], field) if value is not None]
        known = [(name, value) for name, value in known if ".missing." not in name and name != f"{field}.gpus"]
        if known:
            rows += [(field,), *((name, shown(name, value)) for name, value in known)]
    for index, gpu in enumerate(document["hardware"]["gpus"] or ()):
        rows += [(f"GPU {index}",), *((name, shown(name, value)) for name, value in gpu.items())]
    return table(("field", "value"), rows, ("name",))


def tiles(document: Document) -> str:
    """The key figures."""
    cells = "".join(
        f"<div><dt>{escape(title)}</dt><dd>{escape(value)}<small>{escape(_unbroken(more))}</small></dd></div>"
        for title, value, more in _tiles(document)
    )
    return f'<dl class="tiles">{cells}</dl>'


def _unbroken(text: str) -> str:
    """Text that breaks at its commas only."""
    return ", ".join(part.replace(" ", "\u00a0") for part in text.split(", "))


def _tiles(document: Document) -> Iterable[tuple[str, str, str]]:
    step, stall, speed, roofs = (document[field] for field in ("step_ms", "stall", "throughput", "roofs"))
    yield "Step", ms(step["mean"]), f"p50 {ms(step['p50'])}, p95 {ms(step['p95'])}"
    if speed["tokens_per_s"] is not None:
        yield "Speed", f"{number(speed['tokens_per_s'])} tokens/s", f"{number(speed['steps_per_s'])} steps/s"
    else:
        yield "Speed", f"{number(speed['steps_per_s'])} steps/s", f"{document['steps']['measured']} steps measured"
    if stall is not None:
        worst = max(stall["by_cause"].items(), key=lambda item: item[1], default=None)
        most = f", most by {worst[0]}" if worst is not None and worst[1] > 0 else ""
        yield "Stall", percent(stall["fraction"]), f"{ms(stall['ms_per_step'])} a step{most}"
    if roofs is not None:
        yield "Least possible step", ms(roofs["least_step_ms"]), _bound(roofs)
    yield from _offload_tiles(document)
    if document["overhead_fraction"] is not None:
        yield "Cost of measuring", percent(document["overhead_fraction"]), "of a step"


def _offload_tiles(document: Document) -> Iterable[tuple[str, str, str]]:
    baselines, link, host = document["baselines"] or {}, document["link"], document["host"]
    if document["practicality"] is not None:
        yield "Practicality", percent(document["practicality"]), "of the speed without offloading"
    if baselines.get("zero_offload") is not None:
        yield "Against ZeRO-Offload", times(baselines["zero_offload"]["speedup"]), "its step over this run's"
    down, up = (None if link is None else link[f"{way}_bytes_per_step"] for way in ("d2h", "h2d"))
    if down is not None and up is not None:
        yield "Link a step", size(down + up), f"{size(down)} down, {size(up)} up"
    if host is not None and host["gbps"] is not None and host["ceiling_gbps"] is not None:
        share = percent(host["gbps"] / host["ceiling_gbps"])
        yield "Host update", rate(host["gbps"]), f"{share} of {rate(host['ceiling_gbps'])}"
    if document["memory"]["device_peak_bytes"] is not None:
        yield "GPU memory", size(document["memory"]["device_peak_bytes"]), "peak"


def _bound(roofs: Mapping[str, Any]) -> str:
    names = {"compute_ms": "compute", "d2h_ms": "link down", "h2d_ms": "link up", "host_ms": "host memory"}
    highest = max(((roofs[field], name) for field, name in names.items() if roofs[field] is not None), default=None)
    return "" if highest is None else f"bound by {highest[1]}"
