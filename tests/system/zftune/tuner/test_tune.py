"""`zftune tune` on the built-in workload's loop, with a model and a rig that are small enough."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.support.zftune.fixtures import rig_text
from tests.support.zftune.tuner.tuning import THINKING_S, interrupt_after, quick, shown, watch
from zenflow import ZenFlowConfig
from zftune.builtin import TuneOptions, _task_of, _tuner, start_of, tune
from zftune.cli import main as cli
from zftune.cli.tune import ProgressLine
from zftune.profile.measure import Training
from zftune.store import open_store
from zftune.store.store import Store
from zftune.store.types import Evidence, Hardware, Model, Preset, RunState
from zftune.tuner.messages import sentence
from zftune.tuner.search import SearchOptions
from zftune.tuner.setup import PlannerForecast
from zftune.tuner.space import Setting, Space
from zftune.tuner.tuner import Tuner

__all__ = ["quick"]

EXAMPLES = Path(__file__).parents[4] / "examples"


def options(mini_model: Path, mini_rig: Path, **more: Any) -> TuneOptions:
    search = SearchOptions(sampler="random", most_measurements=24, thinking_s=THINKING_S)
    given = {"model": str(mini_model), "rig": str(mini_rig), "sequence": 16, "search": search, **more}
    return TuneOptions(**given)


@pytest.mark.smoke
def test_some_steps_of_a_search(mini_model: Path, mini_rig: Path, store: Store) -> None:
    seen: list[int] = []
    document = tune(options(mini_model, mini_rig, steps=160), lambda done, tuner: seen.append(done), store)
    (run,) = store.runs()
    assert run.state is RunState.LOST  # its search is not over
    assert store.trials(run.run_id)[0].source == "start"
    reasons = [sentence(decision) for decision in store.decisions(run.run_id)]
    assert reasons == [note["reason"] for note in document["decisions"]]
    assert seen == list(range(1, 161))
    assert document["schema"] == "zftune.tune/1"
    assert document["run"]["run_id"] == run.run_id
    assert document["steps"] == 160
    assert document["stopped"] == "All 160 steps are done."
    assert not document["interrupted"]
    assert document["trials"][0]["step_ms"] > 80 - 1e-6  # the rig's compute
    assert document["decisions"][0]["kind"] == "start"
    assert {"planner"} <= {trial["source"] for trial in document["trials"]}
    json.dumps(document, allow_nan=False)
    text = shown(document)
    assert "rig mini): times do not come from a GPU" in text
    assert (document["workload"]["model"], document["workload"]["ranks"]) == ("mini", "1 rank")
    assert document["workload"]["learning_rate"] == document["budget"]["movement_learning_rate"] == 2e-6
    assert "All 160 steps are done." in text


def test_after_drift_the_planner_is_asked_again(
    quick: dict[str, Any], store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps take longer from some step on, and the device's time without its waits is counted: that is a change."""
    asked: list[int] = []
    planned = PlannerForecast.planned

    def counting(self: PlannerForecast, space: Space, *, least_ratio: float) -> list[Setting]:
        asked.append(1)
        return planned(self, space, least_ratio=least_ratio)

    monkeypatch.setattr(PlannerForecast, "planned", counting)

    def on_step(done: int, tuner: Tuner) -> None:
        if tuner.search is not None and tuner.search.known.pace is not None:  # it is known how fast the machine is
            tuner._optimizer.device.clock.sleep(0.02)
        if len(asked) == 2:
            raise KeyboardInterrupt

    document = tune(TuneOptions(**quick, steps=5000), on_step, store)
    assert "reopen" in [note["kind"] for note in document["decisions"]]
    assert document["interrupted"]  # else nobody has asked again


def test_a_search_in_simulated_time_repeats_to_the_last_digit(quick: dict[str, Any]) -> None:
    quick["search"] = SearchOptions(sampler="random", most_measurements=9, thinking_s=0.05)
    documents = []
    for _ in range(2):
        with open_store("sqlite://", environment={"HOME": "/nowhere"}) as store:
            documents.append(tune(TuneOptions(**quick, steps=280), watch, store))
    first, second = documents
    assert first["measurements"] >= 3
    assert any(trial["source"] not in ("start", "planner") for trial in first["trials"])
    assert figures(first) == figures(second)


def figures(document: dict[str, Any]) -> dict[str, Any]:
    """What was found, without the wall clock."""
    whens = {name: [{**one, "at_unix_s": None} for one in document[name]] for name in ("decisions", "history")}
    return {**document, "run": None, **whens}


