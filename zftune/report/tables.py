"""The page's tables and tiles, as HTML in which all text is escaped."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

from zftune.profile.verdict import CROWDED_PERCENT
from zftune.quality import coverage_warning
from zftune.report.values import Document, figures, leaves, rate, shown, source_of
from zftune.text import ms, number, percent, size, times

_FIELDS = ("knobs", "workload", "command", "device", "rig", "hardware", "software", "fingerprint", "seed", "steps")
_OF_THE_RUN = (
    "rig.segments",
    "rig.late_segments",
    "rig.attempts",
    "rig.real_work_s",
    "rig.slack",
    "command.exit_code",
    "command.stopped",
)
_FEW_STEPS = 8


@dataclass(frozen=True, slots=True)
class Setting:
    """Something that differs between the profiles, in words."""

    name: str
    a: str
    b: str


def changed_settings(a: Document, b: Document) -> list[Setting]:
    """Everything that differs between two profiles but for their figures."""
    sides = [dict(_leaves(document)) for document in (a, b)]
    names = dict.fromkeys([*sides[0], *sides[1]])
    pairs = ((name, sides[0].get(name, "none"), sides[1].get(name, "none")) for name in names)
    return [Setting(name, first, second) for name, first, second in pairs if first != second]


def warnings_about(a: Document, b: Document, settings: Sequence[Setting]) -> list[str]:
    """Why the figures of two profiles may not be comparable, in sentences."""
    return [*_different(settings), *_emulated(a, b), *_few(a, b), *_busy(a, b), *_quality(a, b)]


def is_workload(setting: Setting) -> bool:
    """Whether it says what is trained, and by what batches."""
    return setting.name.startswith("workload.") or setting.name == "fingerprint.model_id"


def _different(settings: Sequence[Setting]) -> Iterator[str]:
    workload = [one for one in settings if is_workload(one)]
    if workload:
        yield f"The workloads differ ({_listed(workload)}): their times cannot be compared step by step."
    machine = [one for one in settings if one.name.startswith("hardware.") or one.name == "device"]
    if machine or any(one.name == "fingerprint.hw_id" for one in settings):
        yield f"The machines differ ({_listed(machine)})." if machine else "The machines differ."
    ranks = [one for one in settings if one.name == "command.ranks"]
    if ranks:
        yield f"The numbers of ranks differ ({_listed(ranks)})."


def _emulated(a: Document, b: Document) -> Iterator[str]:
    rigs = [document["rig"] and document["rig"]["name"] for document in (a, b)]
    if (rigs[0] is None) != (rigs[1] is None):
        yield f"Only {'A' if rigs[1] is None else 'B'} was measured on an emulated accelerator."
    elif rigs[0] != rigs[1]:
        yield f"The emulated hardware differs ({rigs[0]} → {rigs[1]})."


def _few(a: Document, b: Document) -> Iterator[str]:
    for name, document in (("A", a), ("B", b)):
        steps = document["steps"]["measured"]
        if steps < _FEW_STEPS:
            yield f"{name} has {steps} measured steps: its noise is a guess below {_FEW_STEPS}."


def crowded(a: Document, b: Document) -> str:
    """Which of two profiles had to share its cores, with how much of the time tasks waited for one; "": neither."""
    waited = [(document["system"] or {}).get("psi_cpu_percent") for document in (a, b)]
    return ", ".join(
        f"{name} {percent(share / 100)}"
        for name, share in zip("AB", waited, strict=True)
        if share is not None and share >= CROWDED_PERCENT
    )


def _busy(a: Document, b: Document) -> Iterator[str]:
    which = crowded(a, b)
    if which:
        yield (
            f"Tasks waited for a core much of the time ({which}): what differs may be other work on the "
            "machine, so measure both again when it is quiet."
        )


def _quality(a: Document, b: Document) -> Iterator[str]:
    for name, document in (("A", a), ("B", b)):
        wrong = (document.get("loss") or {}).get("not_finite")
        if wrong:
            yield f"{name}: the loss is not a finite number in {wrong} of the measured steps."
        warning = coverage_warning((document["selection"] or {}).get("coverage"), document["knobs"] or {})
        if warning is not None:
            yield f"{name}: {warning}"


def _listed(settings: Sequence[Setting]) -> str:
    shown = ", ".join(f"{one.name.rpartition('.')[2]} {one.a} → {one.b}" for one in settings[:3])
    return shown if len(settings) <= 3 else f"{shown} and {len(settings) - 3} more"


def _leaves(document: Document) -> Iterator[tuple[str, str]]:
    for field in _FIELDS:
        for name, value in _flat(document[field], field):
            if ".missing" not in name and not name.startswith(_OF_THE_RUN):
                yield name, value


def _flat(value: Any, path: str) -> Iterator[tuple[str, str]]:
    if isinstance(value, Mapping):
        for key, child in value.items():
            yield from _flat(child, f"{path}.{key}")
    elif isinstance(value, (list, tuple)) and any(isinstance(item, Mapping) for item in value):
        for index, child in enumerate(value):
            yield from _flat(child, f"{path}.{index}")
    elif isinstance(value, (list, tuple)):
        yield path, ", ".join(str(item) for item in value) or "none"
    elif not (value is None and path in _FIELDS):  # of a profile without knobs every knob is missing
        yield path, _word(value)


def _word(value: Any) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    if value is None:
        return "none"
    return f"{value:.6g}" if isinstance(value, float) else str(value)


_TILE_CHARS = 20
_GROUPS = {
    "step_ms": "step",
    "throughput": "speed",
    "phases_ms": "phases of a step",
    "idle": "time without a kernel, per step",
    "hidden_ms_per_step": "hidden waits",
    "waits_ms": "waits of the training thread, per step",
    "link": "link",
    "host": "host update",
    "nvml": "GPU counters (NVML)",
    "system": "host counters",
    "overhead_fraction": "cost of measuring",
    "practicality": "speed, as a share of that without offloading",
    "baselines": "the same training without offloading, and under ZeRO-Offload",
    "roofs": "lower bounds of a step: what each resource alone needs",
}


def table(
    head: Sequence[str], rows: Iterable[Sequence[str]], classes: Sequence[str] = (), earlier: Collection[int] = ()
) -> str:
    """A table of plain text.

    Args:
        rows: cells; a row of one cell is the heading of those that follow.
    """
    kinds = [*classes, *([""] * (len(head) - len(classes)))]
    titles = "".join(f'<th scope="col">{escape(title)}</th>' for title in head)
    body = []
    for place, row in enumerate(rows):
        if len(row) == 1:
            body.append(f'<tr class="group"><th colspan="{len(head)}" scope="colgroup">{escape(row[0])}</th></tr>')
        else:
            cells = "".join(f'<td class="{kind}">{escape(cell)}</td>' for cell, kind in zip(row, kinds, strict=True))
            body.append(f'<tr class="earlier">{cells}</tr>' if place in earlier else f"<tr>{cells}</tr>")
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
        return "<p>This run has no settings of zenflow.</p>"
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


def tiles(figures: Iterable[tuple[str, str, str]]) -> str:
    """Key figures, each with a title and what else is to be said; nothing where there are none."""
    cells = "".join(
        f"<div><dt>{escape(title)}</dt><dd>{escape(value)}<small>{escape(more)}</small></dd></div>"
        for title, value, more in figures
    )
    return f'<dl class="tiles">{cells}</dl>' if cells else ""


def unbroken(text: str) -> str:
    """Text that breaks at its commas only, but for parts that are wider than a tile."""
    parts = text.split(", ")
    return ", ".join(part if len(part) > _TILE_CHARS else part.replace(" ", "\u00a0") for part in parts)


def key_figures(document: Document) -> Iterable[tuple[str, str, str]]:
    """Those of a profile: title, value and more."""
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
        yield "Least possible step", ms(roofs["least_step_ms"]), _alone(roofs)
    yield from _offload_tiles(document)
    if document["overhead_fraction"] is not None:
        yield "Cost of measuring", percent(document["overhead_fraction"]), "of a step"


def _offload_tiles(document: Document) -> Iterable[tuple[str, str, str]]:
    baselines, link, host = document["baselines"] or {}, document["link"], document["host"]
    if document["practicality"] is not None:
        yield "Against no offloading", percent(document["practicality"]), "of its speed"
    if baselines.get("zero_offload") is not None:
        yield "Against ZeRO-Offload", times(baselines["zero_offload"]["speedup"]), "its speed"
    down, up = (None if link is None else link[f"{way}_bytes_per_step"] for way in ("d2h", "h2d"))
    if down is not None and up is not None:
        yield "Link a step", size(down + up), f"{size(down)} down, {size(up)} up"
    if host is not None and host["gbps"] is not None and host["ceiling_gbps"] is not None:
        share = percent(host["gbps"] / host["ceiling_gbps"])
        yield "Host update", rate(host["gbps"]), f"{share} of {rate(host['ceiling_gbps'])}"
    if document["memory"]["device_peak_bytes"] is not None:
        yield "GPU memory", size(document["memory"]["device_peak_bytes"]), "peak"


def _alone(roofs: Mapping[str, Any]) -> str:
    names = {"compute_ms": "compute", "d2h_ms": "link down", "h2d_ms": "link up", "host_ms": "host memory"}
    highest = max(((roofs[field], name) for field, name in names.items() if roofs[field] is not None), default=None)
    return "" if highest is None else f"what {highest[1]} alone takes"
