from __future__ import annotations

from typing import Any

import pytest

from zftune.profile import figures
from zftune.profile.verdict import least_topk_ratio, least_update_interval, verdict

Document = dict[str, Any]


def stalled(document: Document, cause: str, *, waits_ms: float = 300.0, compute_ms: float = 200.0) -> Document:
    mean = compute_ms + waits_ms
    document["step_ms"] = {"mean": mean, "p50": mean, "p95": mean}
    document["stall"] = {"fraction": waits_ms / mean, "ms_per_step": waits_ms, "by_cause": {cause: waits_ms}}
    document["baselines"] = None
    return document


def on_gpu(document: Document, *, memory_gb: float, peak_gb: float, parameters: int, practicality: float) -> Document:
    gpu = {"name": "Fine GPU", "memory_bytes": int(memory_gb * 1e9)}
    document["device"], document["rig"], document["hardware"]["gpus"] = "Fine GPU", None, [gpu]
    document["memory"]["device_peak_bytes"] = int(peak_gb * 1e9)
    document["workload"] |= {"parameters": parameters, "trainable": parameters}
    document["practicality"] = practicality
    return document


def test_small_stall_names_what_bounds_the_step(document: Document) -> None:
    assert verdict(document) == document["verdict"]
    text = " ".join(verdict(document))
    assert "hardly stalls the device: it waits 2.5 ms of 209 ms a step (1.2%)" in text
    assert "What bounds the step now is the backward pass: 200 ms of 209 ms (96%)." in text
    assert "3.4× the speed of ZeRO-Offload in DeepSpeed's order (209 ms a step instead of 716 ms)" in text
    assert "99.5% less stall" in text


def test_host_bound_asks_for_the_least_interval_that_suffices(document: Document) -> None:
    stalled(document, "host")
    document["knobs"]["update_interval"] = 1
    document["host"] |= {"update_ms": 320.0, "gbps": 0.05, "ceiling_gbps": 0.053}  # 10 ms a byte of each element
    # T_host(S) = 10 (28 + 4S) <= 200 S from S = 1.75 on
    assert least_update_interval(document) == 2
    waits, advice = verdict(document)
    assert waits == "The device waits 300 ms of 500 ms a step (60%), 100% of it for the host update."
    assert advice == "Raise update_interval from 1 to 2: then the host keeps up with the device."


def test_host_that_no_interval_saves_raises_topk_or_lowers_the_ratio(document: Document) -> None:
    stalled(document, "host", compute_ms=100)
    document["host"]["update_ms"] = 44 * 30.0  # 4a = 120 ms are more than a step's 100
    assert least_update_interval(document) is None
    ratio = least_topk_ratio(document, 4)
    assert ratio is not None
    # (1 - k) / 0.95 of the measured pass must fit in 4 steps of 100 ms
    assert 44 * 30 * (1 - ratio) / 0.95 <= 400 < 44 * 30 * (1 - (ratio - 0.01)) / 0.95
    assert (
        f"raise topk_ratio from 0.05 to {ratio:.2f} (at update_interval 4), or lower offload_ratio"
        in verdict(document)[1]
    )


@pytest.mark.parametrize(
    ("cause", "knobs", "advice"),
    [
        ("d2h", {}, "raise topk_ratio above 0.05, or lower offload_ratio below 1"),
        ("h2d", {}, "Raise update_interval above 4"),
        ("h2d", {"apply_lag": 2}, "Raise apply_lag from 2 to 4"),
        ("h2d", {"overlap_step": False}, "Turn overlap_step on"),
        ("h2d", {"overlap_step": False, "pipeline": "none"}, 'Set pipeline to "bucket", and turn overlap_step on'),
        ("select", {}, "Raise select_interval from 32 to 64"),
        ("comm", {}, "look at the interconnect"),
        ("data", {}, "Give the DataLoader workers"),
    ],
)
def test_each_cause_has_its_knob(document: Document, cause: str, knobs: Document, advice: str) -> None:
    stalled(document, cause)
    document["knobs"] |= knobs
    assert advice in verdict(document)[1]


def test_unknown_stall_gives_the_reason_and_what_is_known(document: Document) -> None:
    document["stall"] = None
    document["missing"]["stall"] = "there is no device stream"
    assert verdict(document)[:2] == [
        "How long the device waits is unknown (there is no device stream).",
        "What bounds the step now is the backward pass: 200 ms of 209 ms (96%).",
    ]


def test_do_not_offload_an_adapter(document: Document) -> None:
    stalled(document, "host")
    document["workload"]["trainable"] = 8_695
    sentences = verdict(document)
    assert sentences[0].startswith("Do not offload: only 1.0% of the parameters are trainable")
    assert "104 kB" in sentences[0]
    assert len(sentences) == 2, "no knob is named where none should be turned"


def test_do_not_offload_a_small_state(document: Document) -> None:
    on_gpu(document, memory_gb=80, peak_gb=70, parameters=300_000_000, practicality=0.99)
    assert verdict(document)[0].startswith(
        "Do not offload: the whole optimizer state is 3.6 GB, 4.5% of the device's 80 GB"
    )


