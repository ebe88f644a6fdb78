"""A profile as a trace in Chrome's JSON format, which Perfetto (ui.perfetto.dev) and chrome://tracing open.

Times are in microseconds since the first measured step began. Steps and their phases are slices of one process, the
timeline's lanes of another; samples are counters. A step's phases are sums: the trace lays them one behind the other,
and only the lanes say when things happened.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from zftune.json_output import write_text
from zftune.report.palette import LANE_NAMES, PHASES
from zftune.report.values import Document, device_of, samples

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

    Args:
        document: a valid profile document.
        path: the file, which is replaced at once.

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
    for row in document["per_step"]:
        about = {name: row[name] for name in ("stall_ms", "waits_ms") if row[name] is not None}
        begin = row["begin_ms"]
        yield _slice(_STEPS, _STEP_THREAD, f"step {row['step']}", begin, begin + row["step_ms"], "step", about)
        for phase in PHASES:
            length = (row["phases_ms"] or {}).get(phase)
            if length:
                yield _slice(_STEPS, _PHASE_THREAD, phase, begin, begin + length, "phase")
                begin += length


def _lanes(document: Document) -> Iterator[Event]:
    timeline = document["timeline"]
    if timeline is None:
        return
    begins = {row["step"]: row["begin_ms"] for row in document["per_step"]}
    offset = begins.get(timeline["first_step"], 0.0)
    what = "update window from step" if set(timeline["lanes"]) & _OF_A_WINDOW else "steps from"
    yield _named("process_name", _LANES, 0, f"{what} {timeline['first_step']}")
    thread = 0
    for lane, name in LANE_NAMES.items():
        for number, rows in enumerate(_rows_of_lane(timeline["lanes"].get(lane, ()))):
            thread += 1
            yield _named("thread_name", _LANES, thread, name if number == 0 else f"{name} {number + 1}")
            yield {**_named("thread_sort_index", _LANES, thread, ""), "args": {"sort_index": thread}}
            for begin, end, label in rows:
                yield _slice(_LANES, thread, label, offset + begin, offset + end, lane)


def _rows_of_lane(spans: Sequence[Sequence[Any]]) -> list[list[Sequence[Any]]]:
    """The spans as rows in which none overlaps the next, as slices of one thread must not."""
    rows: list[list[Sequence[Any]]] = [[]]
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
