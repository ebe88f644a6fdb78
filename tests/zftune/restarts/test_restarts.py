"""The search over restarts, with a command that only stands for a training."""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from tests import zygote
from tests.process.conftest import is_running, wait_for
from tests.tiers import everything
from tests.zftune.restarts.training import content
from zftune.errors import BadInputError, ProfileError, ZftuneError
from zftune.explain.document import explain_document
from zftune.explain.screen import render
from zftune.report.tune import tune_page
from zftune.restarts.document import RestartOptions, run_restarting
from zftune.restarts.process import Ended, ProcessTrial
from zftune.store import open_store
from zftune.store.types import RunState, TrialState

STAND_IN = Path(__file__).with_name("stand_in.py")
OPTIONS = ("--restartable", "--trial-steps", "8", "--measurements", "5", "--sampler", "random", "--json", "-")
FASTER = {"4": 20.0, "2": 10.0, "1": 30.0}
TOO_SHORT = (
    r"^command: run 1 ended by itself after {} steps, {} are needed to measure topk_ratio 0\.1, update_interval 4, .*; "
    r"give it a training of \d+ steps or more, which is always enough"
)
ENDED_WELL = {"too_short": None, "crashed": None}
MEMORY = open_store("sqlite://", environment={})
Document = dict[str, Any]
Tune = Callable[..., Document]


