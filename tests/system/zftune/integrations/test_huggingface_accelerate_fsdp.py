"""Accelerate over FSDP2: as with torch's AdamW, saved and gone on with on any number of ranks, by either of them."""

from __future__ import annotations

import os
import signal
from contextlib import ExitStack
from typing import Any

import pytest
import torch

pytest.importorskip("transformers", reason="the huggingface extra is not installed")

from tests.support import fork_server
from tests.support.tiers import fast
from tests.support.zenflow.rank_runs import ROOT, Results, results_of_ranks
from tests.support.zftune.integrations.fsdp_accelerate import FOLDER, RUNS, SAVED_AFTER, STEPS

MODULE = "tests.support.zftune.integrations.fsdp_accelerate"
RESUMED = ["ours again", "ours from torch", "torch from ours", "ours from a killed one"]
TRIED = fast(["torch", "ours"], all_of=list(RUNS))
ELSEWHERE = fast(["ours again"], all_of=RESUMED)


def kill_one() -> None:
    """A training on two ranks, the second of which is killed after a checkpoint."""
    command = ["-c", f"from {MODULE} import killed; killed()"]
    with ExitStack() as stack:
        ranks = fork_server.ranks(2, command, env={"GLOO_SOCKET_IFNAME": "lo", **os.environ}, cwd=ROOT)
        codes = [stack.enter_context(one).wait(120) for one in ranks]
    assert codes[1] == -signal.SIGKILL
    assert codes[0]


@pytest.fixture(scope="module")
def by_ranks(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Results]:
    """What each rank saw, by the number of ranks; those of two save what the others go on from."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(FOLDER, str(tmp_path_factory.mktemp("saved")))
        if "ours from a killed one" in TRIED:
            kill_one()
        works = {2: [*TRIED, "pending", "prepared"], 3: ELSEWHERE, 1: fast([], all_of=RESUMED)}
        found = {
            ranks: results_of_ranks(tmp_path_factory.mktemp("ranks"), MODULE, names, ranks, with_accelerate=True)
            for ranks, names in works.items()
            if names
        }
    for results in found.values():
        for result in results:
            for one in result.values():
                assert "error" not in one, one["trace"]
    return found


def near(found: dict[str, Any], expected: dict[str, Any], *, rounded: bool = False) -> None:
    """To 1e-4; where passes are in bf16, their losses and gradients to a few of its digits."""
    for name in ("losses", "norms"):
        last = expected[name][-len(found[name]) :]
        assert found[name] == pytest.approx(last, rel=1e-2 if rounded else 1e-4)
    torch.testing.assert_close(found["weights"], expected["weights"], rtol=0.0, atol=2e-3 if rounded else 1e-5)


@pytest.mark.smoke
def test_it_trains_as_torchs_adamw(by_ranks: dict[int, Results]) -> None:
    for result in by_ranks[2]:
        near(result["ours"], by_ranks[2][0]["torch"])
        assert len(result["ours"]["losses"]) == STEPS
        assert result["ours"]["losses"][-1] != pytest.approx(result["ours"]["losses"][0], rel=1e-2)


@pytest.mark.parametrize("ranks", fast([3], all_of=[1, 2, 3]))
@pytest.mark.parametrize("name", fast(RESUMED[:1], all_of=RESUMED))
def test_it_goes_on_from_a_checkpoint(by_ranks: dict[int, Results], name: str, ranks: int) -> None:
    for result in by_ranks[ranks]:
        found = result[name]
        assert len(found["losses"]) == STEPS - SAVED_AFTER
        near(found, by_ranks[2][0]["ours"])
        if ranks == 2 and name == "ours again":
            assert found["losses"] == by_ranks[2][0]["ours"]["losses"][SAVED_AFTER:]


def test_what_is_pending_is_not_left_out_of_a_checkpoint(by_ranks: dict[int, Results]) -> None:
    for result in by_ranks[2]:
        said = "BadInputError: a checkpoint is saved while updates are pending, which are not in its weights"
        assert result["pending"]["said"].startswith(f"{said}: over FSDP2 call flush() first")


def test_no_state_is_made_while_it_is_prepared(by_ranks: dict[int, Results]) -> None:
    for result in by_ranks[2]:
        assert result["prepared"]["elements"] == 3  # two shapes


def test_masters_are_in_fp32_whatever_the_rows_are(by_ranks: dict[int, Results]) -> None:
    for result in by_ranks[2]:
        assert result["ours in bf16"]["dtypes"] == ["torch.float32"]  # Accelerate makes them so
        near(result["ours in bf16"], result["torch in bf16"], rounded=True)
        near(result["ours in bf16 again"], result["ours in bf16"])
        assert result["bf16 rows"]["dtypes"] == ["torch.bfloat16", "torch.float32"]


def test_late_updates_are_in_what_is_saved(by_ranks: dict[int, Results]) -> None:
    for result in by_ranks[2]:
        late, again = result["late"]["losses"], result["late again"]["losses"]
        assert late != result["ours"]["losses"]
        assert again[0] == late[SAVED_AFTER]
        assert again == pytest.approx(late[SAVED_AFTER:], rel=0.02)
