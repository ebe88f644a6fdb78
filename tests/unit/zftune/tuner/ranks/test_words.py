"""What the ranks say to each other, as bytes."""

from __future__ import annotations

import random

import pytest
import torch

from zftune.tuner.ranks import MOST_TALK_BYTES, LeaderMessage, RankMessage, fill, read, room
from zftune.tuner.space import Setting


@pytest.mark.parametrize("ranks", [2, 3, 17])
def test_the_maxima_of_what_each_rank_writes_are_what_all_have_said(ranks: int) -> None:
    words = [
        RankMessage(random.randrange(2**60), random.randrange(2**40), bool(random.randrange(2)), *_two(2**50))
        for _ in range(ranks)
    ]
    setting = Setting(topk_ratio=random.random(), update_interval=7, apply_lag=random.randint(1, 7), host_threads=3)
    talk = LeaderMessage(random.randrange(1, 2**40), setting.knobs(), Setting(offload_ratio=random.random()).knobs())
    rooms = [room(ranks) for _ in words]
    for rank, word in enumerate(words):
        fill(rooms[rank], rank, word, talk if rank == 0 else None)
    heard = read(torch.stack(rooms).amax(0))
    assert heard == (words, talk)
    assert Setting.from_knobs(heard[1].knobs or {}) == setting


def _two(below: int) -> tuple[int, int]:
    return random.randrange(below), random.randrange(below)


def test_a_proposal_that_is_too_long_is_not_cut_off() -> None:
    with pytest.raises(ValueError, match="a proposal has 21"):
        fill(room(2), 0, RankMessage(1), LeaderMessage(1, {"note": "x" * (MOST_TALK_BYTES + 100)}))
