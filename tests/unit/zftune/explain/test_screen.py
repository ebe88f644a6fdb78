"""What `zftune tune` and `zftune explain` show."""

from __future__ import annotations

import io
import json
import re
from collections.abc import Iterator
from typing import Any

import pytest
from rich.console import Console

from tests.support.zftune.explain.runs import HARDWARE, KEY, MODEL, ByHand, begin, explained, finished
from tests.support.zftune.fixtures import Clock
from tests.support.zftune.tuner.surfaces import START
from zenflow import ZenFlowConfig
from zftune.explain.screen import render
from zftune.explain.summary import tune_document
from zftune.explain.words import lateness_bound, rejected, to_copy, verdict
from zftune.store import open_store
from zftune.store.store import Store
from zftune.tuner.evidence import Gain
from zftune.tuner.space import Setting
from zftune.words import shares

ABOUT = {
    "device": "cpu",
    "rig": {"name": "a [rig]", "source": "made up"},
    "workload": {"model": "tiny"},
    "quality": "published",
    "interrupted": False,
    "steps": 700,
}


@pytest.fixture(scope="module")
def kept() -> Iterator[Store]:
    with open_store("sqlite://", environment={"HOME": "/nowhere"}) as store:
        yield store


@pytest.fixture(scope="module")
def document(kept: Store) -> dict[str, Any]:
    run, _ = finished(kept, 6)
    return tune_document(kept, run.run_id, ABOUT, ["the store is in memory [only]"], "")


def shown(document: dict[str, Any]) -> str:
    out = io.StringIO()
    Console(width=140, file=out).print(render(document, verbose=True))
    return out.getvalue()


def said(document: dict[str, Any]) -> str:
    return " ".join(verdict(document))


def test_the_screen_shows_what_was_measured_and_what_was_kept(document: dict[str, Any]) -> None:
    text = shown(document)
    assert "rig a [rig]): times do not come from a GPU" in text
    assert "the store is in memory [only]" in text
    unwrapped = " ".join(text.replace("│", " ").split())
    gain = document["gain"]
    assert f"gained {shares(gain['share'], gain['error'])}" in unwrapped
    assert document["stopped"] in unwrapped
    for note in document["decisions"]:
        assert note["reason"] in unwrapped
    config = Setting.from_knobs(document["best"]["knobs"]).config(ZenFlowConfig())
    assert f"in Python: {config.to_python()} in a ds_config for zftune run:" in unwrapped
    section = re.search(r'in a ds_config for zftune run: ("zero_optimization": \{.*\}\}) ', unwrapped)
    assert section is not None
    assert ZenFlowConfig.from_ds_config({"gradient_clipping": 0, **json.loads(f"{{{section[1]}}}")}) == config


def test_settings_to_copy_have_what_no_search_changes(document: dict[str, Any]) -> None:
    others: dict[str, Any] = {"max_grad_norm": 1.0, "pipeline": "none", "stream": False}
    run = {**document["run"], "settings": {**document["run"]["settings"], "unsearched": others}}
    python, section = to_copy({**document, "run": run})
    best = Setting.from_knobs(document["best"]["knobs"])
    assert python == f"in Python: {best.config(ZenFlowConfig(**others)).to_python()}"
    assert "max_grad_norm=1.0" in python
    assert '"pipeline": "none"' in section


def test_where_nothing_was_written_down_the_last_words_are_shown(kept: Store) -> None:
    document = tune_document(kept, None, ABOUT, ["No space left."], "zftune tuned nothing.\nIt was short.")
    json.dumps(document, allow_nan=False)
    text = shown(document)
    assert "zftune tune  tiny on cpu" in text
    assert "No space left." in text
    assert "zftune tuned nothing." in text
    assert (document["run"], document["best"], document["trials"]) == (None, None, [])


def test_the_document_is_plain_and_whole(document: dict[str, Any]) -> None:
    json.dumps(document, allow_nan=False)
    assert document["schema"] == "zftune.tune/1"
    assert {trial["state"] for trial in document["trials"]} >= {"measured"}
    for trial in document["trials"]:
        assert (trial["reason"] is not None) == (trial["state"] in ("rejected", "void") and trial["reason"] is not None)
    best = document["best"]
    assert best in document["trials"]
    assert document["gain"]["share"] > 0.02


