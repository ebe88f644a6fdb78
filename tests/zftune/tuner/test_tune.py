"""`zftune tune` on the built-in workload's loop, with a model and a rig that are small enough."""

from __future__ import annotations

import io
import json
import multiprocessing
import sys
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from tests.zftune.conftest import rig_text
from zftune import cli
from zftune.store import Evidence, Hardware, Model, Preset, RunState, open_store
from zftune.tuner.restarting.command import RestartOptions
from zftune.tuner.run import TuneOptions, tune
from zftune.tuner.screen import render
from zftune.tuner.search import Search, SearchOptions
from zftune.tuner.settings import Setting

THINKING_S = 0.25


def options(mini_model: Path, mini_rig: Path, **more: Any) -> TuneOptions:
    search = SearchOptions(sampler="random", most_measurements=24, thinking_s=THINKING_S)
    given = {"model": str(mini_model), "rig": str(mini_rig), "sequence": 16, "search": search, **more}
    return TuneOptions(**given)


def shown(document: dict[str, Any]) -> str:
    out = io.StringIO()
    Console(width=120, file=out).print(render(document))
    return out.getvalue()


@pytest.fixture
def quick(tmp_path: Path, mini_model: Path) -> dict[str, Any]:
    """Short steps, whose times do not matter."""
    rig, text = tmp_path / "quick.toml", tmp_path / "text.txt"
    rig.write_text(rig_text("quick", forward_ms=3, backward_ms=3, d2h_ms=1, host_ms=4, h2d_ms=1, scale=1))
    text.write_text("to be, or not to be, that is the question: " * 200)
    search = SearchOptions(sampler="random", thinking_s=THINKING_S)
    return {"model": str(mini_model), "rig": str(rig), "text": str(text), "sequence": 8, "search": search}


def test_some_steps_of_a_search(mini_model: Path, mini_rig: Path) -> None:
    seen: list[int] = []
    with open_store("sqlite://", environment={"HOME": "/nowhere"}) as store:
        document = tune(options(mini_model, mini_rig, steps=50), lambda done, search: seen.append(done), store)
        (run,) = store.runs()
        assert run.state is RunState.LOST  # its search is not over
        assert store.trials(run.run_id)[0].source == "start"
        reasons = [decision.reason for decision in store.decisions(run.run_id)]
    assert reasons == [note["reason"] for note in document["decisions"]]
    assert seen == list(range(1, 51))
    assert document["schema"] == "zftune.tune/1"
    assert document["steps"] == 50
    assert document["stopped"] == "All 50 steps are done."
    assert document["coverage"].startswith("measured on the live model")
    assert document["trials"][0]["step_ms"] > 80 - 1e-6  # the rig's compute
    assert document["decisions"][0]["kind"] == "start"
    assert {"planner"} <= {trial["source"] for trial in document["trials"]}
    json.dumps(document, allow_nan=False)
    text = shown(document)
    assert "rig mini: times are of an emulated accelerator" in text
    assert document["workload"]["ranks"] == "1 rank"
    assert "All 50 steps are done." in text


def test_a_search_in_simulated_time_repeats_to_the_last_digit(quick: dict[str, Any]) -> None:
    quick["search"] = SearchOptions(most_measurements=6, thinking_s=THINKING_S)
    first, second = (tune(TuneOptions(**quick, steps=400), lambda done, search: None) for _ in range(2))
    assert first["measurements"] >= 3
    assert any(trial["source"] not in ("start", "planner") for trial in first["trials"])
    for document in (first, second):
        del document["overhead_s"]  # time that it really took
    assert first == second


def test_thinking_costs_simulated_time(quick: dict[str, Any]) -> None:
    """The longer a thought takes, the more steps are taken under the incumbent meanwhile."""
    steps = []
    for thinking_s in (0.0, 1.0):
        quick["search"] = SearchOptions(sampler="random", most_measurements=3, thinking_s=thinking_s)
        steps.append(tune(TuneOptions(**quick), lambda done, search: None)["steps"])
    assert steps[1] > steps[0] + 100  # three thoughts of 1 s and steps of 7 ms or more


def test_ctrl_c_leaves_what_was_found(quick: dict[str, Any]) -> None:
    def on_step(done: int, search: Search | None) -> None:
        if search is not None and search.measurements == 1:
            raise KeyboardInterrupt

    document = tune(TuneOptions(**quick), on_step)
    assert document["interrupted"]
    assert document["measurements"] == 1
    assert document["best"]["knobs"] == document["start"]["knobs"]
    assert "Interrupted: this is what was found so far." in shown(document)


