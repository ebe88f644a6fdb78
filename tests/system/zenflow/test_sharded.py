"""Sharded parameters are refused with a sentence, on one rank and on two, and nothing is written to them."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import pytest

from tests.support import forked
from tests.support.tiers import fast
from tests.support.zenflow.rank_runs import results_of_ranks
from tests.support.zenflow.sharded_cases import SHARDED

ALONE = """
import json, torch
from tests.support.zenflow.sharded_cases import what_is_said
torch.distributed.init_process_group("gloo", init_method="file://{store}", rank=0, world_size=1)
print(json.dumps(what_is_said()))
torch.distributed.destroy_process_group()
"""
RANKS = fast((1,), all_of=(1, 2))
LOOPBACK = {"GLOO_SOCKET_IFNAME": "lo"}


@pytest.fixture(scope="module")
def said(tmp_path_factory: pytest.TempPathFactory) -> dict[int, list[dict[str, Any]]]:
    """By the number of ranks: what each rank was told."""
    script = ALONE.format(store=tmp_path_factory.mktemp("alone") / "store")
    done = forked.run(script, environment={**LOOPBACK, **os.environ}, warnings="ignore")
    assert done.returncode == 0, done.stderr
    alone = {1: [json.loads(done.stdout)]}
    return alone | ({2: _on_two(tmp_path_factory.mktemp("two"))} if 2 in RANKS else {})


def _on_two(folder: Path) -> list[dict[str, Any]]:
    results = results_of_ranks(folder, "tests.support.zenflow.rank_cases", ["sharded"], 2)
    return [one["sharded"] for one in results]


@pytest.mark.smoke
@pytest.mark.parametrize("name", SHARDED)
@pytest.mark.parametrize("ranks", RANKS)
def test_sharded_parameters_are_refused_and_left_alone(
    said: dict[int, list[dict[str, Any]]], ranks: int, name: str
) -> None:
    expected = SHARDED[name][1].replace("{ranks}", str(ranks))
    for everything in said[ranks]:
        assert "error" not in everything, everything
        found = everything[name]
        assert len(found["said"]) == 3
        assert all(re.fullmatch(expected, sentence) for sentence in found["said"]), found["said"]
        assert (found["kept"], found["groups"]) == (True, 1)


@pytest.mark.parametrize("ranks", RANKS)
def test_a_torch_is_named_that_is_too_old_for_sharded_parameters(
    said: dict[int, list[dict[str, Any]]], ranks: int
) -> None:
    sentence = "a parameter is a DTensor and torch is 2.8.1+cu128; sharded parameters need torch 2.9 or newer"
    for everything in said[ranks]:
        assert everything["older torch"] == {"said": [sentence] * 3, "kept": True, "groups": 1}
