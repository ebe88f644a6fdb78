"""A profile as a trace in Chrome's JSON format, which Perfetto (ui.perfetto.dev) and chrome://tracing open.

Times are in microseconds since the first measured step began. Steps and their phases are slices of one process, the
timeline's lanes of another; samples are counters. A step's phases are sums: the trace lays them one behind the other,
and only the lanes say when things happened.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zftune.profile.schema import PHASES
from zftune.profile.verdict import phase_names
from zftune.report.values import Chart, Document, axis, device_of, layout, samples
from zftune.text import write_text
from zftune.words import CAUSE_NAMES, LANE_NAMES, colour

if TYPE_CHECKING:  # the trace itself needs no Plotly
    import plotly.graph_objects as go

Row = Sequence[Any]
"""A span: [begin_ms, end_ms, label]."""

_MANY_SPANS = 5000
"""More than a browser draws at ease: neighbours that no screen could tell apart are then drawn as one."""
_PIXELS = 2000
_MANY_STEPS = 24


def timeline_chart(document: Document) -> Chart | None:
    """The document's timeline; None where it has none."""
    import plotly.graph_objects as go

    timeline = document["timeline"]
    if timeline is None:
        return None
    lanes = {lane: timeline["lanes"][lane] for lane in LANE_NAMES if timeline["lanes"].get(lane)}
    drawn = _fewer(lanes, timeline["length_ms"])
    figure = go.Figure(layout=_layout(document, list(lanes)))
    legend: dict[str, str] = {}
    names = phase_names(document)
    for lane, kind, rows in _kinds(drawn):
        figure.add_trace(_bars(lane, kind, [(begin, end, names.get(label, label)) for begin, end, label in rows]))
        if lane in ("compute", "stall"):  # the others are named by their lane
            legend[CAUSE_NAMES.get(kind, kind) if lane == "stall" else names.get(kind, kind)] = colour(kind)
    notes = [] if lanes == drawn else ["Neighbouring spans that no screen could tell apart are drawn as one."]
    return Chart(figure, legend, notes)


def steps_of(document: Document) -> list[Mapping[str, Any]]:
    """The rows of `per_step` that the timeline is about; empty where the steps are not among them."""
    timeline = document["timeline"]
    if timeline is None:
        return []
    first, last = timeline["first_step"], timeline["first_step"] + timeline["steps"]
    return [row for row in document["per_step"] if first <= row["step"] < last]


def kind_of(lane: str, label: str) -> str:
    """What a span's colour follows from: the phase in the compute lane, the cause among stalls, else the lane."""
    if lane == "compute":
        return label if label in PHASES else "compute"
    if lane == "stall":
        return label if label in CAUSE_NAMES else "other"
    return lane


def _kinds(lanes: Mapping[str, Sequence[Row]]) -> Iterator[tuple[str, str, list[Row]]]:
    for lane, rows in lanes.items():
        found: dict[str, list[Row]] = defaultdict(list)
        for row in rows:
            found[kind_of(lane, row[2])].append(row)
        for kind, same in found.items():
            yield lane, kind, same


def _bars(lane: str, kind: str, rows: Sequence[Row]) -> go.Bar:
    import plotly.graph_objects as go

    return go.Bar(
        name=f"{lane}: {kind}",
        orientation="h",
        base=[row[0] for row in rows],
        x=[row[1] - row[0] for row in rows],
        y=[LANE_NAMES[lane]] * len(rows),
        width=0.66,
        marker={"color": colour(kind), "line": {"width": 0}},
        customdata=[[_escaped(row[2]), row[1]] for row in rows],
        hovertemplate="%{customdata[0]}<br>%{base:.3f} to %{customdata[1]:.3f} ms"
        "<br>%{x:.3f} ms<extra>" + LANE_NAMES[lane] + "</extra>",
    )


