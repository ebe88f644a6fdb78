"""Presets under DeepSpeed's engine: one that is exactly for the training is taken, one by name whatever it is for."""

from __future__ import annotations

import json
import sqlite3
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.zftune.integrations.ds_running import ADAMW, ZENFLOW, ds_config, run_cases
from tests.support.zftune.integrations.ds_worker import make_model
from tests.support.zftune.store.examples import KNOBS, PRESET
from zenflow import ZenFlowConfig
from zftune.errors import BadInputError
from zftune.integrations.deepspeed import choosing
from zftune.integrations.deepspeed.choosing import Chosen, Training, choose, instead_of
from zftune.integrations.deepspeed.section import Section
from zftune.store import open_store
from zftune.store.preset_file import document_of
from zftune.store.types import PresetState
from zftune.telemetry.fingerprint import hardware, hw_id

OWN = (ZENFLOW["topk_ratio"], ZENFLOW["update_interval"])
PROVEN, THEIRS = (0.4, 2), (0.3, 3)
PUBLISHED, LOOSE = (0.1, 4), (0.1, 8)


def _config(**section: Any) -> Any:
    config = ds_config("bf16", zenflow=ZENFLOW, optimizer=ADAMW)
    return {**config, "zftune": section} if section else config


def _plain(quality: str, stage: int) -> Any:
    return {**ds_config("bf16", stage=stage, optimizer=ADAMW), "zftune": {"quality": quality}}


CASES = {
    "nothing said": {"config": _config()},
    "best": {"config": _config(preset="best")},
    "by name": {"config": _config(preset="theirs")},
    "none": {"config": _config(preset="none")},
    "none instead": {"config": _config(preset="theirs"), "enable": {"preset": "none"}},
    "from a file": {"config": _config(preset="FILE")},
    "enable": {"config": _config(preset="theirs"), "enable": {"preset": "best"}},
    "another stage": {"config": {**_config(), "zero_optimization": {**_config()["zero_optimization"], "stage": 1}}},
    "another batch": {"config": {**_config(), "train_micro_batch_size_per_gpu": 2}},
    "whole batch": {"config": {"train_batch_size": 4, **_config()}},
    "quality exact": {"config": _config(quality="exact", preset="best")},
    "late in exact": {"config": _config(quality="exact", preset="theirs")},
    "plain, published": {"config": {**_plain("published", 1), "train_micro_batch_size_per_gpu": 2}},
    "plain, loose": {"config": _plain("loose", 1)},
    "plain, with a preset": {"config": _plain("published", 2)},
    "plain, exact": {"config": _plain("exact", 2)},
    "misspelt": {"config": _config(preset="thiers")},
    "tuned online": {"config": {**_plain("loose", 1), "zftune": {"quality": "loose", "online": True}}, "steps": 24},
}


