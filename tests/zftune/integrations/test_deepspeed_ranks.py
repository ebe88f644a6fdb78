"""The backend zenflow on two ranks: equal weights on both, and those of one rank with the whole batch."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.once import once
from tests.zftune.integrations.ds_running import ADAMW, ZENFLOW, ds_config, run_cases

CASES = {
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
    "online": {"config": ds_config(optimizer=ADAMW, zftune={"online": True}), "ours": True},
}


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


@pytest.mark.parametrize("name", [name for name in CASES if name != "online"])
def test_two_ranks_train_as_one(two: list[dict[str, Any]], one: dict[str, Any], name: str) -> None:
    first, second, alone = two[0][name], two[1][name], one[name]
    assert "error" not in first, first["error"]
    assert "error" not in second, second["error"]
    assert first["norms"] == second["norms"]
    assert first["scales"] == second["scales"] == alone["scales"]
    for key, value in alone["flushed"].items():
        assert torch.equal(first["flushed"][key], second["flushed"][key]), key
        if name not in ("bf16", "fp16"):
            torch.testing.assert_close(first["flushed"][key], value, rtol=1e-4, atol=2e-5, msg=key)
    means = [(a + b) / 2 for a, b in zip(first["losses"], second["losses"], strict=True)]
    assert means == pytest.approx(alone["losses"], rel=2e-2 if name in ("bf16", "fp16") else 1e-4)


def test_both_ranks_are_tuned_online(two: list[dict[str, Any]]) -> None:
    first, second = (rank["online"] for rank in two)
    assert "error" not in first, first["error"]
    assert "error" not in second, second["error"]
    for key, value in first["flushed"].items():
        assert torch.equal(value, second["flushed"][key]), key
