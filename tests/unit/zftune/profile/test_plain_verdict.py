"""The verdict on a command, and what stands beside it."""

from __future__ import annotations

from typing import Any

import pytest

from zftune.profile.verdict import observations, verdict

Document = dict[str, Any]
NVML = {"utilisation_percent": 60.0, "throttle_reasons": [], "other_processes": 0}


def step_of(document: Document, **phases_ms: float) -> Document:
    values = dict.fromkeys(("data", "forward", "backward", "optimizer", "other"), 0.0) | phases_ms
    total = sum(values.values())
    document["phases_ms"], document["step_ms"] = values, {"mean": total, "p50": total, "p95": total}
    document["ranks"] = [{"rank": 0, "steps": 60, "step_ms": document["step_ms"], "phases_ms": values}]
    return document


@pytest.mark.parametrize(
    ("phases", "first", "advice"),
    [
        ({"data": 60.0, "forward": 40.0}, "loading data: 60 ms of 100 ms (60%)", "Give the DataLoader workers"),
        ({"backward": 60.0, "forward": 40.0}, "the backward pass: 60 ms of 100 ms (60%)", "What is left is compute"),
        ({"optimizer": 60.0, "forward": 40.0}, "the optimizer: 60 ms", "fused=True"),
        ({"other": 60.0, "forward": 40.0}, "work outside the forward pass", "logging, evaluation"),
    ],
)
def test_what_dominates_is_named_with_what_helps(
    of_a_command: Document, phases: dict[str, float], first: str, advice: str
) -> None:
    sentences = verdict(step_of(of_a_command, **phases))
    assert first in sentences[0]
    assert advice in sentences[1]
    assert len(sentences) == 2


def test_a_stall_comes_first(of_a_command: Document) -> None:
    step_of(of_a_command, backward=100.0)
    of_a_command["stall"] = {"fraction": 0.4, "ms_per_step": 40.0, "by_cause": {"data": 10.0, "host": 30.0}}
    sentences = verdict(of_a_command)
    assert sentences[0] == "The device waits 40 ms of 100 ms a step (40%), 75% of it for the host optimizer."
    assert "ZenFlow with overlap_step" in sentences[1]


@pytest.mark.parametrize(
    ("busy", "stalled", "told"),
    [(60.0, 0.45, False), (60.0, 0.3, False), (60.0, 0.29, True), (60.0, 0.51, True), (95.0, 0.5, True)],
)
def test_nvml_and_events_that_disagree_are_shown(document: Document, busy: float, stalled: float, told: bool) -> None:
    document["rig"], document["nvml"] = None, {**NVML, "utilisation_percent": busy}
    document["stall"]["fraction"] = stalled
    sentences = [sentence for sentence in observations(document) if sentence.startswith("NVML")]
    assert bool(sentences) == told
    if busy == 95.0:
        assert "idle 5.0% of the time, the events saw 50% of stall" in sentences[0]


def test_a_rig_is_not_compared_with_nvml(document: Document) -> None:
    document["nvml"] = {**NVML, "utilisation_percent": 0.0}
    assert list(observations(document)) == []


@pytest.mark.parametrize(
    ("field", "value", "said"),
    [
        ("system.throttled_fraction", 0.2, "The CPU quota held this run back 20% of the time"),
        ("system.psi_cpu_percent", 60.0, "Tasks waited for a core 60% of the time"),
        ("system.psi_memory_percent", 30.0, "Tasks waited for memory 30% of the time"),
        ("nvml.throttle_reasons", ["power cap"], "clocks were held down: power cap"),
        ("nvml.other_processes", 2, "2 other processes used the device"),
        ("nvml.other_processes", 1, "1 other process used the device"),
    ],
)
def test_what_is_worth_telling(of_a_command: Document, field: str, value: object, said: str) -> None:
    part, _, name = field.partition(".")
    assert list(observations(of_a_command)) == []
    of_a_command["nvml"] = dict(NVML)
    of_a_command[part][name] = value
    (sentence,) = observations(of_a_command)
    assert said in sentence


@pytest.mark.parametrize(("stalled", "leads"), [(0.3, True), (0.8, False), (None, True)])
@pytest.mark.parametrize(
    ("field", "value", "said"),
    [
        ("throttled_fraction", 0.6, "The CPU quota held this run back 60%"),
        ("psi_cpu_percent", 60.0, "Tasks waited for a core 60%"),
    ],
)
def test_missing_cores_lead_where_they_take_more_than_the_stall(
    of_a_command: Document, field: str, value: float, said: str, stalled: float | None, leads: bool
) -> None:
    of_a_command["system"][field] = value
    of_a_command["stall"] = None
    if stalled is not None:
        of_a_command["stall"] = {"ms_per_step": 30.0, "fraction": stalled, "by_cause": {"d2h": 30.0}}
    told = verdict(of_a_command)
    assert [one.startswith(said) for one in told].count(True) == 1
    assert told[0].startswith(said) is leads


def test_the_rank_that_others_wait_for_is_told(of_a_command: Document) -> None:
    for rank, comm_ms in zip(of_a_command["ranks"], (25.0, 2.0), strict=True):
        rank |= {"step_ms": {"mean": 55.0, "p50": 55.0, "p95": 55.0}, "comm_ms": comm_ms}
    (sentence,) = observations(of_a_command)
    assert sentence == (
        "Rank 1 is the slowest: its step takes 53 ms without collectives, that of the fastest rank 30 ms; the other "
        "ranks wait for it."
    )


def without_loader(document: Document, **phases_ms: float) -> Document:
    step_of(document, **phases_ms)
    document["phases_ms"]["data"] = None
    return document


def test_a_forward_pass_with_the_batches_in_it_gets_no_advice_about_compute(of_a_command: Document) -> None:
    sentences = verdict(without_loader(of_a_command, forward=90.0, backward=10.0))
    assert sentences == [
        "Most of a step is the forward pass and what precedes it: 90 ms of 100 ms (90%).",
        (
            "No torch DataLoader gave the batches, so getting them is in there, as are evaluations between two steps; "
            "with one it is told apart."
        ),
    ]
    assert "torch.compile" in verdict(without_loader(of_a_command, forward=10.0, backward=90.0))[1]
    assert "torch.compile" in verdict(step_of(of_a_command, forward=90.0, data=10.0))[1]


@pytest.mark.parametrize(("cpu_percent", "idle"), [(20.0, True), (99.0, True), (101.0, False), (None, False)])
def test_processes_that_hardly_compute_get_no_advice_about_compute(
    of_a_command: Document, cpu_percent: float | None, idle: bool
) -> None:
    step_of(of_a_command, forward=90.0, data=10.0)
    of_a_command["ranks"] *= 2
    of_a_command["system"]["cpu_percent"] = cpu_percent
    advice = verdict(of_a_command)[1]
    assert ("of a core: a step waits" in advice) == idle
    assert ("torch.compile" in advice) != idle
