"""`zftune explain`, as it is called."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from tests.support.zftune.explain.runs import HARDWARE, MODEL, ByHand, begin, finished
from tests.support.zftune.fixtures import Clock
from tests.support.zftune.store import rows as store_rows
from zftune.cli.main import app
from zftune.explain import words
from zftune.store import open_store
from zftune.store.types import Hardware, Model

EVIL = "[bold]x[/bold] \x1b[2J\u202e<b>&"


@pytest.fixture(autouse=True)
def database(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "zftune.db"
    monkeypatch.setenv("ZFTUNE_DB", str(path))
    monkeypatch.setenv("COLUMNS", "140")
    return path


def call(*arguments: object, code: int = 0) -> Result:
    result = CliRunner().invoke(app, ["explain", *map(str, arguments)])
    assert result.exit_code == code, (result.output, result.exception)
    return result


def fails(*arguments: object) -> str:
    result = call(*arguments, code=2)
    assert result.stdout == ""
    assert result.stderr.count("\n") == 1
    return result.stderr.removeprefix("zftune: ").rstrip()


def flat(text: str) -> str:
    return " ".join(text.replace("│", " ").split())


def saved(seed: int = 6) -> str:
    with open_store() as store:
        return finished(store, seed)[0].run_id


def test_every_decision_with_its_measurements(tmp_path: Path) -> None:
    run_id = saved()
    shown = call("-v", "--json", tmp_path / "run.json").stdout
    document: dict[str, Any] = json.loads((tmp_path / "run.json").read_text())
    assert document["schema"] == "zftune.explain/1"
    assert document["run"]["run_id"] == run_id
    assert f"zftune explain  {run_id[:8]}  tiny on NVIDIA H200" in shown
    text, at = flat(shown), 0
    for note in document["decisions"]:
        at = text.index(flat(note["reason"]), at)
    at = 0
    for one in document["history"]:
        at = text.index(flat(words.measurement(document, one)), at)
    for sentence in document["verdict"]:
        assert sentence in text
    for one in document["rejected"]:
        assert f"{one['count']}: {one['reason']}" in text
    assert re.search(r"Spent \d+(\.\d)?% of the run \([\d.,]+ s of [\d.,]+ s\), gained [\d.]+ \+/- [\d.]+%,", text)


@pytest.mark.parametrize("columns", [80, 140])
def test_it_fits_the_terminal(columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    saved()
    monkeypatch.setenv("COLUMNS", str(columns))
    lines = call().stdout.splitlines()
    assert max(map(len, lines)) <= columns
    assert sum(len(line) > 0.8 * columns for line in lines) > 5  # and it uses its width


def test_by_id_by_its_beginning_and_the_last() -> None:
    first, second = saved(1), saved(4)
    assert f"  {second[:8]}  " in call().stdout
    assert f"  {second[:8]}  " in call("last").stdout
    assert f"  {first[:8]}  " in call(first).stdout
    assert f"  {first[:8]}  " in call(first[:12]).stdout


def test_a_run_that_measured_nothing_is_passed_over() -> None:
    first = saved(1)
    with open_store() as store:
        empty = [begin(store) for _ in range(2)]
        ByHand(store, Clock(), empty[0]).trial("start")
    shown = call().stdout
    assert f"  {first[:8]}  " in shown
    assert "This is the last run with a measurement; 2 runs after it measured nothing." in flat(shown)
    assert f"  {empty[0].run_id[:8]}  " in call(empty[0].run_id).stdout
    second = saved(4)
    assert f"  {second[:8]}  " in call().stdout
    assert "last run with" not in call().stdout
    with open_store() as store:
        empty.append(begin(store))
    assert f"; run {empty[2].run_id[:8]} after it measured nothing." in flat(call().stdout)


def test_the_last_run_is_the_one_that_trained_last() -> None:
    first, second = saved(1), saved(4)
    with open_store() as store:
        again = store.resume_run(first)
        assert f"  {first[:8]}  " in call().stdout  # it goes on
        store.finish_run(again)
    shown = call().stdout
    assert f"  {first[:8]}  " in shown
    assert second[:8] not in shown


def test_of_runs_that_measured_nothing_it_is_the_newest() -> None:
    with open_store() as store:
        runs = [begin(store) for _ in range(2)]
        ByHand(store, Clock(), runs[1]).trial("start")
    shown = flat(call().stdout)
    assert runs[1].run_id[:8] in shown
    assert "last run with" not in shown
    assert "Nothing was measured." in shown


def test_runs_that_are_not_there() -> None:
    assert fails() == "RUN 'last': the store has no runs yet, `zftune run --online` makes one"
    run_id = saved()
    assert fails("nothing-like-it") == (
        f"RUN 'nothing-like-it' is not in the store; give an id, its beginning or 'last' (near: {run_id[:8]})"
    )
    assert "is not in the store" in fails("")
    assert "\x1b" not in fails("\x1b[2J")


def test_a_beginning_of_several_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    ids = iter(["ab" * 16, "0" * 32, "ac" * 16, "1" * 32])
    monkeypatch.setattr("zftune.store.runs.secrets.token_hex", lambda size: next(ids))
    with open_store() as store:
        begin(store)
        begin(store)
    sentence = fails("a")
    assert sentence.startswith("RUN 'a': 2 runs begin with that: ")
    assert {"abababab", "acacacac"} == set(re.findall(r"\w{8}(?=,|$)", sentence))


def test_outputs(tmp_path: Path) -> None:
    run_id = saved()
    result = call("--json", "-", "--html", tmp_path / "run.html")
    assert json.loads(result.stdout)["run"]["run_id"] == run_id
    assert "zftune explain" in result.stderr
    assert (tmp_path / "run.html").read_text(encoding="utf-8").startswith("<!DOCTYPE html>")
    assert fails("--json", "/nowhere/x.json").startswith("--json '/nowhere/x.json' cannot be written: give a file")
    assert fails("--html", "-").startswith("--html '-' cannot be written: give a file")
    same = tmp_path / "same"
    assert fails("--json", same, "--html", same) == f"--html '{same}': is the file of --json too; give another one"


def test_text_of_the_store_is_shown_as_text() -> None:
    clock = Clock()
    with open_store(clock=clock) as store:
        run = begin(store, model=Model(model_id=MODEL.model_id, name=EVIL), hardware=Hardware(hw_id="h" * 16, gpu=EVIL))
        rows = ByHand(store, clock, run)
        trial = rows.trial("start", deferred_update=EVIL)
        rows.measure(trial, "start", 100, reason=EVIL)
        rows.decide("start", trial, EVIL)
        bad = store_rows.add_trial(store, run, {EVIL: EVIL}, source=EVIL, rejected=EVIL)
        rows.decide("void", bad.trial_id, EVIL)
    shown = call("-v").stdout
    assert "\x1b" not in shown
    assert "\u202e" not in shown
    assert shown.count("[bold]x[/bold]") >= 6
    assert "\\x1b[2J\\u202e<b>&" in shown
    assert str(HARDWARE.gpu) not in shown


def test_whether_it_goes_on_is_seen_at_once() -> None:
    with open_store() as store:
        rows = ByHand(store, Clock(), begin(store))
        rows.measure(rows.trial("start"), "start", 100)
        assert "It is still running: this is known so far." in flat(call().stdout)
    assert "It ended before its search did: this was found until then." in flat(call().stdout)
    with open_store() as store:
        assert [run.state.value for run in store.runs()] == ["running"]  # nothing was written
