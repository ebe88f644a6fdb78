"""Weights that FSDP2 keeps on the host (`CPUOffloadPolicy`) are trained there as others are on their device."""

from __future__ import annotations

import pytest
import torch

from tests.support.tiers import fast
from tests.support.zenflow.host_weights_cases import CASES, FOLDER
from tests.support.zenflow.rank_runs import Results, results_of_ranks

RANKS = fast((2,), all_of=(1, 2, 4))
ON_TWO = ["as torch", "saved", "waited for", "at all speeds", "said", "exchanged"]


def cases_on(size: int) -> list[str]:
    """Of those that have a counterpart on the device."""
    if size == 4:  # one has no row of a weight
        return ["late", "knobs"]
    return fast(["knobs"], all_of=[*CASES, "rounded", "sharded later"])


@pytest.fixture(scope="module", params=RANKS, ids="on {}".format)
def ranks(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Results:
    folder, size = tmp_path_factory.mktemp("ranks"), request.param
    names = [*cases_on(size), *fast(["as torch"], all_of=ON_TWO if size == 2 else ["saved"])]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(FOLDER, str(tmp_path_factory.mktemp("checkpoints")))
        results = results_of_ranks(folder, "tests.support.zenflow.host_weights_cases", names, size)
    for result in results:
        for found in result.values():
            assert "error" not in found, found["trace"]
    return results


def require_equal(rows: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    torch.testing.assert_close(rows, expected, rtol=0.0, atol=0.0)


@pytest.mark.smoke
def test_they_are_what_weights_on_the_device_are_to_the_bit(ranks: Results) -> None:
    for result in ranks:
        for name in cases_on(len(ranks)):
            host, device = result[name]["host"], result[name]["device"]
            # torch sums the norm of a gradient that is whole in another order than we that of one that has left.
            rounding = 1e-6 if name == "clipped by torch" else 0.0
            for rows in ("before", "rows"):
                torch.testing.assert_close(host[rows], device[rows], rtol=0.0, atol=rounding)
            assert host["norms"] == pytest.approx(device["norms"], rel=0.0, abs=rounding, nan_ok=True)
            assert not host["unbalanced"]


@pytest.mark.smoke
@pytest.mark.parametrize("ranks", [2], indirect=True)
def test_exact_is_adamw_of_torch(ranks: Results) -> None:
    for result in ranks:
        assert max(result["as torch"]["differences"]) < 1e-6


@pytest.mark.parametrize("ranks", [2], indirect=True)
def test_torchs_adamw_goes_on_from_their_state(ranks: Results) -> None:
    for result in ranks:
        assert max(result["exchanged"]["differences"]) < 1e-6


@pytest.mark.parametrize("ranks", RANKS, indirect=True)
def test_a_saved_run_goes_on_to_the_bit_on_host_and_device(ranks: Results) -> None:
    for result in ranks:
        found = result["saved"]
        for kind in ("host", "device"):
            require_equal(found[kind]["before"], found["uninterrupted"]["before"])
            require_equal(found[kind]["rows"], found["uninterrupted"]["rows"])


@pytest.mark.parametrize("ranks", [2], indirect=True)
def test_runs_repeat_whatever_the_speed_of_the_host(ranks: Results) -> None:
    for result in ranks:
        first, *others = result["at all speeds"]["runs"]
        for other in others:
            require_equal(other, first)


@pytest.mark.parametrize("ranks", [2], indirect=True)
def test_nothing_is_written_before_it_was_read(ranks: Results) -> None:
    for result in ranks:
        assert result["waited for"] == dict.fromkeys(("step", "flush", "set_full_state"), (True, True))


@pytest.mark.parametrize("ranks", [2], indirect=True)
def test_no_column_is_selected(ranks: Results) -> None:
    """Nor does a hook ask for gradients: FSDP2 would wait for each copy before it went on."""
    allowed = "and the weights are on the host (CPUOffloadPolicy); it must be 0: no column stays on cuda"
    for result in ranks:
        found = result["said"]
        assert found["said"] == [f"topk_ratio is {value} {allowed}" for value in (0.1, 0.25)]
        assert found["knobs"] == {"topk_ratio": 0.0, "update_interval": 1}
        assert found["device"] == "HostWeights"
        assert found["hooks"] == []
        assert found["threads"] == {"of torch": 1, "of kernels": 2}