def _layout(document: Document, lanes: Sequence[str]) -> dict[str, Any]:
    timeline = document["timeline"]
    names = [LANE_NAMES[lane] for lane in lanes]
    shapes, annotations = _step_lines(document)
    return layout(
        96 + 40 * len(lanes),
        barmode="overlay",
        xaxis=axis("ms since the first of these steps began", range=[0, timeline["length_ms"]]),
        yaxis=axis(
            categoryorder="array", categoryarray=names, range=[len(names) - 0.5, -0.5], showgrid=False, ticks=""
        ),
        shapes=shapes,
        annotations=annotations,
    )


def _step_lines(document: Document) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    rows = steps_of(document)
    shapes, annotations = [], []
    for row in rows if len(rows) <= _MANY_STEPS else ():
        at = row["begin_ms"] - rows[0]["begin_ms"]
        line = {"width": 1, "dash": "dot", "color": "rgba(128,128,128,0.9)"}
        shapes.append(
            {"type": "line", "xref": "x", "yref": "paper", "x0": at, "x1": at, "y0": 0, "y1": 1, "line": line}
        )
        text = f"step {row['step']}" if len(rows) <= 8 else str(row["step"])
        place = {"xref": "x", "yref": "paper", "x": at, "y": 1, "xanchor": "left", "yanchor": "bottom"}
        annotations.append({**place, "text": text, "showarrow": False, "font": {"size": 12}})
    return shapes, annotations


def _fewer(lanes: Mapping[str, Sequence[Row]], length_ms: float) -> Mapping[str, Sequence[Row]]:
    if sum(len(rows) for rows in lanes.values()) <= _MANY_SPANS:
        return lanes
    return {lane: _merged(lane, rows, length_ms / _PIXELS) for lane, rows in lanes.items()}


def _merged(lane: str, rows: Sequence[Row], gap_ms: float) -> list[Row]:
    merged: list[list[Any]] = []
    counts: list[int] = []
    for begin, end, label in rows:
        same = bool(merged) and kind_of(lane, merged[-1][2]) == kind_of(lane, label)
        if same and begin - merged[-1][1] < gap_ms and begin - merged[-1][0] < 4 * gap_ms:
            merged[-1][1] = max(merged[-1][1], end)
            counts[-1] += 1
        else:
            merged.append([begin, end, label])
            counts.append(1)
    named = zip(merged, counts, strict=True)
    keep = lane in ("compute", "stall")  # whose labels the colour follows from
    return [[b, e, label if keep or n == 1 else f"{label} and {n - 1} more"] for (b, e, label), n in named]


def _escaped(text: str) -> str:
    """Text of a figure, where plotly knows some HTML."""
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


Event = dict[str, Any]

_STEPS, _LANES, _SAMPLES = 1, 2, 3  # processes of the trace
_STEP_THREAD, _PHASE_THREAD = 1, 2
_OF_A_WINDOW = {"d2h", "h2d", "host"}  # lanes that no plain script's timeline has
_NVML_COUNTERS = (
    ("utilisation, %", ("utilisation_percent", "sm_utilisation_percent")),
    ("PCIe, GB/s", ("pcie_rx_gbps", "pcie_tx_gbps")),
    ("power, W", ("power_w",)),
    ("memory, bytes", ("memory_used_bytes",)),
    ("SM clock, MHz", ("sm_clock_mhz",)),
)
_SYSTEM_COUNTERS = (
    ("CPU, % of a core", ("cpu_percent",)),
    ("CPU of the machine, %", ("machine_cpu_percent",)),
    ("memory, bytes", ("memory_used_bytes", "rss_bytes")),
    ("pressure, %", ("psi_cpu_percent", "psi_memory_percent", "psi_io_percent")),
    ("throttled, %", ("throttled_percent",)),
)


def write_trace(document: Document, path: str | Path) -> None:
    """Write the trace of a profile.

    Raises:
        ZftuneError: the file cannot be written.
    """
    write_text(json.dumps(trace(document), allow_nan=False) + "\n", path, option="--trace")


def trace(document: Document) -> dict[str, Any]:
    """The trace of a valid profile document."""
    events = [*_steps(document), *_lanes(document), *_samples(document)]
    about = {"schema": document["schema"], "device": document["device"], "zftune": document["software"]["zftune"]}
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": about}


