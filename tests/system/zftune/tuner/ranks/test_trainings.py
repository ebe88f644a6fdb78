"""Two gloo ranks that are tuned while they train: at every step both have the same knobs, whatever one of them does."""

from __future__ import annotations

import contextlib
import json
import os
from pathlib import Path
from typing import Any

import pytest

from tests.support import fork_server
from tests.support.once import once

ROOT = Path(__file__).parents[5]
TRIED = ("loaded_tried", "loaded_and_closed", "loaded_and_deaf")
SEARCHES = ("tuned", "zen_auto", "silent", "short_of_memory", "wrong_elsewhere", "closed_elsewhere", "loaded", *TRIED)


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each rank has seen, by the name of the work."""
    return once(tmp_path_factory, "ranks", train)


def train(folder: Path) -> list[dict[str, Any]]:
    children: list[fork_server.Forked] = []
    environment = {"GLOO_SOCKET_IFNAME": "lo", **os.environ, "OMP_NUM_THREADS": "1"}
    words = ("-m", "tests.support.zftune.tuner.ranks.works")
    with contextlib.ExitStack() as stack:
        for rank in range(2):
            child = fork_server.Forked([*words, str(rank), folder], env=environment, cwd=ROOT)
            stack.enter_context(child)
            children.append(child)
        codes = [child.wait(420) for child in children]
        assert codes == [0, 0], "\n".join(child.stderr for child in children)
    return [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(2)]


@pytest.mark.smoke
@pytest.mark.parametrize("name", SEARCHES)
def test_both_ranks_have_the_same_knobs_and_weights_at_every_step(ranks: list[dict[str, Any]], name: str) -> None:
    first, second = (rank[name] for rank in ranks)
    assert "failed" not in first, first
    assert "failed" not in second, second
    assert first["changes"] == second["changes"]
    assert first["seen"] == second["seen"]
    assert first["digest"] == second["digest"]
    assert first["incumbent"] == second["incumbent"]
    if name != "silent":
        assert first["knobs"] == first["incumbent"]  # once all is over


@pytest.mark.smoke
def test_a_search_tries_other_settings_on_all_ranks(ranks: list[dict[str, Any]]) -> None:
    tuned = ranks[0]["tuned"]
    assert len({json.dumps(knobs) for _, knobs in tuned["changes"]}) > 1
    assert len(tuned["seen"]) > 2
    assert ranks[1]["tuned"]["trials"] is None  # rank 0 alone thinks
    assert ranks[1]["tuned"]["notices"] == []


@pytest.mark.smoke
def test_zen_auto_is_left_by_all_ranks_once_there_is_a_search(ranks: list[dict[str, Any]]) -> None:
    begun, left = ranks[1]["zen_auto"]["seen"][:2]
    assert (begun[2], left[2]) == ("auto", 4)
    step, knobs = ranks[1]["zen_auto"]["changes"][0]
    assert (step, knobs["update_interval"], knobs["apply_lag"]) == (left[0], 4, 4)
    assert step > 8  # the warm-up


@pytest.mark.smoke
def test_a_rank_that_does_not_acknowledge_voids_every_change(ranks: list[dict[str, Any]]) -> None:
    silent = ranks[0]["silent"]
    assert silent["changes"] == []
    assert len(silent["seen"]) == 1
    voids = [sentence for kind, sentence in silent["notes"] if kind == "void"]
    assert voids
    assert all("rank 1 did not acknowledge the change" in sentence for sentence in voids)


@pytest.mark.smoke
def test_knobs_that_one_rank_has_no_memory_for_are_refused_on_all(ranks: list[dict[str, Any]]) -> None:
    short = ranks[0]["short_of_memory"]
    crashed = [reason for state, reason in short["trials"] if "another rank failed at this" in reason]
    assert len(crashed) >= 1
    assert {seen[1] for seen in short["seen"]} == {0.1}


@pytest.mark.smoke
def test_a_loss_that_goes_wrong_on_one_rank_ends_it_on_all(ranks: list[dict[str, Any]]) -> None:
    first, second = (rank["wrong_elsewhere"] for rank in ranks)
    assert any("the loss of rank 1 is not a number or a spike" in sentence for _, sentence in first["notes"])
    (own,) = second["notices"]
    assert own.startswith("Training goes on with the settings at the start")
    assert first["knobs"]["topk_ratio"] == 0.1
    assert len(first["seen"]) > 2


@pytest.mark.smoke
def test_who_closes_its_tuner_ends_it_on_all_under_the_incumbent(ranks: list[dict[str, Any]]) -> None:
    first, second = (rank["closed_elsewhere"] for rank in ranks)
    assert "Tuning ended: rank 1 tunes no more." in first["notices"]
    assert second["notices"] == []
    assert first["changes"][-1][1] == first["incumbent"]
    assert first["changes"][-2][1] != first["incumbent"]


@pytest.mark.smoke
def test_a_saved_state_that_is_loaded_ends_it_on_all(ranks: list[dict[str, Any]]) -> None:
    first = ranks[0]["loaded"]
    assert "Tuning ended: a saved state was loaded, and several ranks do not go on from one." in first["notices"]
    assert first["changes"]  # another setting was tried, and the state that was loaded had the user's own
    assert first["knobs"]["topk_ratio"] == 0.1


@pytest.mark.smoke
@pytest.mark.parametrize("name", TRIED)
def test_a_setting_that_was_tried_when_the_state_was_saved_is_left_by_all_ranks_or_by_none(
    ranks: list[dict[str, Any]], name: str
) -> None:
    for rank in ranks:
        knobs, kept = rank[name]["knobs"], rank[name]["kept"]
        if name == "loaded_and_deaf" and knobs["topk_ratio"] == 0.4:  # who did not hear was the first to settle it
            assert kept["topk_ratio"] == 0.2  # so that a later save has it
        else:
            assert (knobs["topk_ratio"], kept) == (0.2, None)
    said = "Back to the best settings so far (topk_ratio 0.2): the checkpoint was saved while others were tried."
    assert (said in ranks[0][name]["notices"]) is (ranks[0][name]["knobs"]["topk_ratio"] == 0.2)
    assert said not in ranks[1][name]["notices"]


@pytest.mark.smoke
@pytest.mark.parametrize(
    ("name", "first", "second"),
    [
        ("unfit", "OSError: no disk", "BadInputError: nothing is tuned: rank 0 cannot tune, see its own message"),
        ("alone", "BadInputError: zftune.attach was called on 1 of 2 ranks; call it on all of them", ""),
        (
            "probed",
            "BadInputError: eval_fn must be None on several ranks: its flushes are one rank's",
            "BadInputError: eval_fn must be None on several ranks: its flushes are one rank's",
        ),
    ],
)
def test_what_all_ranks_have_to_do_is_done_by_all_or_refused(
    ranks: list[dict[str, Any]], name: str, first: str, second: str
) -> None:
    assert [rank[name]["error"] for rank in ranks] == [first, second]