def test_do_not_offload_where_it_costs_and_memory_is_to_spare(document: Document) -> None:
    stalled(document, "host")
    on_gpu(document, memory_gb=80, peak_gb=20, parameters=1_000_000_000, practicality=0.4)
    assert verdict(document)[0] == (
        "Do not offload: it costs 60% of the speed, and with all state on the device 32 GB of its 80 GB would be in "
        "use (set offload_ratio to 0)."
    )


@pytest.mark.parametrize(
    "changes",
    [
        {"memory_gb": 80, "peak_gb": 70, "parameters": 1_000_000_000, "practicality": 0.4},  # it would not fit
        {"memory_gb": 80, "peak_gb": 20, "parameters": 1_000_000_000, "practicality": 0.99},  # it costs nothing
    ],
)
def test_offloading_is_right_where_memory_is_short_or_it_is_free(document: Document, changes: Document) -> None:
    on_gpu(stalled(document, "host"), **changes)
    assert not any("Do not offload" in sentence for sentence in verdict(document))


def test_nothing_is_said_about_the_memory_of_an_emulated_device(document: Document) -> None:
    rig = document["rig"]
    on_gpu(stalled(document, "host"), memory_gb=80, peak_gb=1, parameters=1000, practicality=0.1)
    document["rig"] = rig
    assert not any("Do not offload" in sentence for sentence in verdict(document))


def test_no_comparison_with_itself(document: Document) -> None:
    document["knobs"] = document["baselines"]["zero_offload"]["knobs"]
    assert not any("ZeRO-Offload" in sentence for sentence in verdict(document))


def test_no_comparison_without_the_baseline(document: Document) -> None:
    document["baselines"]["zero_offload"] = None
    assert not any("ZeRO-Offload" in sentence for sentence in verdict(document))


def test_a_coverage_far_below_what_is_assumed_has_its_sentence(document: Document) -> None:
    document["knobs"] |= {"topk_ratio": 0.01, "update_interval": 8, "overlap_step": True}
    document["selection"] = {"coverage": 0.13, "churn": 0.1}
    assert any("13% of the gradient energy, where 89% is assumed" in sentence for sentence in verdict(document))
    document["selection"]["coverage"] = 0.85
    assert not any("gradient energy" in sentence for sentence in verdict(document))


@pytest.mark.parametrize("utilisation", [27.02, 60.0])
def test_a_device_that_has_nothing_to_run_is_not_bound_by_what_it_computes(
    document: Document, utilisation: float
) -> None:
    """Figures of the built-in workload on the first GPU."""
    on_gpu(document, memory_gb=150.75, peak_gb=6.55, parameters=402_000_000, practicality=0.39)
    document["step_ms"] = {"mean": 252.7, "p50": 223.6, "p95": 413.6}
    document["stall"] = {"fraction": 0.0133, "ms_per_step": 3.36, "by_cause": {"h2d": 1.4, "select": 1.96}}
    document["phases_ms"] = {"data": 9.74, "forward": 28.7, "backward": 137.2, "optimizer": 77.0, "other": 0.0}
    document["nvml"] = {**(document["nvml"] or {}), "utilisation_percent": utilisation}
    document["idle"] = {"steps": 4, "ms_per_step": 273.7, "by_cause": {"stall": 12.1, "launch": 256.9, "other": 4.7}}
    document["baselines"] = {"no_offload": {"step_ms": {"mean": 99.4, "p50": 98.2, "p95": 116.0}, "speedup": 0.39}}
    text = " ".join(verdict(document))
    of_launches = (
        "What bounds the step now is the training thread, 99.4 ms a step without offloading. NVML saw the device idle "
        "73% of the time: the training thread launches operations more slowly than the device runs them (257 ms a "
        "step by torch.profiler)."
    )
    idle = utilisation < 50
    assert (of_launches in text) == idle
    assert ("What bounds the step now is the backward pass" in text) != idle
    assert ("NVML saw the device idle 40% of the time, the events saw 1.3% of stall" in text) != idle
    assert ("unless launches leave the device idle" in " ".join(figures._roofs(document))) == idle
    assert "Offloading makes such calls" in text or not idle
    document["knobs"]["offload_ratio"] = 0.0
    assert "Offloading makes such calls" not in " ".join(verdict(document))
    document["knobs"] = document["idle"] = None  # somebody else's training
    told = "NVML saw the device idle"
    for longest, launches in (("backward", idle), ("optimizer", idle), ("other", False)):
        document["phases_ms"] = dict.fromkeys(document["phases_ms"], 10.0) | {longest: 200.0}
        text = " ".join(verdict(document))
        assert ("a faster device or a lower precision does not." in text) == launches
        assert text.count(told) == 1  # in either sentence
    document["phases_ms"] |= {"other": 10.0, "backward": 200.0}
    compute = "What is left is compute: a lower precision, torch.compile or a faster device shortens it."
    assert (compute in " ".join(verdict(document))) != idle
    document["idle"] = {"steps": 4, "ms_per_step": 700.0, "by_cause": {"stall": 0.0, "launch": 40.0, "other": 660.0}}
    text = " ".join(verdict(document))
    assert ("a faster device" in text, text.count(told)) == (True, 1)
    assert "launches operations more slowly" not in text
