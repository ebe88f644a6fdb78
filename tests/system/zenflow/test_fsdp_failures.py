"""What fails on one rank over FSDP2 is told on all of them, in the same step, and none waits for another."""

from __future__ import annotations

import re

import pytest
import torch

from tests.support.tiers import fast
from tests.support.zenflow.fsdp_failures import AT, FAULTS, RANK, TOLD_BY_STEP, WORK
from tests.support.zenflow.rank_runs import Results, results_of_ranks

RANKS = fast(2, all_of=3)
ELSEWHERE = rf"RankError: step {{step}} failed on 1 of {RANKS} ranks, see their own messages; it was skipped on all .*"
MISSING = (
    rf"RankError: parameter blocks\.0\.up\.weight had a gradient on {RANKS - 1} of {RANKS} ranks at step {AT}; "
    "it must be .*"
)

# The step at which all are told, and what each is: a fault within a step is told with the next one's gradients.
TOLD = {
    "gradient that cannot leave": (AT + 1, "HostMemoryError: the host has less memory", ELSEWHERE),
    "missing gradient": (AT + 1, MISSING, MISSING),
    "host that fails": (AT + 2, r"HostEngineError: .* failed: a failure was injected", ELSEWHERE),
    "step that fails half-way": (AT + 2, "ValueError: something is wrong here", ELSEWHERE),
    "late": (AT + 2, r"HostEngineError: .* failed: a failure was injected", ELSEWHERE),
}
TOLD |= {f"{name}, partitioned": TOLD[name] for name in TOLD_BY_STEP}
TRIED = fast(["missing gradient", "host that fails"], all_of=list(TOLD))


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Results:
    results = results_of_ranks(
        tmp_path_factory.mktemp("ranks"), "tests.support.zenflow.fsdp_failures", fast(TRIED, all_of=list(WORK)), RANKS
    )
    for result in results:
        for found in result.values():
            assert "error" not in found, found["trace"]
    return results


@pytest.mark.smoke
@pytest.mark.parametrize("name", TRIED)
def test_all_ranks_are_told_in_the_same_step(ranks: Results, name: str) -> None:
    step, own, others = TOLD[name]
    for rank, result in enumerate(ranks):
        told = result[name]["told"]
        expected = own if rank == RANK else others.format(step=step - 1)
        assert list(told) == [str(step), "flush", "state_dict"]
        assert all(re.fullmatch(expected, sentence) for sentence in told.values()), told


def test_some_weights_were_late(ranks: Results) -> None:
    assert sum(result["late"]["late"] for result in ranks) > 0


@pytest.mark.parametrize("name", [*FAULTS, *(f"{name}, partitioned" for name in TOLD_BY_STEP)])
def test_the_step_is_skipped_on_all_ranks(ranks: Results, name: str) -> None:
    """Nothing is deferred in these runs: what a step changes is seen at once."""
    weights = ranks[0][name]["weights"]
    assert all(torch.equal(weights[-1][key], weights[-2][key]) for key in weights[-1])
    assert any(not torch.equal(weights[-3][key], weights[-2][key]) for key in weights[-1])


def test_a_step_that_is_not_finite_on_one_rank_is_skipped_on_all(ranks: Results) -> None:
    before, skipped, after = ranks[0]["not finite"]["weights"]
    assert all(torch.equal(before[key], skipped[key]) for key in before)
    assert all(bool(value.isfinite().all()) for value in after.values())
    assert any(not torch.equal(skipped[key], after[key]) for key in after)


def test_a_rank_that_gives_up_its_optimizer_waits_for_nobody(ranks: Results) -> None:
    for result in ranks:
        assert result["let go alone"]["pending"]
        before, after = result["let go alone"]["weights"]
        assert all(torch.equal(before[key], after[key]) for key in before)
