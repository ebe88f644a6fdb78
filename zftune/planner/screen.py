"""A plan on one screen: the answer, the settings beside each other, memory, and what the knobs are.

Fits 100 columns, or 80. Nothing is told by colour alone.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from rich import box
from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.panel import Panel
from rich.rule import Rule
from rich.table import Table
from rich.text import Text

from zftune.bars import CAUSE_KINDS, COMPUTE, Bar, StackedBar
from zftune.planner.choosing import LEAST_HEADROOM_BYTES
from zftune.quality import assumed_coverage
from zftune.text import amount, ms, percent, size
from zftune.words import CAUSES

Document = Mapping[str, Any]

WIDTH = 100
"""Columns, where there are so many."""
_NAMES = {"proposal": "proposed", "no_offload": "no offloading", "zero_offload": "ZeRO-Offload"}
_USES = {
    "weights": "weights",
    "gathered": "gathered weights",
    "state": "state",
    "activations": "activations",
    "gradients": "gradients",
    "packed": "gradients on their way",
    "arriving": "weights on their way",
    "context": "CUDA context",
    "segments": "allocator",
    "log": "gradients of S steps",
    "staging": "weights on their way",
}
_LEGEND = (
    "k: topk_ratio, the share of columns that the GPU updates in every step. S: update_interval, the steps whose other "
    "gradients the CPU applies together; sync: the step waits for it; serial: that too, and nothing of copying and "
    "updating overlaps (pipeline none). lag: apply_lag, the steps until that shows. "
    "ratio: offload_ratio, the share of the optimizer's state on the host. least S: the shortest with which the CPU "
    "keeps up. stale: by how many steps updates are late on average."
)


def render(document: Document, width: int = WIDTH) -> RenderableType:
    """The whole screen of a plan, `width` columns wide."""
    width = min(width, WIDTH)
    rows = list(_rows(document))
    parts: list[RenderableType] = [_verdict(document, width), _heading("a step by setting, on one scale")]
    parts += [_bars(rows, width), _heading("the settings beside each other"), _table(rows, width)]
    parts.append(Padding(Text(_LEGEND, style="dim"), (0, 0, 1, 0)))
    if document["proposal"] is not None:
        parts += [_heading("the proposal's settings and memory"), _details(document, width)]
    parts.append(_notes(document))
    return Group(*parts)


def _rows(document: Document) -> Iterator[tuple[str, Mapping[str, Any]]]:
    if document["proposal"] is not None:
        yield _NAMES["proposal"], document["proposal"]
    for number_, one in enumerate(document["alternatives"], 2):
        yield f"choice {number_}", one
    for name, one in document["baselines"].items():
        yield _NAMES[name], one


def _heading(text: str) -> RenderableType:
    return Rule(Text(text, style="bold"), align="left", style="dim")


def _verdict(document: Document, width: int) -> RenderableType:
    sentences = [Text(sentence) for sentence in document["verdict"]]
    sentences[0].stylize("bold")
    model, job, machine = document["model"], document["job"], document["machine"]
    gpus = "".join(f"{job[name]} x " for name in ("nodes", "gpus") if job[name] > 1)
    subject = f"{model['name']} · {amount(model['parameters'])} parameters · {model['dtype']}"
    passes = f"{job['accumulation']} × " if job["accumulation"] > 1 else ""
    batch = f"{passes}{job['micro_batch']} × {job['seq']} tokens{', checkpointing' if job['checkpointing'] else ''}"
    return Panel(
        Group(*sentences),
        title=Text.assemble(("zftune plan", "bold"), f" · {subject}"),
        title_align="left",
        subtitle=Text(f"{gpus}{machine['gpu']} ({machine['name']}) · {batch}", style="dim"),
        subtitle_align="right",
        border_style="green" if document["proposal"] is not None else "red",
        box=box.ROUNDED,
        padding=(0, 1),
        width=width,
    )


def _bars(rows: list[tuple[str, Mapping[str, Any]]], width: int) -> RenderableType:
    table = Table.grid(padding=(0, 1))
    table.add_column(width=14)
    table.add_column(width=10, justify="right")
    table.add_column(width=width - 27)
    scale = max(row["step_ms"] for _, row in rows)
    for name, row in rows:
        parts = [(COMPUTE, row["compute_ms"])]
        parts += [(kind, row["stall_ms_by_cause"].get(cause, 0.0)) for cause, kind in CAUSE_KINDS.items()]
        style = "" if row["fits"] else "dim"
        table.add_row(Text(name, style=style), Text(ms(row["step_ms"]), style=style), StackedBar(Bar(parts), scale))
    stalls = [row["stall_ms_by_cause"] for _, row in rows]
    seen = [kind for cause, kind in CAUSE_KINDS.items() if any(stall.get(cause, 0.0) > 0 for stall in stalls)]
    legend = "   ".join(f"{kind.fill} {CAUSES.get(kind.name, kind.name)}" for kind in (COMPUTE, *seen))
    table.add_row("", "", Text(legend, style="dim"))
    return table


def _table(rows: list[tuple[str, Mapping[str, Any]]], width: int) -> RenderableType:
    gap = (0, 1) if width >= WIDTH else 0
    table = Table(box=box.SIMPLE_HEAD, padding=gap, pad_edge=False, show_edge=False)
    for head in ("", "k", "S", "lag", "ratio", "stall", "least S", "stale", "GPU", "host", "fits"):
        table.add_column(head, justify="right" if head else "left", no_wrap=True)
    for name, row in rows:
        knobs, memory = row["knobs"], row["memory"]
        offloads, overlaps = knobs["offload_ratio"] > 0, knobs["overlap_step"]
        waits = "serial" if knobs["pipeline"] == "none" else "sync"
        table.add_row(
            name,
            f"{knobs['topk_ratio']:g}" if offloads else "-",
            str(knobs["update_interval"]) if overlaps else waits if offloads else "-",
            str(knobs["apply_lag"]) if overlaps else "-",
            f"{knobs['offload_ratio']:g}",
            percent(sum(row["stall_ms_by_cause"].values()) / row["step_ms"]),
            ("none" if row["s_min"] is None else str(row["s_min"])) if offloads else "-",
            f"{row['staleness_steps']:.1f}",
            size(memory["device_bytes"]),
            size(memory["host_bytes"]) if memory["host_bytes"] else "-",
            "yes" if row["fits"] else "no",
        )
    return table


def _details(document: Document, width: int) -> RenderableType:
    row = document["proposal"]
    memory = row["memory"]
    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim", width=16)
    table.add_column(width=width - 20)
    table.add_row("in Python", row["python"])
    table.add_row("in a ds_config", f'"zero_optimization": {json.dumps(row["ds_config"])}')
    table.add_row("each GPU", _uses(memory["device_by_use"]))
    if memory["host_bytes"]:
        pinned = f"; {size(memory['pinned_bytes'])} of it pinned (never swapped out)"
        table.add_row("host", _uses(memory["host_by_use"]) + pinned)
    if memory["migration_bytes"]:
        table.add_row("other columns", f"choosing them takes up to {size(memory['migration_bytes'])} more of the host")
    loads = ", ".join(f"{CAUSES.get(name, name)} {ms(value)}" for name, value in row["loads_ms"].items() if value)
    busy = f"; the host is busy {percent(row['host_utilisation'])} of the time" if memory["host_bytes"] else ""
    table.add_row("a step's work", f"{loads}{busy}")
    return table


def _uses(uses: Mapping[str, int]) -> str:
    return ", ".join(f"{_USES.get(name, name)} {size(value)}" for name, value in uses.items() if value)


def _notes(document: Document) -> RenderableType:
    figures = document["machine"]["source"]
    guessed = [name for name, source in figures.items() if source.startswith("estimate")]
    share = percent(document["limits"]["headroom"])
    free = f"{share} of GPU and host (of a GPU, at least {size(LEAST_HEADROOM_BYTES)}) stay free"
    notes = [
        f"Assumed: 1% of columns hold {assumed_coverage(0.01):.1%} of the gradient's energy; the tuner measures it.",
        f"Memory is predicted, for Hugging Face's models. A setting fits where {free}.",
    ]
    machine, job = document["machine"], document["job"]
    if job["gpus"] < machine["gpus"]:
        given = figures.get("host_memory_bytes") == "given"
        memory = "" if given else f"{size(machine['host_memory_bytes'])} and "
        option = "" if given else "--host-memory, and "
        notes.append(
            f"The host is that of a whole machine of {machine['gpus']} GPUs: {memory}{machine['host_gbps']:g} GB/s of "
            f"memory. For a share of one, set {option}host_gbps and host_update_gelements_s in a TOML file."
        )
    if guessed:
        notes.append(f"These figures of {document['machine']['name']} are estimates: {', '.join(guessed)}.")
    return Text("\n".join(notes), style="dim")
