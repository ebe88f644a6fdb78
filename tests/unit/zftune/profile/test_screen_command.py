"""The screen of a command's profile."""

from __future__ import annotations

from typing import Any

import pytest

from tests.unit.zftune.profile.test_screen import shown

Document = dict[str, Any]


def squeezed(document: Document, width: int = 100) -> str:
    return " ".join(shown(document, width).split())


def test_the_title_says_what_was_trained(of_a_command: Document) -> None:
    title = shown(of_a_command, 120).splitlines()[0]
    assert "train.py · 2 ranks · LlamaForCausalLM · 0.87 million parameters · float32" in title
    narrow = shown(of_a_command, 80).splitlines()[0]
    assert " train.py · 2 ranks · LlamaForCausalLM · float32 ─" in narrow  # nothing is cut in two


def test_each_rank_has_a_bar_of_phases_on_one_scale(of_a_command: Document) -> None:
    of_a_command["ranks"][1] |= {
        "step_ms": {"mean": 110.0, "p50": 110.0, "p95": 110.0},
        "phases_ms": {name: 2 * value for name, value in of_a_command["phases_ms"].items()},
    }
    lines = shown(of_a_command).splitlines()
    begin = next(index for index, line in enumerate(lines) if line.startswith("where a step"))
    first, second = (line.removeprefix(f"rank {rank}") for rank, line in enumerate(lines[begin + 1 : begin + 3]))
    assert "55 ms" in first
    assert "110 ms" in second
    assert len(first.rstrip("0123456789 ms").rstrip()) < 0.65 * len(second.rstrip("0123456789 ms").rstrip())
    for phase in ("forward", "backward", "optimizer"):
        assert phase in second
    assert "·· next batch ██ forward ▓▓ backward ▒▒ optimizer ░░ other" in squeezed(of_a_command)


def test_the_table_has_each_rank(of_a_command: Document) -> None:
    text = squeezed(of_a_command)
    assert "rank steps step ms: mean p50 p95 data forward backward optimizer other" in text
    assert "0 60 55 55.4 55.6 6.2 13.1 25.4 9 1.3" in text
    assert "1 60 55.1 55.4 56 6.2 13.2 25.4 9 1.3" in text


def test_of_many_ranks_the_first_and_the_slowest_are_shown(of_a_command: Document) -> None:
    rank = of_a_command["ranks"][0]
    of_a_command["ranks"] = [
        {**rank, "rank": number, "step_ms": {**rank["step_ms"], "mean": 55.0 + number % 20}} for number in range(64)
    ]
    lines = shown(of_a_command).splitlines()
    bars = [line.split()[1] for line in lines if line.startswith("rank ")]
    assert len(bars) == 8
    assert bars[0] == "0"
    assert {"19", "39", "59"} < set(bars)


@pytest.mark.parametrize("width", [60, 72, 80, 99, 100, 140])
def test_every_width(of_a_command: Document, width: int) -> None:
    text = shown(of_a_command, width)
    assert max(map(len, text.splitlines())) <= width
    assert "25.4" in text


def test_figures_of_the_host_and_the_device(of_a_command: Document) -> None:
    of_a_command["nvml"] = dict.fromkeys(
        ("utilisation_percent", "sm_utilisation_percent", "pcie_rx_gbps", "energy_j", "temperature_c")
    ) | {
        "devices": 1,
        "utilisation_percent": 93.0,
        "memory_used_bytes": 41_500_000_000,
        "memory_total_bytes": 80_000_000_000,
        "pcie_gen": 4,
        "pcie_width": 16,
        "throttle_reasons": ["power cap"],
    }
    text = squeezed(of_a_command, 110)
    assert "93% busy · 41.5 GB of 80 GB in use · PCIe 4 x16 · power cap" in text
    assert "1.43 of 8 cores · machine 18% busy · 1.3 GB resident" in text


def test_what_zenflow_trains_exactly_is_not_called_zero_offload(document: Document, of_a_command: Document) -> None:
    document["knobs"] |= {"topk_ratio": 0, "update_interval": 1, "overlap_step": False, "pipeline": "bucket"}
    assert "this run: ZeRO-Offload, pipelined" in shown(document)
    document["command"] = of_a_command["command"]
    assert "this run: zenflow, exact" in shown(document)
    assert "this run: ZeRO-Offload" not in shown(document)


def test_a_zenflow_script_has_its_ranks_in_the_table(document: Document, of_a_command: Document) -> None:
    document["command"], document["baselines"] = of_a_command["command"], None
    text = squeezed(document)
    assert "this run beside its baselines" not in text
    assert "rank steps step ms: mean p50 p95 stall data forward" in text
    step = document["ranks"][0]["step_ms"]
    assert f"{step['p50']:.0f} {step['p95']:.0f} 1.2% " in text


def test_tokens_say_whose_they_are(of_a_command: Document) -> None:
    assert "tokens/s on 2 ranks (data parallel) ·" in squeezed(of_a_command)
    of_a_command["command"]["ranks"] = 8
    assert "tokens/s on 2 of 8 ranks (data parallel) ·" in squeezed(of_a_command)
    of_a_command["command"]["ranks"], of_a_command["ranks"] = 1, of_a_command["ranks"][:1]
    assert "tokens/s · 60 steps" in squeezed(of_a_command)