def test_thinking_costs_simulated_time(quick: dict[str, Any], store: Store) -> None:
    """The longer a thought takes, the more steps are taken under the incumbent meanwhile."""
    steps = []
    for thinking_s in (0.0, 0.4):
        quick["search"] = SearchOptions(sampler="random", most_measurements=2, thinking_s=thinking_s)
        steps.append(tune(TuneOptions(**quick, fresh=True), watch, store)["steps"])
    assert steps[1] > steps[0] + 25  # two thoughts of 0.4 s and steps of 7 ms or more


@pytest.mark.smoke
def test_after_ctrl_c_it_goes_on(quick: dict[str, Any], store: Store) -> None:
    first = tune(TuneOptions(**quick), interrupt_after(2), store)
    (run,) = store.runs()
    assert (first["interrupted"], first["measurements"], run.state) == (True, 2, RunState.LOST)
    assert "It ended before its search did: this was found until then." in shown(first)
    told = store.measurements(store.trials(run.run_id)[0].trial_id)

    second = tune(TuneOptions(**quick, steps=100), watch, store)
    notes = second["decisions"]
    (at,) = (at for at, note in enumerate(notes) if note["kind"] == "resume")
    assert notes[at]["details"]["measurements"] == 2
    assert "--fresh begins a new search" in " ".join(shown(second).split())
    assert notes[at]["at_s"] < notes[-1]["at_s"]
    assert [one.run_id for one in store.runs()] == [run.run_id]
    assert [note["kind"] for note in second["decisions"]].count("resume") == 1
    assert store.measurements(store.trials(run.run_id)[0].trial_id)[: len(told)] == told

    third = tune(TuneOptions(**quick, steps=40, fresh=True), watch, store)
    assert not any("Goes on" in notice for notice in third["notices"])
    assert len(store.runs()) == 2


@pytest.mark.smoke
def test_it_begins_from_a_preset(quick: dict[str, Any], store: Store) -> None:
    evidence = Evidence(
        step_ms=8.0,
        baseline="start",
        baseline_step_ms=10.0,
        gain_error=0.02,
        measurements=9,
        steps=200,
        measured_unix_s=1.8e9,
    )
    better = Setting(topk_ratio=0.1, update_interval=2, apply_lag=2, select_interval=16)
    tune(TuneOptions(**quick, steps=120), watch, store)
    (run,) = store.runs()
    hardware = Hardware(hw_id=run.key.hw_id, rig="quick")
    preset = Preset(
        key=run.key, knobs=better.knobs(), evidence=evidence, model=Model(model_id=run.key.model_id),
        hardware=hardware, usable_cores=run.usable_cores,
    )  # fmt: skip
    name = store.save_preset(preset).name
    document = tune(TuneOptions(**quick, steps=320), watch, store)
    origin = f"Begins from preset {name}, measured for this model on this hardware, where it saved 20 +/- 2%."
    assert origin in [note["reason"] for note in document["decisions"]]
    assert document["start"]["knobs"] == better.knobs()
    assert document["start"]["step_ms"] is not None


@pytest.mark.smoke
def test_ctrl_c_before_it_began(mini_model: Path, mini_rig: Path, store: Store) -> None:
    def on_step(done: int, tuner: Tuner) -> None:
        raise KeyboardInterrupt

    document = tune(options(mini_model, mini_rig), on_step, store)
    assert document["best"] is None
    assert document["interrupted"]
    assert "zftune tuned nothing: the training took 1 step and ended before a first measurement" in shown(document)


@pytest.mark.smoke
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--quality best", "--quality is 'best'; it must be exact, published or loose"),
        ("--steps 0", "--steps is 0; it must be an integer >= 1"),
        ("--rig moon", "--rig is 'moon'; it must be"),
        ("--rig none", "--rig 'none': allowed only with a GPU"),
        ("--ranks 0", "--ranks is 0; it must be an integer >= 1"),
        ("--ranks 2 --real-time", "--ranks 2: allowed only on a rig in simulated time"),
        ("--model huge", "--model is 'huge'"),
        ("--sampler nsga", "--sampler is 'nsga'; it must be belief, gp, tpe or random"),
        ("--measurements 4", "--measurements is 4; it must be an integer >= 5"),
        ("--json /nowhere/x.json", "--json '/nowhere/x.json'"),
        ("--html /nowhere/x.html", "--html '/nowhere/x.html'"),
        ("--html -", "--html '-'"),
        ("--json /tmp/both --html /tmp/both", "--html '/tmp/both': is the file of --json too"),
        ("--config /nowhere.json", "ds_config '/nowhere.json' cannot be read"),
    ],
)
def test_bad_input_is_refused_in_a_sentence(
    arguments: str, message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import torch

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setenv("ZFTUNE_DB", "sqlite://")
    monkeypatch.chdir(EXAMPLES)
    monkeypatch.setattr(sys, "argv", ["zftune", "tune", *arguments.split()])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"zftune: {message}")


