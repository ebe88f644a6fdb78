"""ZeRO stages 1 and 2 on several ranks: whole weights, equal on all, and those of one rank with the whole batch."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.support.once import once
from tests.support.tiers import fast
from tests.support.zftune.integrations.ds_running import ADAMW, ZENFLOW, ds_config, run_cases

ALL: dict[str, dict[str, Any]] = {
    "exact": {"config": ds_config("fp32", optimizer=ADAMW), "ours": True, "steps": 10},
    "zenflow": {"config": ds_config("fp32", zenflow=ZENFLOW, optimizer=ADAMW), "ours": True, "steps": 10},
    "accumulated": {
        "config": ds_config("fp32", optimizer=ADAMW, gradient_accumulation_steps=2),
        "ours": True,
        "passes": 2,
        "steps": 6,
    },
    "bf16": {"config": ds_config("bf16", zenflow=ZENFLOW, optimizer=ADAMW), "ours": True, "steps": 10},
    "fp16": {
        "config": {
            **ds_config("fp16", optimizer=ADAMW),
            "fp16": {"enabled": True, "initial_scale_power": 17, "hysteresis": 1},
        },
        "ours": True,
        "steps": 10,
    },
    "odd": {"config": ds_config("fp32", zenflow=ZENFLOW, optimizer=ADAMW), "ours": True, "model": "odd", "steps": 8},
    "stage 1": {"config": ds_config(stage=1, optimizer=ADAMW), "ours": True, "steps": 4},
    "reduced in fp32": {
        "config": ds_config("bf16", optimizer=ADAMW, communication_data_type="fp32"),
        "ours": True,
        "steps": 10,
    },
    "visited": {"config": ds_config(optimizer=ADAMW), "ours": True, "model": "odd", "visit": 3, "steps": 6},
    "visited, late": {
        "config": ds_config(zenflow=ZENFLOW, optimizer=ADAMW),
        "ours": True,
        "model": "odd",
        "visit": 3,
        "steps": 8,
    },
    "without rows": {"config": ds_config(optimizer=ADAMW), "ours": True, "model": "scaled", "steps": 3},
    "online": {"config": ds_config(optimizer=ADAMW, zftune={"online": True}), "ours": True},
}
CASES = fast({name: ALL[name] for name in ("exact", "fp16", "stage 1", "visited, late")}, all_of=ALL)
ROUNDED = ("bf16", "fp16", "reduced in fp32")
VISITED = fast(("visited, late",), all_of=("visited", "visited, late"))


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What the two ranks saw, each with half of every batch."""
    halves = {
        name: {**case, "config": {**case["config"], "train_micro_batch_size_per_gpu": 2}}
        for name, case in CASES.items()
    }
    return once(tmp_path_factory, "two-ranks", lambda folder: run_cases(folder, halves, ranks=2))


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What one rank saw, with whole batches."""
    alone = {name: case for name, case in CASES.items() if name != "online"}
    return once(tmp_path_factory, "one-rank", lambda folder: run_cases(folder, alone)[0])


@pytest.mark.smoke
@pytest.mark.parametrize("name", [name for name in CASES if name != "online"])
def test_two_ranks_train_as_one(two: list[dict[str, Any]], one: dict[str, Any], name: str) -> None:
    first, second, alone = two[0][name], two[1][name], one[name]
    assert "error" not in first, first["error"]
    assert "error" not in second, second["error"]
    assert first["norms"] == second["norms"]
    assert first["scales"] == second["scales"] == alone["scales"]
    for key, value in alone["flushed"].items():
        assert torch.equal(first["flushed"][key], second["flushed"][key]), key
        if name not in ROUNDED:
            torch.testing.assert_close(first["flushed"][key], value, rtol=1e-4, atol=2e-5, msg=key)
    means = [(a + b) / 2 for a, b in zip(first["losses"], second["losses"], strict=True)]
    assert means == pytest.approx(alone["losses"], rel=2e-2 if name in ROUNDED else 1e-4)


def test_a_profile_names_the_users_stage_and_what_trains(two: list[dict[str, Any]], one: dict[str, Any]) -> None:
    shared = "with whole weights, its state shared out among the ranks"
    wanted = {"exact": (2, shared), "stage 1": (1, shared), "without rows": (2, "with all of its state on each rank")}
    for name, (stage, how) in wanted.items():
        (told,) = two[0][name]["described"]
        assert told.startswith("DeepSpeed ")
        assert told.partition(", ")[2] == f"stage {stage} in the ds_config, trained by zenflow {how}"
    assert one["exact"]["described"][0].endswith(", stage 2 in the ds_config, trained by zenflow on one rank")


def test_the_first_line_says_who_has_the_state(two: list[dict[str, Any]]) -> None:
    shared, stage_1, replicated = (
        next(line for line in two[0][name]["lines"] if "backend zenflow" in line)
        for name in ("exact", "stage 1", "without rows")
    )
    for line in (shared, stage_1):
        assert line.endswith("; 2 ranks share out state and host work by rows, and each has all weights")
    assert replicated.endswith(
        "; each of 2 ranks has the state and the host work of all, since a trained parameter is of shape (), which has "
        "no rows"
    )


@pytest.mark.smoke
@pytest.mark.parametrize("name", VISITED)
def test_one_rank_reads_whole_weights_alone(two: list[dict[str, Any]], name: str) -> None:
    """While the other trains on: it would wait for whatever this one had to ask it for."""
    alone, weights = two[0][name]["visit"]["alone"], two[1][name]["visit"]["weights"]
    assert alone["kinds"] == ["Parameter"]
    for way in ("model", "copied", "file"):
        assert alone[way].keys() == weights.keys()
    for way in ("model", "data", "part", "copied", "file"):
        for key, value in alone[way].items():
            assert torch.equal(value, weights[key]), f"{way} {key}"
    assert torch.isfinite(alone["output"]).all()


@pytest.mark.smoke
@pytest.mark.parametrize("name", VISITED)
def test_what_all_ranks_write_counts(two: list[dict[str, Any]], one: dict[str, Any], name: str) -> None:
    """Into whole weights, in each way; training goes on with it (`test_two_ranks_train_as_one`)."""
    for seen in two:
        for key, value in one[name]["visit"]["written"].items():
            torch.testing.assert_close(seen[name]["visit"]["written"][key], value, rtol=0.0, atol=1e-6, msg=key)


@pytest.mark.smoke
@pytest.mark.parametrize("name", VISITED)
def test_accessors_give_whole_state_and_gradients(two: list[dict[str, Any]], one: dict[str, Any], name: str) -> None:
    for seen in two:
        for what in ("state", "gradients"):
            for key, value in one[name]["visit"][what].items():
                torch.testing.assert_close(seen[name]["visit"][what][key], value, rtol=1e-5, atol=1e-6, msg=key)
        found = seen[name]["visit"]["state"]
        assert torch.equal(found["shown"], found["master"] * 1.5)


def test_both_ranks_are_tuned_online(two: list[dict[str, Any]]) -> None:
    first, second = (rank["online"] for rank in two)
    assert "error" not in first, first["error"]
    assert "error" not in second, second["error"]
    for key, value in first["flushed"].items():
        assert torch.equal(value, second["flushed"][key]), key
