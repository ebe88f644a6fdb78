from __future__ import annotations

import io
import json
from typing import Any

import pytest
from rich.console import Console

from tests.zftune.tuner.surfaces import make
from zftune.explain.words import fates
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
    tried = sum(one["state"] in ("measured", "aborted") for one in document["trials"][1:])
    assert f"None of the {tried} other settings that were tried was adopted. Keep what it began with" in " ".join(
        text.replace("│", " ").split()
    )


def test_nothing_is_claimed_of_what_was_not_measured(document: dict[str, Any]) -> None:
    """Where only the starting point was, and where nothing was at all."""
    start = {**document["start"], "state": "measured"}
    one = {**document, "start": start, "best": start, "trials": [start], "gain": None, "decisions": []}
    text = " ".join(shown(one).replace("│", " ").split())
    assert "No other setting was measured, so that nothing is known of them. It began with: topk_ratio" in text
    assert "Keep" not in text
    unseen = {**start, "state": "planned", "step_ms": None}
    nothing = {**one, "start": unseen, "best": unseen, "trials": [unseen], "measurements": 0, "stopped": None}
    text = " ".join(shown(nothing).replace("│", " ").split())
    assert "Nothing was measured, so that nothing is known of any setting. It began with: topk_ratio" in text
    assert "Spent" not in text


def test_a_setting_that_was_only_looked_at_is_not_called_anything_else(document: dict[str, Any]) -> None:
    best, start = document["best"]["number"], 0
    others = [one for one in document["trials"] if one["state"] == "measured" and one["number"] not in (best, start)]
    looked_at, kept = others[0]["number"], others[1]["number"]
    notes = [one for one in document["decisions"] if one["trial"] != looked_at]
    found = fates({**document, "decisions": notes})
    assert (found[best], found[start]) == ("kept", "start")
    assert (found[looked_at], found[kept]) == ("not compared", "not adopted")
    text = " ".join(shown({**document, "decisions": notes, "gain": None}).replace("│", " ").split())
    assert "was adopted, but 1 of them was only looked at. It began with: " in text
    states = {one["number"]: one["state"] for one in document["trials"]}
    assert all(found[number] == "rejected unseen" for number, state in states.items() if state == "rejected")
    states_of = [{**document["trials"][looked_at], "state": state} for state in ("in_flight", "void", "crashed")]
    assert [fates({**document, "trials": [one]})[looked_at] for one in states_of] == [
        "in flight", "did not count", "crashed"
    ]  # fmt: skip


def test_a_column_for_the_planner_is_there_where_it_plans(document: dict[str, Any]) -> None:
    assert "planner ms" in shown(document)
    alone = {**document, "trials": [{**one, "predicted_step_ms": None} for one in document["trials"]]}
    text = shown(alone)
    assert "planner ms" not in text
    assert f"{document['best']['step_ms']:.1f}" in text
