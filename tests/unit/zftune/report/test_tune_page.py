"""The page of a search against the document it shows."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from typing import Any

import pytest

from tests.support.zftune.explain.runs import begin, by_hand, finished, record
from tests.support.zftune.fixtures import Clock
from tests.support.zftune.report.pages import EVIL, Page
from zftune.explain.summary import RunSummary, tune_document
from zftune.report.tune import KINDS, tune_page
from zftune.store import open_store
from zftune.store.store import Store


@pytest.fixture(scope="module")
def store() -> Iterator[Store]:
    with open_store("sqlite://", environment={"HOME": "/nowhere"}) as store:
        yield store


@pytest.fixture(scope="module")
def told(store: Store) -> dict[str, Any]:
    """Of `zftune explain`, with enough settings to tell what matters."""
    run, _ = finished(store, 8, most_measurements=40)
    return RunSummary.read(store, record(store, run)).document()


@pytest.fixture(scope="module")
def tuned(store: Store) -> dict[str, Any]:
    """Of `zftune tune`, with fewer."""
    run, _ = finished(store, 4)
    workload = {"model": None, "parameters": None, "micro_batch": None, "sequence": None}
    about = {
        "device": "cpu", "rig": {"name": "mini", "source": "made up"}, "workload": workload, "quality": "published",
        "interrupted": False,
    }  # fmt: skip
    return tune_document(store, run.run_id, about, ["the store is in memory"], "")


@pytest.fixture(scope="module", params=["told", "tuned"])
def document(request: pytest.FixtureRequest) -> dict[str, Any]:
    found: dict[str, Any] = request.getfixturevalue(request.param)
    return found


@pytest.fixture(scope="module")
def page(document: dict[str, Any]) -> Page:
    return Page(tune_page(document))


def traces(page: Page, figure: str) -> dict[str, dict[str, Any]]:
    return {trace["name"]: trace for trace in page.json("figures")[figure]["data"]}


def test_it_holds_the_document_and_needs_nothing_else(document: dict[str, Any], page: Page) -> None:
    assert page.json("profile") == document
    assert {"history", "plane", "knobs"} == set(page.json("figures"))
    targets = [value for _, attrs in page.tags for name, value in attrs.items() if name in ("src", "href", "action")]
    assert targets == ["data:,"]
    policy = next(attrs["content"] for _, attrs in page.tags if attrs.get("http-equiv") == "Content-Security-Policy")
    assert policy is not None
    assert policy.startswith("default-src 'none'")
    ids = [attrs["id"] for _, attrs in page.tags if "id" in attrs]
    assert len(ids) == len(set(ids))
    closing = [tag for tag, _ in page.tags if tag in ("section", "details", "main", "header", "footer")]
    text = tune_page(document)
    assert all(text.count(f"</{tag}>") == closing.count(tag) for tag in closing)


def test_the_history_is_that_of_the_document(told: dict[str, Any]) -> None:
    found = traces(Page(tune_page(told)), "history")
    line = found.pop("step time of the best so far")
    assert line["y"] == [one["step_ms"] for one in told["history"] if one["role"] in ("start", "a1", "a2")]
    drawn = {x: (y, kind) for kind, trace in found.items() for x, y in zip(trace["x"], trace["y"], strict=True)}
    assert set(found) <= set(KINDS)
    adopted = {note["trial"] for note in told["decisions"] if note["kind"] == "adopt"}
    for one in told["history"]:
        y, kind = drawn[one["number"]]
        assert y == one["step_ms"]
        if one["role"] in ("start", "a1", "a2"):
            assert kind == "best so far"
        elif one["status"] == "measured":
            assert kind == ("adopted" if one["trial"] in adopted else "not adopted")
    assert len(drawn) == len(told["history"])


def test_a_tuned_training_without_a_model(tuned: dict[str, Any]) -> None:
    page = Page(tune_page(tuned))
    assert any("a model" in text for text in page.text)
    assert "the store is in memory" in page.text


def test_nothing_was_written_down(store: Store) -> None:
    about = {
        "device": "cpu", "rig": None, "workload": {"model": "tiny"}, "quality": "published", "interrupted": True
    }  # fmt: skip
    page = Page(tune_page(tune_document(store, None, about, [], "zftune tuned nothing.")))
    assert page.json("figures") == {}
    assert "zftune tuned nothing." in page.text


def test_settings_stand_where_their_knobs_are(document: dict[str, Any], page: Page) -> None:
    found = traces(page, "plane")
    trials = document["trials"]
    for name in ("measured", "start", "kept"):
        trace = found[name]
        for x, y, (number, _) in zip(trace["x"], trace["y"], trace["customdata"], strict=True):
            knobs = trials[number]["knobs"]
            assert x == pytest.approx(math.sqrt(knobs["topk_ratio"]), abs=0.1)
            assert y == pytest.approx(math.log2(knobs["update_interval"]))
    times = [trials[number]["step_ms"] for number, _ in found["measured"]["customdata"]]
    assert found["measured"]["marker"]["color"] == times
    assert times == sorted((one["step_ms"] for one in trials if one["step_ms"] is not None), reverse=True)
    assert [number for number, _ in found["kept"]["customdata"]] == [document["best"]["number"]]
    places = list(zip(found["measured"]["x"], found["measured"]["y"], strict=True))
    assert len(set(places)) == len(places)  # none hides another


def test_the_other_knobs_have_panels(document: dict[str, Any], page: Page) -> None:
    found = traces(page, "knobs")
    timed = [one for one in document["trials"] if one["step_ms"] is not None]
    varied = {name for name in timed[0]["knobs"] if len({one["knobs"][name] for one in timed}) > 1}
    assert set(found) == varied - {"topk_ratio", "update_interval"}
    assert "host_threads" in found
    for trace in found.values():
        assert trace["y"] == [one["step_ms"] for one in timed]


def test_sentences_and_figures_are_there(document: dict[str, Any], page: Page) -> None:
    text = " ".join(page.text)
    for note in document["decisions"]:
        assert note["reason"] in page.text
    gain = document["gain"]
    assert f"{100 * gain['share']:.1f}%" in page.text
    assert f"± {100 * gain['error']:.1f}% of the step time" in page.text
    assert re.search(r"Spent \d+(\.\d)?% of the run \([\d.,]+ s of [\d,.]+ s\), gained ", text)
    assert "more rejected unseen" in text
    for one in document["trials"]:
        assert page.text.count(str(one["number"])) >= 1


def test_the_loss_stands_beside_step_times(told: dict[str, Any]) -> None:
    points = [
        {"step": 10 * n, "steps": 10, "step_ms": 100.0 - n, "loss": 3 - 0.1 * n, "coverage": None} for n in (1, 2)
    ]
    changes = [{"step": step, "knobs": {"topk_ratio": 0.1 * step}} for step in (1, 12, 15)]
    found = Page(tune_page({**told, "curve": {"points": points, "changes": changes}})).json("figures")["curve"]
    assert {trace["name"]: trace["y"] for trace in found["data"]} == {"ms a step": [99, 98], "loss": [2.9, 2.8]}
    assert {tuple(trace["x"]) for trace in found["data"]} == {(10, 20)}
    assert sorted({shape["x0"] for shape in found["layout"]["shapes"]}) == [12, 15]  # not where it began
    assert found["layout"]["xaxis"]["matches"] == "x2"


def test_break_even_is_on_the_page(store: Store) -> None:
    clock = Clock()
    with open_store("sqlite://", environment={"HOME": "/nowhere"}, clock=clock) as timed:
        found = RunSummary.read(timed, record(timed, by_hand(timed, clock)), clock).document()
    page = Page(tune_page(found))
    assert "Broke even" in page.text
    assert "44 s" in page.text


def test_a_search_that_had_not_begun(store: Store) -> None:
    page = Page(tune_page(RunSummary.read(store, record(store, begin(store))).document()))
    assert page.json("figures") == {}
    assert "The search had not begun." in page.text
    assert page.text.count("Nothing was measured.") == 1


def test_everything_is_escaped(told: dict[str, Any]) -> None:
    def evil(value: Any, name: str = "") -> Any:
        if isinstance(value, dict):
            return {key: evil(one, key) for key, one in value.items()}
        if isinstance(value, list):
            return [evil(one, name) for one in value]
        kept = ("kind", "status", "state", "role", "select_interval", "run_id")
        return EVIL if isinstance(value, str) and name not in kept else value

    hostile = evil(told)
    hostile["trials"][1]["knobs"][EVIL] = EVIL
    text = tune_page(hostile)
    page = Page(text)
    assert EVIL not in text
    assert page.json("profile") == hostile
    assert {tag for tag, _ in page.tags}.isdisjoint({"img", "b", "iframe", "object", "embed"})
    assert sum(tag == "script" for tag, _ in page.tags) == 4
    drawn = str(
        [(trace.get("customdata"), trace["y"]) for one in page.json("figures").values() for trace in one["data"]]
    )
    assert "<img" not in drawn
    assert "&lt;img" in drawn
