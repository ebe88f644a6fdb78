"""Presets under DeepSpeed's engine: one that is exactly for the training is taken, one by name whatever it is for."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.zftune.integrations.ds_running import ADAMW, ZENFLOW, ds_config, run_cases
from tests.zftune.integrations.ds_worker import make_model
from tests.zftune.store.examples import KNOBS, PRESET
from zftune.integrations.deepspeed.choosing import Training
from zftune.store import open_store
from zftune.store.preset_file import document_of

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
    """What each training ran with."""
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
    assert seen["misspelt"]["error"] == "BadInputError: preset 'thiers': is not in the store; there are theirs"


def test_what_is_found_online_is_kept_where_the_next_training_looks(seen: dict[str, Any], folder: Path) -> None:
    assert "error" not in seen["tuned online"], seen["tuned online"]["error"]
    with open_store(str(folder / "zftune.db")) as store:
        assert [run.key for run in store.runs()] == [replace(TRAINING, stage=1, quality="loose").key()]