def _steps(document: Document) -> Iterator[Event]:
    yield _named("process_name", _STEPS, 0, "steps")
    yield _named("thread_name", _STEPS, _STEP_THREAD, "step")
    yield _named("thread_name", _STEPS, _PHASE_THREAD, "phases (sums of a step, in order)")
    names = phase_names(document)
    for row in document["per_step"]:
        about = {name: row[name] for name in ("stall_ms", "waits_ms") if row[name] is not None}
        begin = row["begin_ms"]
        yield _slice(_STEPS, _STEP_THREAD, f"step {row['step']}", begin, begin + row["step_ms"], "step", about)
        for phase in PHASES:
            length = (row["phases_ms"] or {}).get(phase)
            if length:
                yield _slice(_STEPS, _PHASE_THREAD, names.get(phase, phase), begin, begin + length, "phase")
                begin += length


def _lanes(document: Document) -> Iterator[Event]:
    timeline = document["timeline"]
    if timeline is None:
        return
    begins = {row["step"]: row["begin_ms"] for row in document["per_step"]}
    offset = begins.get(timeline["first_step"], 0.0)
    what = "update window from step" if set(timeline["lanes"]) & _OF_A_WINDOW else "steps from"
    yield _named("process_name", _LANES, 0, f"{what} {timeline['first_step']}")
    thread, names = 0, phase_names(document)
    for lane, name in LANE_NAMES.items():
        for number, rows in enumerate(_rows_of_lane(timeline["lanes"].get(lane, ()))):
            thread += 1
            yield _named("thread_name", _LANES, thread, name if number == 0 else f"{name} {number + 1}")
            yield {**_named("thread_sort_index", _LANES, thread, ""), "args": {"sort_index": thread}}
            for begin, end, label in rows:
                yield _slice(_LANES, thread, names.get(label, label), offset + begin, offset + end, lane)


def _rows_of_lane(spans: Sequence[Sequence[Any]]) -> list[list[Sequence[Any]]]:
    """The spans as rows in which none overlaps the next, as slices of one thread must not."""
    rows: list[list[Sequence[Any]]] = []
    for span in sorted(spans, key=lambda span: (span[0], span[1])):
        free = next((row for row in rows if not row or row[-1][1] <= span[0] + 1e-6), None)
        if free is None:
            rows.append(free := [])
        free.append(span)
    return rows


def _samples(document: Document) -> Iterator[Event]:
    yield _named("process_name", _SAMPLES, 0, "samples")
    for row in samples(document, "nvml"):
        device = device_of(row)
        yield from _counters("GPU " if device is None else f"GPU {device} ", row, _NVML_COUNTERS)
    for row in samples(document, "system"):
        yield from _counters("host ", row, _SYSTEM_COUNTERS)


def _counters(prefix: str, row: Mapping[str, Any], groups: Sequence[tuple[str, Sequence[str]]]) -> Iterator[Event]:
    for name, fields in groups:
        values = {field: row[field] for field in fields if row.get(field) is not None}
        if values:
            yield {"ph": "C", "name": prefix + name, "pid": _SAMPLES, "tid": 0, "ts": _us(row["at_ms"]), "args": values}


def _slice(
    process: int,
    thread: int,
    name: str,
    begin_ms: float,
    end_ms: float,
    category: str,
    about: Mapping[str, Any] | None = None,
) -> Event:
    begin, end = _us(begin_ms), _us(end_ms)  # both rounded, so that neighbours do not overlap by rounding
    event = {"ph": "X", "name": name, "cat": category, "pid": process, "tid": thread, "ts": begin}
    return {**event, "dur": round(end - begin, 3), **({"args": dict(about)} if about else {})}


def _named(what: str, process: int, thread: int, name: str) -> Event:
    return {"ph": "M", "name": what, "pid": process, "tid": thread, "args": {"name": name}}


def _us(milliseconds: float) -> float:
    return round(1e3 * milliseconds, 3)
