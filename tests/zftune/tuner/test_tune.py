"""`zftune tune` on the built-in workload's loop, with a model and a rig that are small enough."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from zftune.errors import BadInputError
from zftune.store import RunState, open_store
from zftune.tuner.command import tune as command
from zftune.tuner.run import TuneOptions, tune
from zftune.tuner.screen import render
from zftune.tuner.search import Search, SearchOptions


def options(mini_model: Path, mini_rig: Path, **more: Any) -> TuneOptions:
    search = SearchOptions(sampler="random", most_measurements=24)
    given = {"model": str(mini_model), "rig": str(mini_rig), "sequence": 16, "search": search, **more}
    return TuneOptions(**given)


def shown(document: dict[str, Any]) -> str:
    out = io.StringIO()
    Console(width=120, file=out).print(render(document))
    return out.getvalue()


def test_some_steps_of_a_search(mini_model: Path, mini_rig: Path) -> None:
    seen: list[int] = []
    with open_store("sqlite://", environment={"HOME": "/nowhere"}) as store:
        document = tune(options(mini_model, mini_rig, steps=50), lambda done, search: seen.append(done), store)
        (run,) = store.runs()
        assert run.state is RunState.FINISHED
        assert store.trials(run.run_id)[0].source == "start"
        reasons = [decision.reason for decision in store.decisions(run.run_id)]
    assert reasons == [note["reason"] for note in document["decisions"]]
    assert seen == list(range(1, 51))
    assert document["schema"] == "zftune.tune/1"
    assert document["steps"] == 50
    assert document["stopped"] == "All 50 steps are done."
    assert document["coverage"].startswith("measured on the live model")
    assert document["trials"][0]["step_ms"] > 80  # the rig's compute
    assert document["decisions"][0]["kind"] == "start"
    assert {"planner"} <= {trial["source"] for trial in document["trials"]}
    json.dumps(document, allow_nan=False)
    text = shown(document)
    assert "rig mini: times are of an emulated accelerator" in text
    assert "All 50 steps are done." in text


def test_ctrl_c_leaves_what_was_found(mini_model: Path, mini_rig: Path) -> None:
    def on_step(done: int, search: Search | None) -> None:
        if search is not None and search.measurements == 1:
            raise KeyboardInterrupt

    document = tune(options(mini_model, mini_rig), on_step)
    assert document["interrupted"]
    assert document["measurements"] == 1
    assert document["best"]["knobs"] == document["start"]["knobs"]
    assert "Interrupted: this is what was found so far." in shown(document)


def test_ctrl_c_before_it_began(mini_model: Path, mini_rig: Path) -> None:
    def on_step(done: int, search: Search | None) -> None:
        raise KeyboardInterrupt

    document = tune(options(mini_model, mini_rig), on_step)
    assert document["best"] is None
    assert "The search had not begun." in shown(document)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"quality": "best"}, "--quality 'best': allowed are exact, published, loose"),
        ({"steps": 0}, "--steps 0: allowed is an integer >= 1"),
        ({"rig": "moon"}, "--rig 'moon': allowed are"),
        ({"rig": "none"}, "--rig 'none': allowed only with a GPU"),
        ({"model": "huge"}, "--model 'huge'"),
        ({"sampler": "nsga"}, "--sampler 'nsga': allowed are gp, tpe, random"),
        ({"json_path": "/nowhere/x.json"}, "--json '/nowhere/x.json'"),
        ({"config": "/nowhere.json"}, "ds_config is '/nowhere.json'"),
    ],
)
def test_bad_input_is_refused_in_a_sentence(
    given: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setenv("ZFTUNE_DB", "sqlite://")
    with pytest.raises(BadInputError, match=message.replace("(", r"\(").replace(".", r"\.")):
        command(**given)


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
