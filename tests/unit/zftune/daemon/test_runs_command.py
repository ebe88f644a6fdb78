"""`zftune runs list show logs pause resume rollback stop` and what they do to runs that train."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft202012Validator

from tests.support.zftune.daemon.in_process import Application, Tell, answers, teller, trainings
from tests.support.zftune.daemon.runs.agents import faster
from tests.support.zftune.daemon.scripted import EVIL, START, Training
from tools.reference_pages import DOCUMENTS
from zftune.daemon.client import http
from zftune.daemon.client.http import DaemonClient, among
from zftune.errors import BadInputError, NoDaemonError, ZftuneError
from zftune.store import open_store
from zftune.store.account import Account, Count, Pulse
from zftune.store.locks import RunLocks
from zftune.store.store import Store
from zftune.store.types import Hardware, Key, Model, Run
from zftune.tuner.space import Setting


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Application, list[Training]]]:
    """Two runs whose search has ended, each with another setting than it began with."""
    with trainings(tmp_path_factory.mktemp("store"), "gpt2", EVIL) as found:
        yield found


@pytest.fixture
def runs(found: tuple[Application, list[Training]]) -> list[Training]:
    for one in found[1]:
        one.report()  # on a busy machine the tests before took longer than a run may say nothing
    return found[1]


@pytest.fixture
def tell(
    found: tuple[Application, list[Training]],
    runs: list[Training],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> Tell:
    answers(found[0], monkeypatch)
    return teller(capsys)


def test_runs_are_listed(tell: Tell, runs: list[Training]) -> None:
    code, out, err = tell("runs", "list")
    assert (code, err, out.count("\n")) == (0, "", 2)
    first, second = out.splitlines()
    best = runs[0].last.incumbent
    assert best is not None
    assert best != START
    shown = (
        rf"  settled +step \d+, 8\d\.\d ms a step, 12% host, 8% h2d, k {best.topk_ratio:g} S {best.update_interval} "
    )
    assert re.match(runs[0].called + shown, first)
    assert first.endswith("(gpt2)")
    assert second.startswith(f"{runs[1].called}  ")
    document = json.loads(tell("runs", "list", "--json", "-")[1])
    assert document["schema"] == "zftune.daemon.runs/1"
    assert [one["run"] for one in document["runs"]] == [one.run for one in runs]
    assert document["runs"][1]["model"] == EVIL


def test_nothing_in_a_run_steers_the_terminal(tell: Tell) -> None:
    for command in ("list", "show a2", "logs a2", "pause a2", "resume a2"):
        code, out, _ = tell("runs", *command.split())
        assert code == 0
        assert "\x1b" not in out
    assert "[red]\\x1b[2J" in tell("runs", "show", "a2")[1]


def test_a_run_is_shown_with_its_decisions_and_trials(tell: Tell) -> None:
    code, out, err = tell("runs", "show", "a1")
    assert (code, err) == (0, "")
    words = " ".join(out.split())
    for sentence in ("The search begins from", "Adopted: ", "of the step time", "decisions", "settings", "◆ 1 kept"):
        assert sentence in words
    document = json.loads(tell("runs", "show", "a1", "--json", "-")[1])
    assert document["schema"] == "zftune.daemon.run/1"
    assert document["gain"]["share"] == pytest.approx(0.2, abs=0.02)
    assert 0 < document["gain"]["error"] < 0.02
    assert [one["kind"] for one in document["decisions"] if one["kind"] != "remark"][:2] == ["start", "adopt"]
    knobs = [one["knobs"] for one in document["changes"]]
    assert knobs[0] == START.knobs()
    assert knobs[-1] == document["run"]["incumbent"] != knobs[0]
    steps = [one["step"] for one in document["changes"]]
    assert len(steps) >= 3
    for one in document["steps"]:  # the knobs that held then, by the time it took
        held = [change["knobs"] for change in document["changes"] if change["step"] < one["step"]] or [START.knobs()]
        assert one["step_ms"] == pytest.approx(faster(Setting.from_knobs(held[-1])), rel=0.02), one


@pytest.mark.parametrize("answers", [True, False])
def test_trainings_that_no_daemon_follows_are_told_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *, answers: bool
) -> None:
    """As after a daemon was killed: the next one hears of its trainings within some seconds."""

    def followed(_: DaemonClient) -> list[Any]:
        if answers:
            return []
        raise NoDaemonError("no daemon serves 'x'")

    path = tmp_path / "zftune.db"
    monkeypatch.setenv("ZFTUNE_DB", str(path))
    monkeypatch.setattr(http, "all_runs", followed)
    nothing = teller(capsys)("runs", "list")
    assert not path.exists()
    assert nothing == (
        (0, f"No run is followed; {http.PAST_RUNS}\n", "") if answers else (1, "", "zftune: no daemon serves 'x'\n")
    )
    with open_store(str(path)) as store:
        run = begin(store, "").run_id
        pulse = Pulse(RunLocks(path), run, "p" * 32)
        pulse.beat(Count(steps=7, seconds=70.0), None)
        assert teller(capsys)("runs", "list") == nothing  # who writes the run lives: it looks for no daemon
    code, out, err = teller(capsys)("runs", "list")
    said = rf"under the best settings so far and will look for a daemon again: {run[:8]} \(last heard of \d+ s ago\)\n"
    if answers:
        assert (code, err) == (0, "")
        assert re.fullmatch(f"No run is followed, but a training goes on {said}", out)
    else:
        assert (code, out) == (1, "")
        assert re.fullmatch(f"zftune: no daemon serves 'x'; a training goes on {said}", err)
    pulse.close(remove=True)


def test_pause_and_resume(tell: Tell, runs: list[Training]) -> None:
    code, out, err = tell("runs", "pause", runs[0].run)
    assert (code, err) == (0, "")
    assert out == f"Run {runs[0].called} is paused: the best settings so far stay until it is resumed.\n"
    assert runs[0].report().kind == "pause"
    assert runs[1].report().kind != "pause"
    resumed = tell("runs", "resume", "a1")[1]
    assert resumed.startswith(f"Run {runs[0].called} is settled: ")
    assert resumed.endswith(" Nothing is tried unless step times change.\n")
    tell("runs", "pause", "a1")
    document = json.loads(tell("runs", "resume", "a1", "--json", "-")[1])
    assert document["run"]["state"] == "frozen"
    assert runs[0].report().kind != "pause"
    code, out, err = tell("runs", "resume", "a1")
    assert (code, out) == (1, "")
    assert err == "zftune: cannot resume: the run is settled, not paused\n"


@pytest.mark.parametrize("command", ["show", "logs", "pause", "resume", "rollback", "stop"])
def test_a_run_must_be_named_where_there_are_two(tell: Tell, runs: list[Training], command: str) -> None:
    names = ", ".join(one.called for one in runs)
    for run, words in (
        ([], f"RUN is missing, there are 2 runs; the runs are {names}"),
        (["a"], f"RUN 'a' is the beginning of 2; the runs are {names}"),
        (["x"], f"RUN 'x' is not there; the runs are {names}"),
        ([""], "RUN '' is not there; the runs are"),
    ):
        code, out, err = tell("runs", command, *run)
        assert (code, out, err.count("\n")) == (2, "", 1)
        assert words in err


def test_rollback_and_stop_of_a_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    tell = teller(capsys)
    with trainings(tmp_path, "gpt2") as (application, (training,)):
        answers(application, monkeypatch)
        assert training.last.incumbent != START
        code, out, _ = tell("runs", "rollback")
        assert code == 0
        assert out.startswith(f"Run {training.called} is settled: Rolled back by hand: ")
        assert training.report().incumbent == START
        code, _, err = tell("runs", "rollback")
        assert code == 1
        assert "zftune: cannot roll back: it was rolled back already, and nothing else" in err
        assert json.loads(tell("runs", "show", "a", "--json", "-")[1])["gain"] is None
        code, out, _ = tell("runs", "stop", "a1")
        assert (code, training.report().kind) == (0, "stop")
        assert out == f"Run {training.called} is settled: Stopped by hand.\n"  # not what was done before
        fates = [one["fate"] for one in json.loads(tell("runs", "show", "--json", "-")[1])["trials"]]
        assert "rolled back" in fates
        training.goodbye(over=True)  # as an agent that was told "stop"
        code, out, _ = tell("runs", "logs", "--follow")  # ends with the run
        assert code == 0
        assert "  rolled back  Rolled back by hand" in out
        goes_on = "tuning was stopped 100 steps after the training's last start; the training went on"
        assert f"not tuned: {goes_on}" in " ".join(tell("runs", "show")[1].split())
        assert tell("runs", "pause")[::2] == (1, f"zftune: cannot pause: {goes_on}\n")


def test_without_a_daemon_the_store_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def nobody(_: object) -> None:
        raise FileNotFoundError

    path = tmp_path / "z.sock"
    monkeypatch.setenv("ZFTUNE_SOCKET", str(path))
    monkeypatch.setattr(http._UnixConnection, "connect", nobody)
    absent = f"zftune: no daemon serves '{path}', start one with: zftune daemon start"
    for command in ("list", "show", "logs", "pause", "resume", "rollback", "stop"):
        assert teller(capsys)("runs", command) == (1, "", f"{absent}; all runs of the store: zftune runs list --all\n")


def begin(store: Store, name: str) -> Run:
    key = Key(
        model_id="a" * 16, hw_id="b" * 16, backend="zenflow", stage=0, dtype="bfloat16", world_size=1,
        micro_batch=1, sequence=64, checkpointing=False, quality="published",
    )  # fmt: skip
    model = Model(model_id=key.model_id, name=name)
    return store.begin_run(key, model, Hardware(hw_id=key.hw_id), knobs={})


def test_all_runs_of_the_store_are_listed_without_a_daemon(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("ZFTUNE_SOCKET", str(tmp_path / "none.sock"))
    monkeypatch.setenv("ZFTUNE_DB", str(tmp_path / "z.db"))
    tell = teller(capsys)
    assert tell("runs", "list", "--all")[:2] == (
        0, "The store has no runs yet; zftune run --online -- CMD makes one.\n",
    )  # fmt: skip
    with open_store(str(tmp_path / "z.db")) as store:
        runs = [begin(store, name) for name in ("first", "second", EVIL)]
        store.finish_run(runs[0], Account(process="p", now=Count(steps=1234, seconds=70.0)))
        store.interrupt_run(runs[1])
        code, out, _ = tell("runs", "list", "--all")
        listed = tell("runs", "list", "--all", "--json", "-")
    assert code == 0
    newest, middle, oldest = out.splitlines()
    for line, run, state in (
        (newest, 2, "still running"),
        (middle, 1, "search unfinished"),
        (oldest, 0, "search finished"),
    ):
        assert re.match(rf"{runs[run].run_id[:8]}  \d{{4}}-\d\d-\d\d \d\d:\d\d  {state} +", line)
    assert oldest.endswith(", quality published, 1,234 steps in 70 s")
    assert middle.endswith("no step counted")
    assert "\x1b" not in out
    assert (listed[0], listed[2]) == (0, "")
    document = json.loads(listed[1])
    assert [(one["run_id"], one["state"], one["steps"]) for one in document["runs"]] == [
        (runs[2].run_id, "running", 0), (runs[1].run_id, "ended", 0), (runs[0].run_id, "finished", 1234),
    ]  # fmt: skip
    assert document["runs"][2]["elapsed_s"] == 70.0
    schema = json.loads(DOCUMENTS.read_text(encoding="utf-8"))
    Draft202012Validator({**schema, "$ref": "#/$defs/stored-runs"}).validate(document)


def a_run(name: str, state: str = "frozen", record: str | None = None) -> dict[str, Any]:
    return {"run": name * 16, "record": record, "state": state}


def test_which_run_is_meant() -> None:
    first, second = a_run("a1", "ended", "c0ffee"), a_run("a2", record="a1a1")
    assert among([first, second], None) is second  # the only one that trains
    assert among([first], None) is first
    assert among([first, second], "A1") is first
    assert among([first, second], "c0f") is first
    other = a_run("a3", record="c0ff")
    with pytest.raises(BadInputError, match="RUN 'c0' is the beginning of 2; the runs are c0ff, c0de "):
        among([other, a_run("a4", record="c0de")], "c0")
    with pytest.raises(ZftuneError, match="no run, start one with") as none:
        among([], "a1")
    assert not isinstance(none.value, BadInputError)
    with pytest.raises(BadInputError, match=r"the runs are (\w{8}, ){5}\w{8} \.\. \(see zftune runs list\)$"):
        among([a_run(f"b{number}") for number in range(9)], None)
