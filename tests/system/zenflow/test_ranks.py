"""Several ranks: their gradients are averaged before anything else, and they never part."""

from __future__ import annotations

import re

import pytest
import torch

from tests.support.tiers import fast
from tests.support.zenflow.rank_cases import (
    AUTO,
    BATCH,
    COMM_GBPS,
    COMM_LATENCY_US,
    COMPUTE_MS,
    CONFIGS,
    EXACT,
    NODE_BYTES,
    PARTITIONED,
    RANKS,
    STEPS,
    WORK,
    batches_of,
    loss_of,
    model_of,
)
from tests.support.zenflow.rank_runs import Results, results_of_ranks
from zenflow import ConfigError, ZenFlowAdamW, ZenFlowConfig

TRIED = fast(["exact", "overlapped, partitioned"], all_of=[*CONFIGS, *(f"{name}, partitioned" for name in PARTITIONED)])


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Results:
    names = fast([*TRIED, "no room"], all_of=[name for name in WORK if name != "sharded"])
    return results_of_ranks(tmp_path_factory.mktemp("ranks"), "tests.support.zenflow.rank_cases", names, RANKS)


@pytest.mark.smoke
@pytest.mark.parametrize("name", TRIED)
def test_two_ranks_are_one_with_the_whole_batch(ranks: Results, name: str) -> None:
    first, second = (results[name] for results in ranks)
    assert "error" not in first, first
    config = CONFIGS[name.removesuffix(", partitioned")]
    # One rank's losses are means over halves where a half does not use the last layer: take the mean of both halves.
    model = model_of(0)
    optimizer = ZenFlowAdamW(model.parameters(), lr=1e-2, weight_decay=0.1, config=config, module=model)
    half = BATCH // RANKS
    for step, batch in enumerate(batches_of(torch.float32)):
        optimizer.zero_grad()
        parts = [loss_of(model, batch, slice(rank * half, (rank + 1) * half), step) for rank in range(RANKS)]
        (sum(parts) / RANKS).backward()  # type: ignore[union-attr]
        optimizer.step()
    optimizer.close()
    for key, alone in model.state_dict().items():
        assert torch.equal(first["weights"][key], second["weights"][key]), key
        torch.testing.assert_close(first["weights"][key], alone, rtol=1e-4, atol=1e-5, msg=key)
    assert first["norms"] == second["norms"]


def test_ranks_stay_equal_in_bf16(ranks: Results) -> None:
    first, second = (results["bf16"] for results in ranks)
    assert "error" not in first, first
    for name in first["weights"]:
        assert torch.equal(first["weights"][name], second["weights"][name]), name


def test_an_overflow_on_one_rank_skips_the_step_on_all(ranks: Results) -> None:
    for results in ranks:
        assert results["overflow"] == {"same": True, "moved": True}


@pytest.mark.smoke
def test_knobs_change_on_all_ranks_or_on_none(ranks: Results) -> None:
    first, second = (results["no room"] for results in ranks)
    assert first == {"said": "another rank failed at this, see its own message; nothing has changed here", "kept": 0.3}
    assert second == {"said": "no room here", "kept": 0.3}


def test_memory_of_a_node_is_that_of_its_ranks_together_and_all_are_refused_alike(ranks: Results) -> None:
    first, second = (results["no room on the node"] for results in ranks)
    assert "error" not in first, first
    assert first == second
    (refused, shortened), later = first["first"], first["later"]
    both = r"needs (\d+) bytes of host memory on \S+, up to (\d+) for each of its 2 ranks"
    found = re.match(rf"the state of the deferred columns {both}, available are {NODE_BYTES} \(what", refused)
    assert found is not None, refused
    assert int(found[1]) == 2 * int(found[2]) > NODE_BYTES > int(found[2])
    assert f"{NODE_BYTES // 2} for each; lower offload_ratio" in refused
    assert shortened == ""
    assert first["longest"][1] < AUTO.longest_window
    for what, sentence in zip(("new split", "gradient log", "new split"), later, strict=True):
        assert re.match(rf"the {what} {both}, available are 1 ", sentence), sentence


def test_given_masters_are_those_of_the_first_rank(ranks: Results) -> None:
    first, second = (results["masters"] for results in ranks)
    assert "error" not in first, first
    assert first["masters"]
    for one, other in zip(first["masters"], second["masters"], strict=True):
        assert torch.equal(one, other)
    assert any(not torch.equal(one, one.bfloat16().float()) for one in first["masters"])


def test_gradients_become_their_mean_and_fp16_does_not_overflow_on_its_way(ranks: Results) -> None:
    """AdamW would not tell a sum from a mean. The sum of the two is 88,000, and fp16 ends at 65,504."""
    for results in ranks:
        assert "error" not in results["large"], results["large"]
        assert all(bool((gradient == 44_000.0).all()) for gradient in results["large"]["gradients"])