TRAINING = Training(
    module=make_model("plain").to(torch.bfloat16),
    backend="zenflow",
    stage=2,
    dtype="bfloat16",
    micro_batch=4,
    world_size=1,
    quality="published",
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("presets")


@pytest.fixture(scope="module")
def seen(folder: Path) -> dict[str, Any]:
    proven, theirs = (
        replace(PRESET, name=name, knobs={**KNOBS, "topk_ratio": k, "update_interval": interval, "host_threads": None})
        for name, (k, interval) in (("proven", PROVEN), ("theirs", THEIRS))
    )
    key = replace(TRAINING.key(), sequence=2048)
    with open_store(str(folder / "zftune.db")) as store:
        store.save_preset(
            replace(
                proven,
                key=key,
                model=replace(proven.model, model_id=key.model_id),
                hardware=replace(proven.hardware, hw_id=key.hw_id),
            )
        )
        store.save_preset(theirs)
    file = folder / "theirs.json"
    file.write_text(json.dumps(document_of(theirs)))
    CASES["from a file"]["config"]["zftune"]["preset"] = str(file)
    return run_cases(folder, {name: {"steps": 2, **case, "ours": True} for name, case in CASES.items()})[0]


@pytest.mark.parametrize(
    ("name", "knobs"),
    [
        ("nothing said", PROVEN),
        ("best", PROVEN),
        ("by name", THEIRS),
        ("none", OWN),
        ("none instead", OWN),
        ("from a file", THEIRS),
        ("enable", PROVEN),
        ("another stage", PROVEN),
        ("another batch", OWN),
        ("whole batch", PROVEN),
        ("plain, published", PUBLISHED),
        ("plain, loose", LOOSE),
        ("plain, with a preset", PROVEN),
        ("plain, exact", (0.0, 1)),
    ],
)
def test_what_it_trains_with(seen: dict[str, Any], name: str, knobs: tuple[float, int]) -> None:
    assert "error" not in seen[name], seen[name]["error"]
    assert (seen[name]["topk_ratio"], seen[name]["update_interval"]) == knobs


def test_quality_exact_never_trains_late(seen: dict[str, Any]) -> None:
    assert seen["quality exact"]["update_interval"] == 1
    assert 'under which updates come late; quality "exact" waits for every one' in seen["late in exact"]["error"]


def test_a_misspelt_name_is_a_sentence_with_the_near_ones(seen: dict[str, Any]) -> None:
    assert seen["misspelt"]["error"] == "BadInputError: preset 'thiers' is not in the store; there are theirs"


def test_what_is_found_online_is_kept_where_the_next_training_looks(seen: dict[str, Any], folder: Path) -> None:
    assert "error" not in seen["tuned online"], seen["tuned online"]["error"]
    with open_store(str(folder / "zftune.db")) as store:
        assert [run.key for run in store.runs()] == [replace(TRAINING, stage=1, quality="loose").key()]


@pytest.fixture
def broken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A store that opens, and whose presets cannot be read."""
    path = tmp_path / "zftune.db"
    open_store(str(path)).close()
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("ALTER TABLE preset RENAME COLUMN knobs TO other")
    monkeypatch.setenv("ZFTUNE_DB", str(path))


@pytest.mark.smoke
@pytest.mark.parametrize("preset", [None, "best", "none"])
def test_a_run_that_begins_anew_takes_no_preset_but_the_one_that_it_asks_for(
    preset: str | None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("ZFTUNE_DB", str(tmp_path / "zftune.db"))
    here = hw_id(hardware())
    with open_store() as store:
        key = replace(TRAINING.key(), hw_id=here, sequence=2048)
        model, machine = replace(PRESET.model, model_id=key.model_id), replace(PRESET.hardware, hw_id=here)
        store.save_preset(replace(PRESET, key=key, model=model, hardware=machine))
    assert bool(choose(TRAINING, Section(preset=preset)).knobs) == (preset != "none")
    monkeypatch.setenv("ZFTUNE_FRESH", "1")
    assert bool(choose(TRAINING, Section(preset=preset)).knobs) == (preset == "best")


@pytest.mark.smoke
@pytest.mark.usefixtures("broken")
@pytest.mark.parametrize("preset", [None, "best"])
def test_a_store_that_cannot_be_read_ends_no_training(preset: str | None) -> None:
    chosen = choose(TRAINING, Section(preset=preset))
    assert chosen.knobs == {}
    assert chosen.sentence.startswith("$ZFTUNE_DB could not be read (no such column: preset.knobs)")
    assert chosen.sentence.endswith(", so the settings are the ds_config's")


@pytest.mark.smoke
@pytest.mark.usefixtures("broken")
def test_it_refuses_a_preset_by_name_on_all_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first rank reads the store, and the others wait for its word."""
    distributed, sent = torch.distributed, []

    def broadcast(told: list[Any], src: int) -> None:
        assert src == 0
        sent.append(told[0])

    monkeypatch.setattr("zftune.integrations.deepspeed.choosing.hosts_of_ranks", lambda: ["a", "a"])
    for name, value in (("is_initialized", True), ("get_world_size", 2), ("get_rank", 0)):
        monkeypatch.setattr(distributed, name, lambda value=value: value)
    monkeypatch.setattr(distributed, "broadcast_object_list", broadcast)
    with pytest.raises(BadInputError, match=r"preset 'theirs': .* could not be read") as refused:
        choose(TRAINING, Section(preset="theirs"))
    assert sent == [str(refused.value)]


@pytest.mark.smoke
@pytest.mark.parametrize(
    ("given", "asked", "told"),
    [
        (ZenFlowConfig(topk_ratio=0.1, update_interval=8), False, "topk_ratio 0.1, update_interval 8"),
        (ZenFlowConfig(topk_ratio=0.1, update_interval=8), True, ""),
        (ZenFlowConfig(topk_ratio=0.4, update_interval=2), False, ""),
        (None, False, ""),
    ],
)
def test_a_preset_that_nobody_asked_for_is_told_with_what_it_replaces(
    given: ZenFlowConfig | None, asked: bool, told: str
) -> None:
    config = ZenFlowConfig(topk_ratio=0.4, update_interval=2)
    said = instead_of(given, config, Chosen({"topk_ratio": 0.4}, "of a preset"), asked=asked)
    whole = f", instead of the ds_config's {told} (which --preset none keeps)"
    assert said == (whole if told else "")


@pytest.mark.smoke
@pytest.mark.parametrize(
    ("differs", "state", "said"),
    [
        ({"quality": "exact"}, "active", "is of quality published instead of exact"),
        ({"stage": 3, "world_size": 2}, "active", "is of ranks 1 instead of 2"),
        (
            {"model_id": 16 * "f"},
            "active",
            "no preset is for this model on this hardware yet (zftune run --online makes one)",
        ),
        ({}, "withdrawn", "the presets for this model on this hardware are withdrawn (zftune run --online makes one)"),
    ],
)
def test_that_no_preset_is_exactly_for_a_training_has_its_reason(
    differs: dict[str, Any], state: str, said: str
) -> None:
    preset = replace(PRESET, state=PresetState(state))
    assert (preset.key.quality, preset.key.world_size) == ("published", 1)
    assert choosing._why_none([preset], replace(PRESET.key, **differs)).endswith(said)
