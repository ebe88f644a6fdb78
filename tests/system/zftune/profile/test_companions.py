"""Profiles of the built-in workload on several ranks, each on a rig of its own."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.support import fork_server
from tests.support.tiers import everything, fast
from tests.support.zftune.fixtures import MINI_TIMELINE
from zftune.errors import BadInputError, ProfileError
from zftune.profile.companions import several_ranks
from zftune.profile.run import ProfileOptions, profile, read_config
from zftune.profile.schema import validate
from zftune.profile.screen import render

Document = dict[str, Any]
NETWORKED = """
name = "networked"
[rates]
forward_ms = 40
backward_ms = 40
link_d2h_gbps = 5e-3
link_h2d_gbps = 5e-3
host_gbps = 2e-2
device_gbps = 10
comm_gbps = 1e-2
comm_latency_us = 100
"""


@pytest.fixture(autouse=True, scope="module")
def _by_day_other_ranks_are_forked() -> Iterator[None]:
    """Else each of them imports torch."""
    with pytest.MonkeyPatch.context() as patch:
        if not everything():
            forked = SimpleNamespace(get_context=lambda _: fork_server.context())
            patch.setattr("zftune.profile.companions.multiprocessing", forked)
        yield


@pytest.fixture(scope="module")
def options(mini_model: Path, tmp_path_factory: pytest.TempPathFactory) -> ProfileOptions:
    rig = tmp_path_factory.mktemp("rigs") / "networked.toml"
    rig.write_text(NETWORKED)
    return ProfileOptions(
        config=read_config(None, {"topk_ratio": 0.1}),
        steps=8,
        model=str(mini_model),
        text=__file__,
        sequence=16,
        rig=str(rig),
        ranks=2,
    )


def run_profile(options: ProfileOptions, **changes: Any) -> Document:
    return profile(dataclasses.replace(options, **changes), lambda name: lambda done, total: None)


@pytest.fixture(scope="module")
def documents(options: ProfileOptions) -> list[Document]:
    return [run_profile(options) for _ in range(fast(1, all_of=2))]


@pytest.fixture(scope="module")
def alone(options: ProfileOptions) -> Document:
    return run_profile(options, ranks=1, baselines=False)


@pytest.mark.smoke
def test_two_ranks_do_half_of_the_work_each(documents: list[Document], alone: Document) -> None:
    document = documents[0]
    validate(document)
    assert [rank["rank"] for rank in document["ranks"]] == [0, 1]
    for rank in document["ranks"]:
        assert rank["step_ms"]["mean"] == pytest.approx(document["step_ms"]["mean"], rel=1e-3)  # they meet in each step
        assert rank["phases_ms"] == pytest.approx(document["phases_ms"], rel=1e-3, abs=1e-3)
    for field in ("d2h_bytes_per_step", "h2d_bytes_per_step"):
        assert document["link"][field] == pytest.approx(alone["link"][field] / 2, rel=0.05)
    assert document["memory"]["host_state_bytes"] == pytest.approx(alone["memory"]["host_state_bytes"] / 2, rel=0.01)
    rate = document["throughput"]
    assert rate["tokens_per_s"] == pytest.approx(2 * 16 * rate["steps_per_s"])
    zero = document["baselines"]["zero_offload"]["stall"]["by_cause"]
    assert zero["host"] < 0.6 * MINI_TIMELINE["host_ms"]
    assert all(document == {**other, "rig": document["rig"]} for other in documents[1:])


@pytest.mark.smoke
def test_waits_in_collectives_are_told_apart(documents: list[Document]) -> None:
    document = documents[0]
    stall = document["stall"]
    assert set(stall["collectives"]) == {"gather", "reduce_scatter", "all_reduce"}
    assert all(stall["collectives"].values())
    assert stall["by_cause"]["comm"] == pytest.approx(sum(stall["collectives"].values()))
    for rank in document["ranks"]:  # alike ones
        assert rank["comm_ms"] == pytest.approx(stall["by_cause"]["comm"], rel=0.05)
    assert not any("is the slowest" in sentence for sentence in document["verdict"])


@pytest.mark.smoke
def test_the_screen_says_so(documents: list[Document]) -> None:
    from rich.console import Console

    console = Console(width=120)
    with console.capture() as shown:
        console.print(render(documents[0]))
    assert "zftune profile · 2 ranks · mini" in shown.get()
    assert "Each of 2 ranks has such a device and its rows of the model; figures are those of rank 0." in shown.get()


@pytest.mark.parametrize("more", [{"rig": "none"}, {"real_time": True}], ids=["no rig", "real time"])
def test_ranks_are_of_simulated_time(options: ProfileOptions, more: dict[str, Any]) -> None:
    with pytest.raises(BadInputError, match="--ranks 2: allowed only on a rig in simulated time"):
        run_profile(options, **more)


def test_there_is_at_least_one(options: ProfileOptions) -> None:
    with pytest.raises(BadInputError, match="--ranks is 0; it must be an integer >= 1"):
        run_profile(options, ranks=0)


def refuse(rank: int) -> None:
    raise BadInputError(f"rank {rank} has no text")


@pytest.mark.smoke
def test_what_another_rank_could_not_do_is_said() -> None:
    with pytest.raises(ProfileError, match=r"^rank 1 has no text$"), several_ranks(2, refuse):
        torch.distributed.barrier()
    assert not torch.distributed.is_initialized()