def test_after_ctrl_c_it_goes_on(quick: dict[str, Any]) -> None:
    def interrupt(done: int, search: Search | None) -> None:
        if search is not None and search.measurements == 2:
            raise KeyboardInterrupt

    def watch(done: int, search: Search | None) -> None:
        return None

    said: list[str] = []
    with open_store("sqlite://", environment={"HOME": "/nowhere"}) as store:
        first = tune(TuneOptions(**quick), interrupt, store)
        (run,) = store.runs()
        assert (first["interrupted"], run.state) == (True, RunState.LOST)
        told = store.measurements(store.trials(run.run_id)[0].trial_id)

        second = tune(TuneOptions(**quick, steps=80), watch, store, said.append)
        assert second["origin"] == f"Goes on with run {run.run_id[:8]}: 2 measurements are kept; --fresh begins anew."
        assert said[1:] == [second["origin"]]
        assert second["origin"] in shown(second)
        assert [one.run_id for one in store.runs()] == [run.run_id]
        assert [note["kind"] for note in second["decisions"]].count("resume") == 1
        assert store.measurements(store.trials(run.run_id)[0].trial_id)[: len(told)] == told

        third = tune(TuneOptions(**quick, steps=40, fresh=True), watch, store)
        assert third["origin"] is None
        assert len(store.runs()) == 2


def of_ranks(quick: dict[str, Any], tmp_path: Path, ranks: int) -> TuneOptions:
    """A rig of ranks that take as long for their rows as one takes for all."""
    rig = tmp_path / f"{ranks}.toml"
    times = {"d2h_ms": ranks, "host_ms": 120 * ranks, "h2d_ms": ranks}
    rig.write_text(rig_text("ranks", forward_ms=10, backward_ms=20, **times, scale=1))
    return TuneOptions(**{**quick, "rig": str(rig)}, ranks=ranks, micro_batch=2 // ranks, quality="loose")


def test_two_ranks_find_what_one_finds(quick: dict[str, Any], tmp_path: Path, every_fault: None) -> None:
    quick["search"] = SearchOptions(sampler="random", most_measurements=8, thinking_s=THINKING_S)
    one, two = (tune(of_ranks(quick, tmp_path, ranks), lambda done, search: None) for ranks in (1, 2))
    for name in ("predicted_step_ms", "step_ms"):
        assert two["start"][name] == pytest.approx(one["start"][name], rel=0.001)
    # Their batches are others, so that the quality may allow them other windows.
    assert two["best"]["step_ms"] == pytest.approx(one["best"]["step_ms"], rel=0.05)
    assert two["gain"]["share"] == pytest.approx(one["gain"]["share"], abs=0.05)
    assert two["best"]["step_ms"] < 0.95 * two["start"]["step_ms"]
    assert "2 ranks, weights sharded" in shown(two)


def test_ctrl_c_ends_all_ranks(quick: dict[str, Any], tmp_path: Path, every_fault: None) -> None:
    def on_step(done: int, search: Search | None) -> None:
        if search is not None and search.measurements == 1:
            raise KeyboardInterrupt

    document = tune(of_ranks(quick, tmp_path, 2), on_step)
    assert (document["interrupted"], document["measurements"]) == (True, 1)
    assert multiprocessing.active_children() == []


def test_it_begins_from_a_preset(quick: dict[str, Any]) -> None:
    evidence = Evidence(
        step_ms=8.0, baseline="start", baseline_step_ms=10.0, measurements=9, steps=200, measured_unix_s=1.8e9
    )
    better = Setting(topk_ratio=0.2, update_interval=2, apply_lag=2, select_interval=16)
    with open_store("sqlite://", environment={"HOME": "/nowhere"}) as store:
        tune(TuneOptions(**quick, steps=20), lambda done, search: None, store)
        (run,) = store.runs()
        hardware = Hardware(hw_id=run.key.hw_id, rig="quick")
        preset = Preset(
            key=run.key, knobs=better.knobs(), evidence=evidence, model=Model(model_id=run.key.model_id),
            hardware=hardware, usable_cores=run.usable_cores,
        )  # fmt: skip
        name = store.save_preset(preset).name
        document = tune(TuneOptions(**quick, steps=120), lambda done, search: None, store)
    origin = f"Begins from preset {name}, measured for this model on this hardware, where it saved 20.0%."
    assert document["origin"] == origin
    assert document["start"]["knobs"] == better.knobs()
    assert document["start"]["step_ms"] is not None


def test_ctrl_c_before_it_began(mini_model: Path, mini_rig: Path) -> None:
    def on_step(done: int, search: Search | None) -> None:
        raise KeyboardInterrupt

    document = tune(options(mini_model, mini_rig), on_step)
    assert document["best"] is None
    assert "The search had not begun." in shown(document)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--quality best", "--quality 'best': allowed are exact, published, loose"),
        ("--steps 0", "--steps 0: allowed is an integer >= 1"),
        ("--rig moon", "--rig 'moon': allowed are"),
        ("--rig none", "--rig 'none': allowed only with a GPU"),
        ("--ranks 0", "--ranks 0: allowed is an integer >= 1"),
        ("--ranks 2 --real-time", "--ranks 2: allowed only on a rig in simulated time"),
        ("--model huge", "--model 'huge'"),
        ("--sampler nsga", "--sampler 'nsga': allowed are gp, tpe, random"),
        ("--measurements 0", "--measurements 0: allowed is an integer >= 1"),
        ("--json /nowhere/x.json", "--json '/nowhere/x.json'"),
        ("--html /nowhere/x.html", "--html '/nowhere/x.html'"),
        ("--html -", "--html '-'"),
        ("--json /tmp/both --html /tmp/both", "--html '/tmp/both': is the file of --json too"),
        ("--config /nowhere.json", "ds_config is '/nowhere.json'"),
        ("-- python train.py", "command 'python train.py': allowed with --restartable, which runs it again with other"),
        ("--restartable", "--restartable: allowed with a command (zftune tune --restartable -- CMD ...)"),
        ("--restartable --", "command '': nothing stands behind --"),
        ("--restartable --steps 9 -- x", "--steps '9': allowed only without a command, it is of the built-in workload"),
        ("--trial-steps 9", "--trial-steps '9': allowed only with --restartable"),
        ("--restartable --trial-steps 1 -- x", "--trial-steps 1: allowed is a number >= 4"),
    ],
)
def test_bad_input_is_refused_in_a_sentence(
    arguments: str, message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import torch

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setenv("ZFTUNE_DB", "sqlite://")
    monkeypatch.setattr(sys, "argv", ["zftune", "tune", *arguments.split()])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"zftune: {message}")