@pytest.fixture
def tune(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Tune:
    """Tune the stand-in in a working directory of its own; `behaviour` is what it does."""
    cwd = tmp_path / "project"
    cwd.mkdir()
    (tmp_path / "scratch").mkdir()
    monkeypatch.chdir(cwd)
    monkeypatch.setenv("ZFTUNE_DB", str(tmp_path / "zftune.db"))
    monkeypatch.setenv("TMPDIR", str(tmp_path / "scratch"))
    monkeypatch.setattr("tempfile.tempdir", None)

    def run(
        options: RestartOptions | None = None, clock: Callable[[], float] = time.monotonic, **behaviour: Any
    ) -> Document:
        (cwd / "b.json").write_text(json.dumps({"ms": FASTER, **behaviour}))
        before = content(cwd)
        command = [sys.executable, str(STAND_IN), "b.json"]
        try:
            with open_store() as store:
                return run_restarting(command, options or few(), store, clock=clock)
        finally:
            assert content(cwd) == before
            assert list((tmp_path / "scratch").iterdir()) == []

    return run


def few(most: int = 6, **more: Any) -> RestartOptions:
    return RestartOptions(**{"steps": 8, "most_measurements": most, "sampler": "none", "timeout_s": 20, **more})


def console_text(document: Document) -> str:
    """The screen, without its breaks of lines."""
    console = Console(width=200, file=io.StringIO(), record=True)
    console.print(render(document))
    return " ".join(console.export_text().split())


def states(document: Document) -> list[str]:
    return [trial["state"] for trial in document["trials"]]


def test_the_fastest_knobs_are_found_and_kept(tune: Tune) -> None:
    document = tune()
    assert document["gain"]["share"] == pytest.approx(0.5)
    assert document["best"]["knobs"]["update_interval"] == 2
    assert document["start"]["step_ms"] == 20.0
    assert document["command"] == {"script": "stand_in.py", "ranks": 1, "stage": 2, "runs": 5} | ENDED_WELL
    assert document["ds_config"]["zero_optimization"]["zenflow"]["update_interval"] == 2
    assert [trial["predicted_step_ms"] for trial in document["trials"]] == [None] * len(document["trials"])
    assert document["trials"][1]["staleness_steps"] == 2.5
    json.dumps(document, allow_nan=False)
    with open_store() as store:
        (run,) = store.runs()
        assert run.state is RunState.FINISHED
        assert (run.key.backend, run.key.stage, run.key.micro_batch, run.key.sequence) == ("deepspeed", 2, 2, 8)
        (preset,) = store.presets()
        assert preset.knobs == document["best"]["knobs"]
        rows = store.trials(run.run_id)
        assert [row.state.value for row in rows] == states(document)
        # The first window and the warm-up do not count, and windows are whole.
        assert [one.role for one in store.measurements(rows[0].trial_id)] == ["start", "a2", "a2"]
        assert {one.steps for one in store.measurements(rows[0].trial_id)} == {20}


def test_progress_begins_with_what_will_happen(tune: Tune, tmp_path: Path) -> None:
    told: list[str] = []
    (Path.cwd() / "b.json").write_text(json.dumps({"ms": FASTER}))
    run_restarting([sys.executable, str(STAND_IN), "b.json"], few(), MEMORY, lambda text, _: told.append(text))
    assert told[0].startswith("Runs the command up to 6 times, 13 steps each or more")
    assert "checkpoints are not saved" in told[0]
    assert "update_interval 2" in told[3]


@pytest.mark.parametrize(
    ("behaviour", "reason"),
    [
        ({"crashes": [2]}, r"ended with exit code 1 \(RuntimeError: these knobs do not work\)"),
        ({"memory": [2]}, "ran out of memory"),
        ({"nan": [2]}, "the loss is nan"),
    ],
)
def test_a_setting_that_crashes_is_marked_with_its_reason(tune: Tune, behaviour: Any, reason: str) -> None:
    document = tune(**behaviour)
    assert document["trials"][1]["state"] == "crashed"
    assert [one["step_ms"] for one in document["history"] if one["status"] == "crashed"] == [None]
    with open_store() as store:
        trials = store.trials(store.runs()[0].run_id)
        assert trials[1].state is TrialState.CRASHED
        (row,) = store.measurements(trials[1].trial_id)
        assert row.void_reason is not None
        assert re.search(reason, row.void_reason)


@pytest.mark.skipif(not everything(), reason="before a release: five more trainings")
def test_the_command_is_run_no_more_often_than_was_said(tune: Tune) -> None:
    document = tune(few(5, sampler="random"), crashes=[n for n in range(200) if n != 4])
    assert document["command"]["runs"] == 5
    assert "crashed" in states(document)
    assert document["stopped"] == "The command was run 5 times, as often as it may be."


def test_all_time_of_all_runs_is_what_it_cost(tune: Tune, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run takes 100 s on the clock, mostly before its first step; 20 ms a step become 10 ms."""
    now = [1000.0]
    run = ProcessTrial.run

    def slow(trial: ProcessTrial) -> Ended:
        now[0] += 100.0
        return run(trial)

    monkeypatch.setattr(ProcessTrial, "run", slow)
    document = tune(clock=lambda: now[0])
    cost, said = document["cost"], "Took 8 min 20 s, 5 runs of the command, gained 50.0 +/- 0.0%"
    assert (cost["spent_s"], cost["elapsed_s"], cost["runs"]) == (500, 500, 5)
    assert (cost["saved_ms_a_step"], cost["paid_after_steps"]) == (pytest.approx(10), 50_000)
    assert document["verdict"][0].startswith(said)
    assert document["verdict"][0].endswith("saves 10 ms a step and so has paid for itself after 50,000 steps.")
    assert document["decisions"][0]["at_s"] == 100
    page = tune_page(document)
    assert "8 min 20 s" in page
    assert "50,000 steps" in page
    assert "Spent on exploring" not in page
    with open_store() as store:
        (found,) = store.runs()
        assert explain_document(store, found)["verdict"] == document["verdict"]
        start = store.measurements(store.trials(found.run_id)[0].trial_id)[0]
        assert start.began_unix_s - found.began_unix_s > 90  # it began with the first start of the command


@pytest.mark.parametrize("memory", [False, True])
def test_settings_that_all_crash_for_one_reason_end_the_search(tune: Tune, memory: bool) -> None:
    """A machine without what they need; for want of memory others may run."""
    lacks = "CUDA out of memory" if memory else "Found no NVIDIA driver"
    document = tune(few(6, sampler="random", quality="loose"), lacks=lacks)
    shown = console_text(document)
    tried = [trial for trial in document["trials"] if trial["state"] == "crashed"]
    assert all(one["step_ms"] is None for one in document["history"] if one["status"] == "crashed")
    assert any("crashed, so that nothing is known of how fast others are" in one for one in document["verdict"])
    if memory:
        assert document["command"]["crashed"] is None
        assert len(tried) == 5
        return
    why = "3 settings in a row crashed for the same reason"
    assert document["command"]["crashed"].startswith(
        f"the command cannot be tuned here: {why}, while it runs as it is: "
    )
    assert document["command"]["runs"] == 4
    assert len(tried) == 3
    assert shown.count(lacks) == 1


def test_what_is_known_before_a_run_is_refused_before_it(tune: Tune, monkeypatch: pytest.MonkeyPatch) -> None:
    """By a ds_config that the command names or its script writes out, and the DeepSpeed that is installed."""
    folder = Path.cwd()
    config = {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}}
    (folder / "ds.json").write_text(json.dumps(config))
    (folder / "own.py").write_text(f"import deepspeed\nconfig = {config}\n")
    (folder / "computed.py").write_text("import deepspeed\nconfig = {'zero_optimization': {'stage': stage()}}\n")
    named = [sys.executable, str(STAND_IN), "--deepspeed_config", "ds.json"]

    def stop(*_: Any) -> None:
        raise ProfileError("it would have been run")

    monkeypatch.setattr("zftune.restarts.search.Restarts.run", stop)
    for version, quality, command, said in (
        ("0.19.6", None, named, "give --quality published or loose, which let it apply gradients later .ZenFlow.$"),
        ("0.19.8", None, named, r"0\.19\.8 is not to be used: pip install deepspeed==0\.19\.6"),
        ("0.19.8", "published", named, r"0\.19\.8's own ZenFlow scrambles"),
        ("0.19.8", "loose", [sys.executable, "own.py"], r"0\.19\.8's own ZenFlow scrambles"),
        ("0.19.6", "published", named, "it would have been run"),
        ("0.19.8", "published", ["/bin/sh", "-c", "train", "--deepspeed_config", "ds.json"], "it would have been run"),
        ("0.19.8", "published", [sys.executable, "computed.py"], "it would have been run"),
    ):
        monkeypatch.setattr("zftune.restarts.upstream.installed", lambda _, version=version: version)
        with pytest.raises(ZftuneError, match=said):
            run_restarting(command, few(quality=quality), MEMORY)


def test_a_model_without_a_name_is_kept_nowhere_and_nobody_is_said_to_have_asked_for_it(tune: Tune) -> None:
    document = tune(nameless=True)
    assert document["gain"] is not None
    assert any(one.startswith("Nothing is kept in the store: ") for one in document["notices"])
    assert not any("ZFTUNE_DB" in one for one in document["notices"])


def test_a_later_search_knows_what_crashed(tune: Tune) -> None:
    first = tune(few(5), crashes=[2])
    assert not [one for one in first["notices"] if "--fresh" in one]
    again = tune(few(5), crashes=[2])
    assert again["trials"][1]["state"] == "rejected"
    assert "crashed before" in again["trials"][1]["reason"]
    said = "1 setting that has crashed here is not tried again; --fresh begins anew and tries it."
    assert said in again["notices"]
    mended = tune(few(5, fresh=True))
    assert mended["trials"][1]["knobs"] == again["trials"][1]["knobs"]
    assert mended["trials"][1]["state"] == "measured"
    assert said not in mended["notices"]


def test_a_setting_that_is_too_slow_is_stopped_early(tune: Tune) -> None:
    document = tune(few(5, steps=60), ms={**FASTER, "2": 90.0})
    assert document["trials"][1]["state"] == "aborted"
    assert "4.50 times" in document["trials"][1]["reason"]
    with open_store() as store:
        (row,) = store.measurements(store.trials(store.runs()[0].run_id)[1].trial_id)
        assert 8 <= row.steps < 60


def test_a_run_that_does_not_come_to_its_knobs_says_nothing_about_them(tune: Tune) -> None:
    (Path.cwd() / "b.json").write_text("{}")
    with pytest.raises(ProfileError, match=r"cannot be tuned as it is: its port was in use"):
        tune(before="[Errno 98] Address already in use")
    with pytest.raises(ProfileError, match=r"cannot be tuned as it is: the command ended with exit code 1 \(OSError"):
        tune(before="no such data")


@pytest.mark.parametrize(
    ("behaviour", "options", "kind", "said"),
    [
        ({"sectioned": False}, {}, BadInputError, r"'exact' \(the default.*no setting at ZeRO stage 2"),
        ({"zenflow": {"update_interval": "auto"}}, {}, BadInputError, "turns all weights into NaN"),
        ({"version": "0.19.8"}, {}, ProfileError, r"0\.19\.8's own ZenFlow scrambles every 2-D weight.*pip install"),
        ({"loss": False}, {}, BadInputError, "passes no loss to engine.backward"),
        ({"plain": True}, {}, BadInputError, "trains without an optimizer that DeepSpeed offloads"),
        ({"steps": 9, "sleep_s": 0.1}, {}, BadInputError, TOO_SHORT.format(9, 28) + "$"),
        ({"steps": 9, "sleep_s": 0}, {}, BadInputError, TOO_SHORT.format(9, 28) + "$"),
        ({"steps": 30}, {"steps": 40}, BadInputError, TOO_SHORT.format(30, 48) + ", or --trial-steps 20$"),
        ({"nan": [4]}, {}, ProfileError, "cannot be tuned as it is: the training goes wrong: the loss is nan"),
        ({"crashes": [4]}, {}, ProfileError, "cannot be tuned as it is: .*these knobs do not work"),
        ({"sleep_s": 60}, {"timeout_s": 2}, ProfileError, "it was not done after 2 s"),
        ({}, {"quality": "best"}, BadInputError, "--quality is 'best'; it must be exact, published or loose"),
        ({}, {"steps": 1}, BadInputError, "--trial-steps is 1; it must be a number >= 4"),
        ({}, {"most": 4}, BadInputError, "--measurements is 4; it must be a number >= 5"),
    ],
)
def test_what_cannot_be_tuned_is_said_in_a_sentence(
    tune: Tune, behaviour: Any, options: Any, kind: type[ZftuneError], said: str
) -> None:
    with pytest.raises(kind, match=said) as error:
        tune(few(**options), **behaviour)
    assert not str(error.value).endswith(".")
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("script", "refused"),
    [
        ("import torch, time\nfrom beside import work\n", True),
        ("from torch import nn\nimport zftune\n", True),
        ("import torch\nimport deepspeed\n", False),
        ("import torch\nimport trainers_of_somebody\n", False),  # which may bring DeepSpeed with them
        ("import torch\nfrom above import work\n", False),
        ("import torch, subprocess\n", False),  # it may start another script
        ("import json\n", False),
        ("import torch:\n", False),
    ],
)
def test_a_loop_without_deepspeed_is_refused_before_anything_is_run(
    script: str, refused: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "beside.py").write_text("import math\nimport torch.nn as nn\n")
    (tmp_path / "above.py").write_text("from transformers import Trainer\n")
    path = tmp_path / "train.py"
    path.write_text(script)
    told: list[str] = []

    def stop(*_: Any) -> None:
        raise ProfileError("it would have been run")

    monkeypatch.setattr("zftune.restarts.search.Restarts.run", stop)
    said = rf"^--restartable: '{path}' trains by torch alone, .* and zftune\.attach\(optimizer\)$"
    with pytest.raises(ZftuneError, match=said if refused else "it would have been run"):
        run_restarting([sys.executable, str(path)], few(), MEMORY, lambda text, _: told.append(text))
    assert bool(told) is not refused


def test_a_run_that_is_over_at_once_counts_if_it_was_long_enough(tune: Tune) -> None:
    """Nobody looked at it before its end."""
    document = tune(few(5), steps=400, sleep_s=0)
    assert document["command"]["too_short"] is None
    assert document["measurements"] >= 1


def test_the_first_run_that_is_too_short_ends_the_search_which_is_taken_up(tune: Tune) -> None:
    """The start's 25 steps are there, those of a long window are not."""
    document = tune(few(quality="loose"), steps=30, sleep_s=0.005, sectioned=False)
    why = document["command"]["too_short"]
    assert re.search(r"^command: run 2 ended by itself after 30 steps, \d+ are needed to measure topk_ratio", why)
    assert why.endswith("(given again, the search goes on from here)")
    assert document["command"]["runs"] == 2
    assert document["stopped"] == f"The search is not over: {why.removeprefix('command: ')}."
    assert document["gain"] is None
    with open_store() as store:
        (run,) = store.runs()
        assert run.state is RunState.LOST
        assert [row.state for row in store.trials(run.run_id)] == [TrialState.MEASURED, TrialState.VOID]
        assert "measured" in str(store.trials(run.run_id)[1].reason)
    needed = int(re.findall(r"a training of (\d+) steps", why)[0])
    again = tune(few(quality="loose"), steps=needed, sleep_s=0.005, sectioned=False)
    assert ": 1 measurement is kept (--fresh, " in again["notices"][0]
    assert again["command"]["too_short"] is None
    assert again["gain"] is not None


def test_a_setting_under_which_the_command_ends_early_is_given_up(tune: Tune) -> None:
    """Other runs were longer: it is not the command that is too short."""
    document = tune(ends={"2": 7})
    assert document["trials"][1]["state"] == "void"
    assert document["trials"][1]["reason"].startswith("the command ended by itself after 7 steps")
    assert document["command"]["too_short"] is None
    assert "Given up" in " ".join(note["reason"] for note in document["decisions"])


def test_an_engine_with_other_knobs_ends_it(tune: Tune) -> None:
    with pytest.raises(ProfileError, match=r"runs with topk_ratio 0\.7 instead of the 0\.3 of the trial"):
        tune(engine={"topk_ratio": 0.7})
    with open_store() as store:
        assert store.runs()[0].state is RunState.LOST  # it may be gone on with once that is mended


def test_a_command_that_is_none(tune: Tune) -> None:
    with pytest.raises(BadInputError, match=r"command 'no-such-program': it cannot be run .No such file"):
        run_restarting(["no-such-program"], few(), MEMORY)
    with pytest.raises(BadInputError, match="the command is missing"):
        run_restarting([], few(), MEMORY)


@pytest.fixture
def tuner(tmp_path: Path) -> Iterator[Callable[..., zygote.Forked]]:
    """Run `zftune tune --restartable` on the stand-in."""
    (tmp_path / "project").mkdir(exist_ok=True)
    (tmp_path / "scratch").mkdir(exist_ok=True)

    def begin(*options: str, **behaviour: Any) -> zygote.Forked:
        text = json.dumps({"ms": FASTER, **behaviour})
        (tmp_path / "project" / "b.json").write_text(text)
        environment = {**os.environ, "ZFTUNE_DB": str(tmp_path / "zftune.db"), "TMPDIR": str(tmp_path / "scratch")}
        words: list[str | Path] = ["tune", *OPTIONS, *options, "--", sys.executable, STAND_IN, "b.json"]
        begun = zygote.Forked(["-c", zygote.MAIN, *words], cwd=tmp_path / "project", env=environment)
        return stack.enter_context(begun)

    with contextlib.ExitStack() as stack:
        yield begin


def pids(tmp_path: Path) -> list[int]:
    path = tmp_path / "pids"
    return [int(pid) for line in path.read_text().splitlines() for pid in line.split()] if path.exists() else []


def begun(tmp_path: Path, runs: int) -> Callable[[], bool]:
    """Whether the command has been started so often."""
    return lambda: len(pids(tmp_path)) >= 2 * runs


def gone(tmp_path: Path) -> Callable[[], bool]:
    return lambda: not any(map(is_running, pids(tmp_path)))


def test_ctrl_c_ends_the_command_and_the_search_is_taken_up(
    tmp_path: Path, tuner: Callable[..., zygote.Forked]
) -> None:
    process = tuner(sleep_s=0.02, spawn=str(tmp_path / "pids"))
    wait_for(begun(tmp_path, 2))
    process.send_signal(signal.SIGINT)
    out, _ = process.communicate(timeout=60)
    assert process.returncode == 130
    wait_for(gone(tmp_path))
    assert list((tmp_path / "scratch").iterdir()) == []
    document = json.loads(out)
    assert document["interrupted"]
    assert document["measurements"] == 1
    with open_store(str(tmp_path / "zftune.db")) as store:
        (run,) = store.runs()
        assert run.state is RunState.LOST
        assert [row.state for row in store.trials(run.run_id)] == [TrialState.MEASURED, TrialState.VOID]
    process = tuner()
    out, err = process.communicate(timeout=60)
    assert process.returncode == 0
    assert "1 measurement is kept (--fresh, " in err
    document = json.loads(out)
    assert document["best"]["knobs"]["update_interval"] == 2
    with open_store(str(tmp_path / "zftune.db")) as store:
        (run,) = store.runs()
        assert run.state is RunState.FINISHED


def test_a_search_that_was_too_short_in_part_ends_with_code_2(
    tmp_path: Path, tuner: Callable[..., zygote.Forked]
) -> None:
    """What was measured before is written, and the last line says what to do."""
    process = tuner("--quality", "loose", steps=30, sleep_s=0.005, sectioned=False)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 2, err
    document = json.loads(out)
    assert err.splitlines()[-1] == f"zftune: {document['command']['too_short']}"
    shown = " ".join(err.replace("│", " ").split())
    assert "No other setting was measured, so that nothing is known of them. It began with: topk_ratio 0," in shown
    assert shown.count("ended by itself") == 2  # among the decisions, and in the last line
    environment = {**os.environ, "ZFTUNE_DB": str(tmp_path / "zftune.db")}
    explained = zygote.zftune("explain", env=environment, check=True).stdout
    assert document["stopped"] in " ".join(explained.split())


def is_in_flight(tmp_path: Path) -> bool:
    """Whether a setting was written down to be applied."""
    with open_store(str(tmp_path / "zftune.db")) as store:
        trials = [trial for run in store.runs() for trial in store.trials(run.run_id)]
    return any(trial.state is TrialState.IN_FLIGHT for trial in trials)


def test_killed_it_leaves_nothing_running_and_is_taken_up(tmp_path: Path, tuner: Callable[..., zygote.Forked]) -> None:
    process = tuner(sleep_s=0.02, spawn=str(tmp_path / "pids"))
    wait_for(begun(tmp_path, 2))
    wait_for(lambda: is_in_flight(tmp_path))
    process.kill()
    process.communicate()
    wait_for(gone(tmp_path))
    wait_for(lambda: not list((tmp_path / "scratch").iterdir()))
    process = tuner()
    out, _ = process.communicate(timeout=60)
    assert process.returncode == 0
    document = json.loads(out)
    with open_store(str(tmp_path / "zftune.db")) as store:
        (run,) = store.runs()
        rows = store.trials(run.run_id)
        assert run.state is RunState.FINISHED
        assert rows[1].state is TrialState.CRASHED  # it was in flight
        assert all(row.state is not TrialState.IN_FLIGHT for row in rows)
        start = store.measurements(rows[0].trial_id)
        assert [one.role for one in start][:2] == ["start", "start"]  # what was acknowledged is there, and goes on
    assert states(document)[1] == "crashed"
