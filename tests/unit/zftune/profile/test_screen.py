from __future__ import annotations

import io
import re
from typing import Any

import pytest
from rich.console import Console

from zftune.bars import cells
from zftune.profile.screen import label, render

Document = dict[str, Any]


def shown(
    document: Document, width: int = 100, *, color: bool = False, encoding: str = "utf-8", verbose: bool = False
) -> str:
    buffer = io.BytesIO()
    file = io.TextIOWrapper(buffer, encoding=encoding)
    Console(
        file=file, width=width, force_terminal=color, no_color=not color, _environ={"TERM": "xterm-256color"}
    ).print(render(document, verbose=verbose))
    file.flush()
    return buffer.getvalue().decode(encoding)


@pytest.mark.parametrize(
    "line",
    [
        "this run: ZenFlow 208 217 1.2% 2.5 h2d 2 · select 0.9 3.4× 99%",
        "no offload 206 211 0% 0 – 3.5× 100%",
        "ZeRO-Offload 715 724 71% 510 host 460 · h2d 50 1× 29%",
        "ZeRO-Offload, pipelined 672 681 69% 467 host 462 · h2d 4 · d2h 1 1.1× 31%",
    ],
)
def test_the_table_has_the_numbers_of_the_document(document: Document, line: str) -> None:
    assert line in [" ".join(row.split()) for row in shown(document).splitlines()]


def test_bars_share_one_scale(document: Document) -> None:
    text = shown(document)
    lines = text[text.index("where a step") : text.index("this run beside")].splitlines()
    filled = {line[:23].strip(): len(re.sub(r"[^█▓▒░╱]", "", line)) for line in lines[1:5]}
    assert filled["this run: ZenFlow"] < 0.4 * filled["ZeRO-Offload"]
    assert "host 460" in lines[3]
    assert lines[3].count("▒") == 5
    assert "▓▓ host update" in lines[5]


def test_figures_have_units_and_sources(document: Document) -> None:
    text = shown(document)
    for figure in (
        "topk_ratio 0.05 · update_interval 4",
        "4.78 steps/s · 306 tokens/s",
        "link a step D2H 1.65 MB · H2D 414 kB · other 5.2 kB · 1.19 × the model",
        "689 ms a pass · 0.0527 of 0.0529 GB/s (99.6%) · 44 B/element",
        "covers 88% of the gradient energy · 12% new each time",
        "mean 3.4 steps · most 7 steps · weighted 0.408 steps",
        "host state 11.6 MB · gradient log 6.61 MB · staging 1.65 MB",
        "measuring takes 0.4% of a step",
        "[wall clock, rig, count]",
    ):
        assert figure in text


def test_a_real_device_shows_its_memory_and_what_nvml_says(document: Document) -> None:
    document["memory"]["device_peak_bytes"] = 41_500_000_000
    document["nvml"] = {"utilisation_percent": 93.0, "power_w": 310.0, "throttle_reasons": ["power cap"]}
    text = shown(document)
    assert "device peak 41.5 GB" in text
    assert "93% busy · 310 W · power cap" in text


def test_missing_figures_are_listed_with_their_reason_and_never_zero(document: Document) -> None:
    for name in ("stall", "hidden_ms_per_step", "baselines", "practicality", "link", "host", "selection", "staleness"):
        document[name] = None
    document["overhead_fraction"] = document["phases_ms"] = None
    document["missing"]["stall"] = "there is no device stream"
    text = shown(document)
    assert "missing  stall: there is no device stream" in text
    line = next(line for line in text.splitlines() if line.startswith("this run: ZenFlow") and "217" in line)
    assert line.split() == ["this", "run:", "ZenFlow", "208", "217", "–", "–", "–", "–", "–"]


def test_of_what_is_missing_three_lines_are_shown_and_the_rest_on_request(document: Document) -> None:
    for name in ("seed", "idle", "nvml", "stall", "workload.text", "practicality", "system.quota_cores"):
        document["missing"][name] = f"a reason for {name}"
    names = {
        name: reason for name, reason in document["missing"].items() if not name.startswith(("per_step", "series"))
    }
    short = shown(document).splitlines()
    lines = [line for line in short if line.startswith("missing ")]
    assert [line.split()[1].rstrip(":") for line in lines] == ["stall", "nvml"]
    assert f"{len(names) - 2} more figures are missing: zftune profile -v shows which, and why" in short
    whole = " ".join(shown(document, verbose=True).split())
    assert "more figures are missing" not in whole
    for name, reason in names.items():
        assert name in whole
        assert reason in whole


@pytest.mark.parametrize("width", [60, 72, 80, 99, 100, 140])
def test_every_width(document: Document, width: int) -> None:
    text = shown(document, width)
    assert max(map(len, text.splitlines())) <= width
    assert width != 100 or len(text.splitlines()) <= 43  # one screen
    assert "510" in text
    assert "71%" in text


def test_no_color_has_no_escapes_and_ascii_has_letters(document: Document) -> None:
    assert "\x1b" not in shown(document)
    text = shown(document, color=True)
    assert "\x1b[31m" in text
    assert "\x1b[32m" in text


def test_text_of_the_document_is_not_markup(document: Document) -> None:
    document["workload"]["model"] = "[red]m[/red]"
    document["sources"]["step_ms"] = "[/bold]"
    document["missing"]["nvml"] = "[link=x]y"
    text = shown(document)
    for part in ("[red]m[/red]", "[/bold]", "[link=x]y"):
        assert part in text


@pytest.mark.parametrize(
    ("lengths", "expected"), [([50, 50], [5, 5]), ([33, 33, 34], [3, 4, 3]), ([1, 1], [0, 0]), ([], []), ([200], [10])]
)
def test_cells_add_up(lengths: list[float], expected: list[int]) -> None:
    assert cells(lengths, 100, 10) == expected


@pytest.mark.parametrize(
    ("knobs", "name"),
    [
        ({"offload_ratio": 0}, "no offload"),
        ({}, "ZenFlow"),
        ({"topk_ratio": 0, "offload_ratio": 0.5}, "Twin-Flow"),
        ({"topk_ratio": 0}, "delayed updates"),
        ({"topk_ratio": 0, "update_interval": 1, "overlap_step": False}, "ZeRO-Offload, pipelined"),
        ({"topk_ratio": 0, "update_interval": 1, "overlap_step": False, "pipeline": "none"}, "ZeRO-Offload"),
    ],
)
def test_points_of_the_knob_space_have_names(document: Document, knobs: Document, name: str) -> None:
    assert label(document["knobs"] | knobs) == name