def test_a_command_is_run_again_and_again_where_that_is_allowed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: list[Any] = []
    document: dict[str, Any] = {
        "workload": {"model": None}, "device": "cpu", "rig": None, "budget": None, "trials": [], "decisions": [],
        "best": None, "gain": None, "cost": None, "stopped": None, "interrupted": True, "notices": [], "steps": 0,
        "ds_config": {"zero_optimization": {"stage": 2}, "notes": ["Upstream waits."]},
    }  # fmt: skip

    def run_restarting(argv: Any, options: RestartOptions, on_progress: Any, store: Any) -> dict[str, Any]:
        asked.extend((argv, options))
        on_progress("Runs the command.", None)
        return document

    monkeypatch.setattr("zftune.tuner.restarting.command.run_restarting", run_restarting)
    monkeypatch.setenv("ZFTUNE_DB", "sqlite://")
    given = ["--restartable", "--seed", "3", "--fresh", "--trial-steps", "8", "--json", str(tmp_path / "x.json")]
    monkeypatch.setattr(sys, "argv", ["zftune", "tune", *given, "--", "python", "train.py", "--steps", "9"])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == 130
    assert asked == [["python", "train.py", "--steps", "9"], RestartOptions(seed=3, steps=8, fresh=True)]
    assert json.loads((tmp_path / "x.json").read_text()) == document
    out = capsys.readouterr().out
    assert "Runs the command." in out
    assert '"stage": 2' in out
    assert "Upstream waits." in out


def test_quality_follows_the_config(tmp_path: Path) -> None:
    from zftune.tuner.run import _start

    offload = {"zero_optimization": {"offload_optimizer": {"device": "cpu"}}}
    plain, zenflow = tmp_path / "plain.json", tmp_path / "zenflow.json"
    plain.write_text(json.dumps(offload))
    section = {"zenflow": {"topk_ratio": 0.05, "update_interval": 8}}
    zenflow.write_text(json.dumps({"zero_optimization": {**offload["zero_optimization"], **section}}))
    assert _start(TuneOptions())[0] == "published"
    assert _start(TuneOptions(config=str(plain)))[0] == "exact"
    quality, config, sectioned = _start(TuneOptions(config=str(zenflow)))
    assert (quality, config.update_interval, sectioned) == ("published", 8, True)
    assert _start(TuneOptions(config=str(plain), quality="loose"))[0] == "loose"