def test_ranks_begin_with_equal_weights_but_for_what_cannot_be_trained(ranks: Results) -> None:
    first, second = (results["frozen"] for results in ranks)
    assert "error" not in first, first
    assert all(torch.equal(first[name], second[name]) for name in ("trained", "base"))
    assert [int(results["frozen"]["packed"].max()) for results in ranks] == [0, 1]


def test_means_are_averaged_again_only_where_somebody_has_touched_them(ranks: Results) -> None:
    for results in ranks:
        assert results["early"].get("seen") == [
            (3, [[1.5], [1.5], [1.5]]),
            (0, [[1.5], [1.5], [1.5]]),
            (3, [[2.0], [1.5], [1.5]]),  # accumulated to on both ranks
            (3, [[2.0], [3.0], [1.5]]),  # multiplied on one of them
            (0, []),  # by the step
            (3, [[1.5], [1.5], [1.5]]),
        ], results["early"]


def test_simulated_time_is_that_of_all_ranks(ranks: Results) -> None:
    """Whoever is ready first waits for the other, and both for the network: steps are as long on both, to the digit."""
    first, second = (results["rigs"] for results in ranks)
    assert "error" not in first, first
    assert first["step_ms"][1:] == second["step_ms"][1:]
    comm_ms = sum(COMM_LATENCY_US / 1e3 + nbytes / COMM_GBPS / 1e6 for nbytes in first["buckets"])
    for step_ms in first["step_ms"][1:]:
        assert step_ms == pytest.approx(max(COMPUTE_MS) + comm_ms, rel=1e-3)
    for one, other in zip(first["weights"].values(), second["weights"].values(), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("offload_ratio", [0.0, 0.5, 1.0])
def test_masters_begin_with_what_is_given(offload_ratio: float) -> None:
    whole = model_of(3)
    model = model_of(3).to(torch.bfloat16)
    changed = model[0].weight  # type: ignore[index]
    with torch.no_grad():
        changed.view(-1)[0] += 1  # written to since: what was given does not round to it
    config = ZenFlowConfig(topk_ratio=0.3, update_interval=2, offload_ratio=offload_ratio)
    optimizer = ZenFlowAdamW(model.parameters(), lr=0.0, weight_decay=0.0, config=config, module=model)
    given = {p: w.detach().clone() for p, w in zip(model.parameters(), whole.parameters(), strict=True)}
    optimizer.give_masters(given)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    state = optimizer.state_dict()["state"]
    for number, (parameter, master) in enumerate(given.items()):
        expected = master.clone()
        if parameter is changed:
            expected.view(-1)[0] = parameter.detach().float().view(-1)[0]
        found = state[number]["master"]
        assert torch.equal(found.reshape(-1).sort().values, expected.reshape(-1).sort().values)
        assert torch.equal(parameter.detach(), expected.to(torch.bfloat16))
    with pytest.raises(ConfigError, match="give_masters\\(\\) was called after the first gradient"):
        optimizer.give_masters(given)
    optimizer.abandon()


def test_masters_of_another_shape_are_refused() -> None:
    model = model_of(0)
    optimizer = ZenFlowAdamW(model.parameters(), config=EXACT, module=model)
    with pytest.raises(ConfigError, match=r"it must be torch.float32 of its parameter's shape \(20, 13\)"):
        optimizer.give_masters({next(model.parameters()): torch.zeros(2)})
    optimizer.abandon()


def test_what_ddp_has_averaged_is_left_as_it_is(ranks: Results) -> None:
    for results in ranks:
        assert "error" not in results["ddp"], results["ddp"]["trace"]
        assert results["ddp"]["sums"] == [STEPS, 0, 0]
        for name in ("ddp", "ddp, partitioned"):
            for ours, ddp in zip(results["ddp"]["ours"], results["ddp"][name], strict=True):
                torch.testing.assert_close(ours, ddp, rtol=1e-5, atol=1e-6)


def test_a_last_save_is_told_by_one_rank_and_needs_no_other(ranks: Results) -> None:
    first, second = (results["saved"] for results in ranks)
    assert "error" not in first, first
    assert first["lacks"]
    assert second["lacks"]
    (said,) = first["said"]
    assert said.startswith("what model.state_dict() gave after step 5, the last one, lacks updates")
    assert second["said"] == []


def test_a_gradient_that_is_sparse_on_one_rank_is_refused_on_both(ranks: Results) -> None:
    for result in ranks:
        assert result["sparse"]["said"] == "a gradient is sparse; gradients must be dense"