@pytest.mark.smoke
def test_quality_follows_the_config(tmp_path: Path) -> None:
    offload = {"zero_optimization": {"offload_optimizer": {"device": "cpu"}}}
    plain, zenflow = tmp_path / "plain.json", tmp_path / "zenflow.json"
    plain.write_text(json.dumps(offload))
    section = {"zenflow": {"topk_ratio": 0.05, "update_interval": 8}}
    zenflow.write_text(json.dumps({"zero_optimization": {**offload["zero_optimization"], **section}}))
    assert start_of(TuneOptions())[1] == "published"
    assert start_of(TuneOptions(config=str(plain)))[1] == "exact"
    config, quality = start_of(TuneOptions(config=str(zenflow)))
    assert (quality, config.update_interval) == ("published", 8)
    assert start_of(TuneOptions(config=str(plain), quality="loose"))[1] == "loose"


def test_the_line_of_progress(quick: dict[str, Any], store: Store) -> None:
    """What is tried, and the best so far."""
    line, lines = ProgressLine(), list[str]()

    def on_step(done: int, tuner: Tuner) -> None:
        lines.append(line.text(done, tuner))
        if tuner.search is not None and tuner.search.measurements == 3:
            raise KeyboardInterrupt

    tune(TuneOptions(**quick, steps=5000), on_step, store)
    assert lines[0] == "step 1: warming up"
    tried = [one for one in lines if "; trying " in one]
    assert tried
    line_of = re.compile(r"step \d+, [123] of at most 24 measurements; trying .*; best so far [\d.]+ ms")
    assert all(line_of.match(one) for one in tried)


LATE = Setting(topk_ratio=0.05, update_interval=6, apply_lag=6)
"""The rig is faster with it than with the script's own window of 2."""


class Trainings:
    """One after the other, of the same script and store, each from its first step on, at a learning rate of its own."""

    def __init__(self, quick: dict[str, Any], store: Store) -> None:
        timeline = {"forward_ms": 3, "backward_ms": 3, "d2h_ms": 1, "host_ms": 26, "h2d_ms": 1, "scale": 1}
        Path(quick["rig"]).write_text(rig_text("quick", **timeline))
        search = SearchOptions(sampler="random", thinking_s=0.0)
        self.options, self.store = TuneOptions(**{**quick, "search": search}), store
        self.config = ZenFlowConfig(topk_ratio=0.05, update_interval=2, full_warm_up_rounds=0)
        self.task, _ = _task_of(self.options, self.config)

    def train(self, learning_rate: float, until: Callable[[Tuner], bool]) -> tuple[Tuner, list[Setting]]:
        """Tune one until something holds; the settings that it had, in order."""
        had: list[Setting] = []
        with Training(replace(self.task, learning_rate=learning_rate), self.config) as training:
            tuner = _tuner(training, self.options, "published", self.store)
            while not until(tuner):
                assert len(had) < 300
                tuner.log_loss(training.step())
                had.append(Setting.of(training.optimizer.config))
            tuner.close()
        return tuner, had


def test_what_a_low_learning_rate_allowed_does_not_run_at_a_higher_one(
    quick: dict[str, Any], store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(PlannerForecast, "planned", lambda *_, **__: [LATE])
    trainings = Trainings(quick, store)
    own = Setting.of(trainings.config)
    first, _ = trainings.train(2e-6, lambda tuner: tuner.gain > 0)
    assert first.incumbent == LATE

    tuner, had = trainings.train(1e-3, lambda tuner: tuner.live is not None and tuner.live.steady_steps > 4)
    assert max(one.mean_staleness_steps for one in had) <= own.mean_staleness_steps
    assert tuner.search is not None
    moved = next(note for note in tuner.search.notes if note.kind == "movement")
    assert moved.details["late"] == LATE.differences(tuner.incumbent)
    (run,) = store.runs()
    assert [one.kind for one in store.decisions(run.run_id)].count("movement") == 1