def test_how_far_weights_move_is_told_with_what_it_allows(timed: Store) -> None:
    old = explained(timed, timed.begin_run(KEY, MODEL, HARDWARE, knobs=START.knobs(), settings={"budget_steps": 1.8}))
    assert (old["budget"]["movement_percent"], old["budget"]["expected_loss_percent"]) == (None, None)
    assert lateness_bound(old) == ""
    settings = {"budget_steps": 3.4, "movement_percent": 0.05}
    found = explained(timed, timed.begin_run(KEY, MODEL, HARDWARE, knobs=START.knobs(), settings=settings))
    assert found["budget"] == {
        "steps": 3.4, "fixed_because": None, "movement_percent": 0.05, "movement_learning_rate": None,
        "expected_loss_percent": pytest.approx(0.3),
    }  # fmt: skip
    assert lateness_bound(found) == (
        "weights move 0.05% in a step: updates may come 3.43 steps late on average, which adds up to about 0.3% of "
        "loss in a long fine-tuning, 0.746% in one of 1000 steps; more from scratch"
    )
    little = explained(timed, timed.begin_run(KEY, MODEL, HARDWARE, knobs=START.knobs(), settings=settings | {
        "movement_percent": 0.00268
    }))  # fmt: skip
    assert little["budget"]["expected_loss_percent"] == pytest.approx(10.2 * (8 * 0.00268) ** 2)
    assert lateness_bound(little) == (
        "weights move 0.00268% in a step: updates may come 8 steps late on average (no study has looked at updates "
        "that are later than 8 steps), which adds up to about 0.00469% of loss in a long fine-tuning, 1.04% in one of "
        "1000 steps; more from scratch"
    )


def test_the_budget_in_steps_is_that_of_the_newest_movement(timed: Store, clock: Clock) -> None:
    settings = {"budget_steps": 3.4, "movement_percent": 0.05}
    rows = ByHand(timed, clock, timed.begin_run(KEY, MODEL, HARDWARE, knobs=START.knobs(), settings=settings))
    start = rows.trial("start")
    rows.measure(start, "start", 100)
    rows.knows(step_ms=(100.0,), movement=(0.1, None))
    found = explained(timed, rows.run, clock)
    steps = found["budget"]["steps"]
    assert f"late updates may come {steps:.3g} steps" in f"late {lateness_bound(found).partition(': ')[2]}"


def test_a_setting_that_is_thought_of_again_is_one_that_was_never_applied() -> None:
    def trial(topk_ratio: float, state: str, reason: str | None = None) -> dict[str, Any]:
        return {"knobs": {"topk_ratio": topk_ratio}, "state": state, "reason": reason}

    trials = [
        trial(0.1, "rejected", "it is 2.0 times too slow"),
        trial(0.2, "rejected", "it is 1.5 times too slow"),
        trial(0.1, "rejected", "it is 3.0 times too slow"),
        trial(0.3, "measured"),
        trial(0.3, "rejected", "it crashed before"),  # it was applied
        trial(0.4, "void"),
        trial(0.4, "rejected", "it does not fit"),
    ]
    assert rejected(trials) == [
        {"reason": "it is 1.5 times too slow", "count": 2},
        {"reason": "it does not fit", "count": 1},
    ]


def test_of_a_long_search_the_screen_shows_what_changed_and_the_newest(timed: Store, clock: Clock) -> None:
    rows = ByHand(timed, clock, begin(timed))
    start, best = rows.trial("start"), rows.trial(topk_ratio=0.2)
    for number in range(60):
        rows.measure(best, "explore", 500)
        rows.decide("keep", best, f"Not adopted, {number}.")
        if number == 9:
            rows.decide("adopt", best, "Adopted early.", gain=0.1, error=0.01)
    rows.decide("stop", start, "That is enough.")
    rows.knows(incumbent=1, gain=Gain(0.1, 0.01), step_ms=(400.0, 360.0))
    document = explained(timed, rows.run)

    def lines(*, verbose: bool) -> str:
        out = io.StringIO()
        Console(width=140, file=out).print(render(document, verbose=verbose))
        return out.getvalue()

    short, long = lines(verbose=False), lines(verbose=True)
    assert len(short.splitlines()) <= 40
    assert all(f"Not adopted, {number}." in long for number in range(60))
    assert "Not adopted, 0." not in short
    assert "Not adopted, 59." in short
    assert "Adopted early." in short
    assert "more decisions and every measurement: zftune explain -v" in short
