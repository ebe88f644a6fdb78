"""The training thread as what bounds a step, and the lines that hold it."""

from __future__ import annotations

from typing import Any

import pytest

from tests.unit.zftune.profile.test_screen import shown
from zftune.profile.schema import validate
from zftune.profile.verdict import thread_ms, verdict

Document = dict[str, Any]


def line(number: int, share: float, held_ms: float) -> Document:
    place = {"file": "zenflow/streaming.py", "line": number, "function": "Streams.hook"}
    within = {"file": "torch/_tensor.py", "line": 56, "function": "Tensor.detach"}
    return {**place, "share": share, "ms_per_step": share * held_ms, "within": within}


def held(document: Document, held_ms: float, *, of: str = "idle", samples: int = 500) -> Document:
    lines = [line(number, share, held_ms) for number, share in ((212, 0.5), (90, 0.25), (7, 0.2), (8, 0.05))]
    document["thread_lines"] = {"of": of, "samples": samples, "ms_per_step": held_ms, "lines": lines}
    document["sources"]["thread_lines"] = "sampled frames"
    return document


def timed(document: Document, step_ms: float, **by_cause: float) -> Document:
    document["step_ms"] = dict.fromkeys(("mean", "p50", "p95"), step_ms)
    stalled = sum(by_cause.values())
    document["stall"] = {"fraction": stalled / step_ms, "ms_per_step": stalled, "by_cause": by_cause}
    document["phases_ms"] = {
        "data": 0.0,
        "forward": 0.2 * step_ms,
        "backward": 0.6 * step_ms,
        "optimizer": 0.2 * step_ms,
    }
    document["phases_ms"]["other"] = 0.0
    return document


@pytest.mark.parametrize(
    ("held_ms", "host_ms", "samples", "binds"),
    [
        (60.0, 10.0, 500, True),
        (44.0, 14.0, 500, True),  # 42 ms busy
        (44.0, 10.0, 500, False),  # 46 ms busy
        (44.0, 45.0, 500, False),
        (60.0, 10.0, 9, False),  # too few samples to tell
    ],
)
def test_the_thread_bounds_a_step_of_which_it_is_the_largest_part(
    document: Document, held_ms: float, host_ms: float, samples: int, binds: bool
) -> None:
    held(timed(document, 100.0, host=host_ms), held_ms, samples=samples)
    assert thread_ms(document) == (held_ms if binds else None)


def test_without_samples_nvml_knows_the_idle_time(document: Document) -> None:
    timed(document, 100.0, host=10.0)["rig"] = None
    document["nvml"] = {"utilisation_percent": 20.0}
    assert thread_ms(document) == pytest.approx(80.0 - 10.0)
    document["nvml"] = {"utilisation_percent": 60.0}
    assert thread_ms(document) is None


def test_on_a_rig_the_emulator_counts_the_idle_time(document: Document) -> None:
    costs = dict.fromkeys(("thread_weight_us", "thread_bucket_us", "thread_job_us", "thread_launch_us"), 5.0)
    validate({**document, "rig": {**document["rig"], **costs, "thread_busy_ms": 7.0, "thread_idle_ms": 0.0}})
    timed(document, 100.0, host=10.0)["baselines"] = None
    rig = document["rig"]
    assert thread_ms(document) is None  # of a version before rigs had a thread
    rig |= {"thread_busy_ms": 70.0, "thread_idle_ms": 20.0}
    assert thread_ms(document) is None  # 70 ms busy
    rig["thread_idle_ms"] = 60.0
    assert thread_ms(document) == 60.0
    assert verdict(document)[0].startswith(
        "What bounds the step now is the training thread. It leaves the device idle for 60 ms of 100 ms a step (60%)."
    )


def test_the_verdict_names_the_thread_and_its_first_line(document: Document) -> None:
    held(timed(document, 160.0, host=20.0), 104.0)
    document["baselines"] = None
    first, stalled = verdict(document)[:2]
    assert first.startswith(
        "What bounds the step now is the training thread. It leaves the device idle for 104 ms of 160 ms a step (65%), "
        "52 ms of that in zenflow/streaming.py:212 (Streams.hook)."
    )
    assert stalled == "The device waits 20 ms of 160 ms a step (12%), 100% of it for the host update."
    timed(document, 160.0, host=1.0)
    stalled, first = verdict(document)[:2]
    assert stalled.startswith("Offloading hardly stalls the device")
    assert "52 ms of that in zenflow/streaming.py:212" in first


def test_the_verdict_on_a_command_begins_with_the_thread(of_a_command: Document) -> None:
    held(timed(of_a_command, 100.0, data=2.0), 70.0)
    assert verdict(of_a_command)[:2] == [
        (
            "What bounds the step is the training thread. It leaves the device idle for 70 ms of 100 ms a step (70%), "
            "35 ms of that in zenflow/streaming.py:212 (Streams.hook)."
        ),
        "Beyond that the device hardly waits: 2 ms a step (2.0%).",
    ]
    held(timed(of_a_command, 100.0, data=30.0), 20.0)
    assert verdict(of_a_command)[0].startswith("The device waits 30 ms of 100 ms")


@pytest.mark.parametrize("width", [80, 100])
def test_three_lines_are_shown_where_the_thread_binds_and_all_on_request(of_a_command: Document, width: int) -> None:
    held(timed(of_a_command, 100.0, data=2.0), 70.0)
    text = shown(of_a_command, width)
    assert "lines that held the training thread while the device idled · 500 samples" in text
    rows = [row.split() for row in text.splitlines() if "zenflow/streaming.py" in row and row[0] != "│"]
    assert [row[:3] for row in rows] == [
        ["35", "50%", "zenflow/streaming.py:212"],
        ["17.5", "25%", "zenflow/streaming.py:90"],
        ["14", "20%", "zenflow/streaming.py:7"],
    ]
    assert ("torch/_tensor.py:56" in text) == (width == 100)
    assert "zenflow/streaming.py:8 " in shown(of_a_command, width, verbose=True)


def test_lines_of_a_thread_that_bounds_nothing_are_shown_on_request(of_a_command: Document) -> None:
    held(of_a_command, 55.0, of="step")
    validate(of_a_command)
    assert "held the training thread" not in shown(of_a_command)
    assert "lines that held the training thread in a step · 500 samples" in shown(of_a_command, verbose=True)
