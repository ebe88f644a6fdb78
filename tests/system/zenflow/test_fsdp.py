"""Several ranks, each with its rows (FSDP2) or state of them, train as one process does with the whole batch."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.support.tiers import everything, fast
from tests.support.zenflow.fsdp_cases import CASES, PARTITIONED, Odd, alone
from tests.support.zenflow.rank_runs import Results, results_of_ranks

RANKS = fast((4,), all_of=(2, 4, 8))
"""By day with uneven and empty shards alone."""
NAMES = fast(["exact", "clipped", "exact, partitioned"], all_of=list(CASES))
FEW = [f"{name}{kind}" for name in ("exact", "clipped", "twin flow", "knobs") for kind in ("", PARTITIONED)]
"""On 8 ranks, where most have no row of a weight: what they do is what they do on 4."""
NAMES_ON = {
    2: [name for name in NAMES if CASES[name].rule == "adamw"],
    4: NAMES,
    8: [name for name in NAMES if name in FEW],
}
"""By the number of ranks: other rules are tried on 4."""
WITHOUT_HOST_STATE = ("on the device", f"on the device{PARTITIONED}")


@pytest.fixture(scope="module", params=RANKS, ids="on {}".format)
def ranks(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Results:
    folder = tmp_path_factory.mktemp("ranks")
    more = {2: ["repeated", "rounded"], 4: ["with replicas"]}
    names = [*NAMES_ON[request.param], *(more.get(request.param, []) if everything() else [])]
    results = results_of_ranks(
        folder, "tests.support.zenflow.fsdp_cases", names, request.param, patience_s=60.0 * request.param
    )
    for result in results:
        for found in result.values():
            assert "error" not in found, found["trace"]
    return results


@pytest.fixture(scope="module")
def by_one() -> dict[str, dict[str, Any]]:
    """What one process finds, by the name of the case."""
    names = dict.fromkeys(name.removesuffix(PARTITIONED) for name in NAMES)
    found = {name: alone(CASES[name]) for name in names}
    return found | {f"{name}{PARTITIONED}": one for name, one in found.items()}


def require_close(found: dict[str, Any], expected: dict[str, Any]) -> None:
    """The same but for rounding: sums over halves of a batch are rounded otherwise than over all of it."""
    assert found["selected"] == expected["selected"]
    torch.testing.assert_close(found["norms"], expected["norms"], rtol=1e-6, atol=0.0, equal_nan=True)
    for key, value in expected["weights"].items():
        torch.testing.assert_close(found["weights"][key], value, rtol=0.0, atol=1e-4, msg=lambda said: f"{key}: {said}")  # noqa: B023 - called at once


@pytest.mark.smoke
def test_ranks_are_one_with_the_whole_batch(ranks: Results, by_one: dict[str, dict[str, Any]]) -> None:
    for name in NAMES_ON[len(ranks)]:
        require_close(ranks[0][name], by_one[name])
        assert not any(result[name]["unbalanced"] for result in ranks)


def test_every_rank_knows_how_far_the_whole_model_moves(ranks: Results, by_one: dict[str, dict[str, Any]]) -> None:
    for name in NAMES_ON[len(ranks)]:
        expected = torch.tensor(by_one[name]["moved"])[:-2]  # the sums of the last steps are not known yet
        first, *others = (torch.tensor(result[name]["moved"])[:-2] for result in ranks)
        assert all(torch.equal(first, one) for one in others)
        if name.removesuffix(PARTITIONED) == "exact":
            torch.testing.assert_close(first, expected, rtol=5e-3, atol=1e-6)
        else:  # a step of a window is seen in the next one where the host is late
            (change, weights), (change_by_one, weights_by_one) = first.norm(dim=0), expected.norm(dim=0)
            torch.testing.assert_close(change * weights_by_one, change_by_one * weights, rtol=0.3, atol=1e-6)
        assert name in WITHOUT_HOST_STATE or expected[1:].sum() > 0


@pytest.mark.smoke
def test_ranks_that_have_whole_parameters_have_the_same(ranks: Results) -> None:
    for name in (name for name in NAMES_ON[len(ranks)] if CASES[name].partitioned):
        for result in ranks[1:]:
            for key, value in ranks[0][name]["weights"].items():
                assert torch.equal(result[name]["weights"][key], value), f"{name}: {key}"


def test_a_rank_has_its_share_of_the_bytes(ranks: Results, by_one: dict[str, dict[str, Any]]) -> None:
    """Over all ranks as many as one process has: nothing is held, sent or updated twice."""
    columns = sum(weight.shape[-1] for weight in Odd().parameters() if weight.dim() > 1)
    partitioned = "exact, partitioned" if len(ranks) == 4 else "clipped, partitioned"
    for name in ("exact", "clipped", partitioned):
        expected = by_one[name]
        d2h_bytes = [result[name]["d2h_bytes"] for result in ranks]
        assert [sum(of_step) for of_step in zip(*d2h_bytes, strict=True)] == expected["d2h_bytes"]
        assert sum(result[name]["h2d_bytes"] for result in ranks) == expected["h2d_bytes"]
        state_bytes = [result[name]["state_bytes"] for result in ranks]
        # Each rank counts the updates of every column.
        assert expected["state_bytes"] <= sum(state_bytes) <= expected["state_bytes"] + 4 * columns * len(ranks)


@pytest.mark.parametrize("ranks", [2], indirect=True)
def test_runs_repeat_whatever_the_number_of_threads(ranks: Results) -> None:
    for result in ranks:
        first, *others = result["repeated"]["weights"]
        for other in others:
            assert all(torch.equal(first[key], other[key]) for key in first)


@pytest.mark.parametrize("ranks", [4], indirect=True)
def test_replicas_are_equal_to_the_bit_and_train_as_one(ranks: Results, by_one: dict[str, dict[str, Any]]) -> None:
    found = [result["with replicas"] for result in ranks]
    require_close(found[0], by_one["clipped"])
    for rank in (0, 1):
        pairs = zip(found[rank]["rows"], found[rank + 2]["rows"], strict=True)
        assert all(torch.equal(one, other) for one, other in pairs)


@pytest.mark.parametrize("ranks", [2], indirect=True)
@pytest.mark.parametrize("reduced_in", ["fp32", "bf16"])
def test_rounded_rows_have_the_masters_of_the_fp32_ones(
    ranks: Results, by_one: dict[str, dict[str, Any]], reduced_in: str
) -> None:
    for result in ranks:
        found = result["rounded"][reduced_in]
        assert found["dtypes"] == ["torch.bfloat16"]
        assert all(found["given"])
        assert all(found["kept"])
    sent = sum(result["rounded"][reduced_in]["d2h_bytes"][5] for result in ranks)
    assert 2 * sent == by_one["clipped"]["d2h_bytes"][5]
