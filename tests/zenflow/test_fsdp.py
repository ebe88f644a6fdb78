"""Over FSDP2 several ranks, each with its rows, train as one process does with the whole batch."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.zenflow.fsdp_cases import CASES, alone
from tests.zenflow.rank_runs import Results, results_of_ranks

RANKS = (2, 4)


@pytest.fixture(scope="module", params=RANKS, ids="on {}".format)
def ranks(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Results:
    folder = tmp_path_factory.mktemp("ranks")
    return results_of_ranks(folder, "tests.zenflow.fsdp_cases", list(CASES), request.param)


@pytest.fixture(scope="module")
def by_one() -> dict[str, dict[str, Any]]:
    return {}


@pytest.mark.parametrize("name", CASES)
def test_ranks_are_one_with_the_whole_batch(ranks: Results, by_one: dict[str, dict[str, Any]], name: str) -> None:
    for results in ranks:
        assert "error" not in results[name], results[name]["trace"]
    if name not in by_one:
        by_one[name] = alone(CASES[name])
    expected, first = by_one[name], ranks[0][name]
    assert first["selected"] == expected["selected"]
    torch.testing.assert_close(first["norms"], expected["norms"], rtol=1e-6, atol=0.0)
    for key, value in expected["weights"].items():
        torch.testing.assert_close(
            first["weights"][key], value, rtol=0.0, atol=1e-4, msg=lambda said, key=key: f"{key}: {said}"
        )
    assert not any(results[name]["unbalanced"] for results in ranks)
