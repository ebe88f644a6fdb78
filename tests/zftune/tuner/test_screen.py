from __future__ import annotations

import io
import json
from typing import Any

import pytest
from rich.console import Console

from tests.zftune.tuner.surfaces import make
from zftune.tuner.document import search_document
from zftune.tuner.screen import render


@pytest.fixture(scope="module")
def document() -> dict[str, Any]:
    search, driver = make(6, 0.05)
    driver.run(search)
    return {
        "workload": {"model": "tiny"},
        "device": "cpu",
        "rig": {"name": "a [rig]", "source": "made up"},
        "steps": 700,
        "interrupted": False,
        "coverage": "measured on the live model in 2 selections",
        "notices": ["the store is in memory [only]"],
        **search_document(search),
    }


def shown(document: dict[str, Any]) -> str:
    out = io.StringIO()
    Console(width=140, file=out).print(render(document))
    return out.getvalue()


def test_the_screen_shows_what_was_measured_and_what_was_kept(document: dict[str, Any]) -> None:
    text = shown(document)
    measured = [trial for trial in document["trials"] if trial["state"] == "measured"]
    for trial in measured:
        assert f"{trial['step_ms']:.1f}" in text
    assert len([line for line in text.splitlines() if line.endswith("kept") or " kept " in line]) == 1
    assert "rig a [rig]: times are of an emulated accelerator" in text
    assert "note: the store is in memory [only]" in text
    gain = document["gain"]
    assert f"It saves {100 * gain['share']:.1f} +/- {100 * gain['error']:.1f}% of the step time." in text
    assert document["stopped"] in " ".join(text.replace("│", " ").split())


def test_the_document_is_plain_and_whole(document: dict[str, Any]) -> None:
    json.dumps(document, allow_nan=False)
    assert {trial["state"] for trial in document["trials"]} >= {"measured", "rejected"}
    for trial in document["trials"]:
        assert (trial["reason"] is not None) == (trial["state"] in ("rejected", "aborted"))
        assert trial["predicted_step_ms"] > 0
    best = document["best"]
    assert best in document["trials"]
    assert document["gain"]["share"] > 0.02


def test_knobs_that_stay_are_explained(document: dict[str, Any]) -> None:
    exact = {**document, "budget": {"steps": 0.0, "fixed_because": "no loss is known"}, "gain": None}
    text = shown(exact)
    assert "knobs that change the trajectory stay: no loss is known" in text
    assert "No setting is better than the one that it began with" in text
