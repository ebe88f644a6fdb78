"""The trace against the document, by the rules of Chrome's trace format."""

from __future__ import annotations

import json
from collections import defaultdict
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from tests.support.zftune.report.documents import cpu_profile, gpu_profile, rig_profile
from zftune.errors import ZftuneError
from zftune.profile.verdict import WITH_DATA
from zftune.report.trace import trace, write_trace

US = 1e3
"""Microseconds in a millisecond."""


def slices(document: dict[str, Any], category: str) -> list[dict[str, Any]]:
    return [event for event in trace(document)["traceEvents"] if event["ph"] == "X" and event["cat"] == category]


def threads(document: dict[str, Any]) -> dict[tuple[int, int], str]:
    events = trace(document)["traceEvents"]
    return {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}


@pytest.mark.parametrize("build", [rig_profile, cpu_profile, gpu_profile])
def test_every_span_step_and_phase_is_a_slice(build: Any) -> None:
    document = build()
    offset = next(r["begin_ms"] for r in document["per_step"] if r["step"] == document["timeline"]["first_step"])
    for lane, spans in document["timeline"]["lanes"].items():
        found = sorted((e["ts"], e["ts"] + e["dur"], e["name"]) for e in slices(document, lane))
        for (begin, end, name), span in zip(found, sorted(spans), strict=True):
            assert (begin, end) == (
                pytest.approx(US * (offset + span[0]), abs=2e-3),
                pytest.approx(US * (offset + span[1]), abs=2e-3),
            )
            assert name == span[2]
    steps = slices(document, "step")
    assert [event["name"] for event in steps] == [f"step {row['step']}" for row in document["per_step"]]
    assert [e["dur"] for e in steps] == pytest.approx([US * row["step_ms"] for row in document["per_step"]], abs=2e-3)
    for phase in ("forward", "backward"):
        total = sum(event["dur"] for event in slices(document, "phase") if event["name"] == phase)
        assert total == pytest.approx(US * sum(row["phases_ms"][phase] for row in document["per_step"]), rel=1e-6)


def test_names_are_those_of_the_screen_and_empty_lanes_are_left_out() -> None:
    document = rig_profile()
    document["timeline"]["lanes"]["data"] = []
    assert "data" not in threads(document).values()
    document = cpu_profile()
    document["phases_ms"]["data"] = None
    for category in ("compute", "phase"):
        names = {event["name"] for event in slices(document, category)}
        assert WITH_DATA in names
        assert "forward" not in names


@pytest.mark.parametrize("build", [rig_profile, cpu_profile, gpu_profile])
def test_slices_of_a_thread_do_not_overlap(build: Any) -> None:
    by_thread = defaultdict(list)
    for event in trace(build())["traceEvents"]:
        if event["ph"] == "X":
            by_thread[event["pid"], event["tid"]].append((event["ts"], event["ts"] + event["dur"]))
    assert set(by_thread) <= set(threads(build()))
    for spans in by_thread.values():
        assert all(one[1] <= other[0] + 2e-3 for one, other in pairwise(sorted(spans)))


def test_spans_that_overlap_get_threads_of_their_own() -> None:
    document = rig_profile()
    document["timeline"]["lanes"]["host"] = [[0.0, 10.0, "a"], [5.0, 15.0, "b"], [12.0, 20.0, "c"]]
    names = threads(document)
    rows = defaultdict(list)
    for event in slices(document, "host"):
        rows[names[event["pid"], event["tid"]]].append(event["name"])
    assert rows == {"host": ["a", "c"], "host 2": ["b"]}


def test_samples_are_counters() -> None:
    document = gpu_profile()
    counters = [event for event in trace(document)["traceEvents"] if event["ph"] == "C"]
    power = [e for e in counters if e["name"] == "GPU 1 power, W"]
    rows = [row for row in document["series"]["nvml"] if row["device"] == 1]
    assert [(e["ts"], e["args"]) for e in power] == [
        (pytest.approx(US * row["at_ms"]), {"power_w": row["power_w"]}) for row in rows
    ]
    first = next(event for event in counters if event["name"] == "GPU 0 utilisation, %")
    assert list(first["args"]) == ["utilisation_percent"]  # what was not read is left out, not 0
    assert not any(event["name"].startswith("host throttled") for event in counters)


def test_without_timeline_and_samples() -> None:
    document = cpu_profile()
    document["timeline"] = document["series"]["system"] = None
    events = trace(document)["traceEvents"]
    assert {event["ph"] for event in events} == {"M", "X"}
    assert {event["cat"] for event in events if event["ph"] == "X"} == {"step", "phase"}


def test_the_file_is_json_that_viewers_open(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    write_trace(rig_profile(), path)
    loaded = json.loads(path.read_text(encoding="utf-8"))
    assert loaded["displayTimeUnit"] == "ms"
    required = {
        "X": {"name", "cat", "ts", "dur", "pid", "tid"},
        "C": {"name", "ts", "pid", "args"},
        "M": {"name", "args"},
    }
    for event in loaded["traceEvents"]:
        assert required[event["ph"]] <= set(event)
        assert event.get("dur", 0) >= 0
    with pytest.raises(ZftuneError, match=r"--trace '.*': cannot be written"):
        write_trace(rig_profile(), tmp_path / "missing" / "trace.json")


@pytest.mark.parametrize(("build", "name"), [(rig_profile, "update window from step"), (cpu_profile, "steps from")])
def test_the_lanes_are_a_window_only_where_there_is_one(build: Any, name: str) -> None:
    document = build()
    names = [e["args"]["name"] for e in trace(document)["traceEvents"] if e["name"] == "process_name"]
    assert f"{name} {document['timeline']['first_step']}" in names
