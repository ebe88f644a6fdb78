"""Whatever a script over FSDP2 does with its weights, it finds what `torch.optim.AdamW` would have made of them."""

from __future__ import annotations

import pytest
import torch

from tests.support.tiers import everything, fast
from tests.support.zenflow.fsdp_scripts import STEPS, TRIED, WORK
from tests.support.zenflow.rank_runs import Results, results_of_ranks

RANKS = fast(2, all_of=3)


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Results:
    module, alone = "tests.support.zenflow.fsdp_scripts", [name for name in WORK if name != "accelerated"]
    results = results_of_ranks(tmp_path_factory.mktemp("ranks"), module, fast(TRIED, all_of=alone), RANKS)
    if everything():
        folder = tmp_path_factory.mktemp("accelerate")
        under = results_of_ranks(folder, module, ["accelerated"], RANKS, with_accelerate=True)
        for result, more in zip(results, under, strict=True):
            result.update(more)
    for result in results:
        for found in result.values():
            assert "error" not in found, found["trace"]
    return results


@pytest.mark.smoke
@pytest.mark.parametrize("name", TRIED)
def test_a_script_finds_what_torch_would_have_made(ranks: Results, name: str) -> None:
    for result in ranks:
        found, expected = result[name], result[name]["torch"]
        for way in sorted({*found} & {"ours", "late"}):
            assert found[way]["weights"].keys() == expected["weights"].keys()
            torch.testing.assert_close(found[way], expected, rtol=0.0, atol=1e-5)
    assert sum(result[name]["count"]["left"] for result in ranks) > 0
    assert sum(result[name]["count"]["gathered in order"] for result in ranks) > 0


def test_gradients_leave_in_backward_and_only_the_first_step_and_close_allocate(ranks: Results) -> None:
    for result in ranks:
        assert result["reserved"] == {
            "allocated in backward": [],
            "allocated after backward": [1, 3],  # at the first close columns change tier: the first step has selected
            "left in backward": list(range(2, STEPS + 1)),
            "left after backward": [1],
        }


def test_a_step_adds_one_collective_of_four_bytes_a_column(ranks: Results) -> None:
    columns, others, weights, flags = 16 + 2100, 1, 3, 4  # a bias, and a word for each weight
    for result in ranks:
        found = result["collectives"]
        assert found["calls"] == [[4 * (columns + others + weights + flags)]] * 3
        assert found["calls"][0][0] <= found["gradient_bytes"] / 2000
