"""Two ranks: the first one finds the knobs and speaks, both have them from the same step on."""

from __future__ import annotations

import contextlib
import json
import os
from pathlib import Path

import pytest

from tests.support import fork_server
from tests.support.zftune.hiding.ranked import RANKS
from zftune.hiding import FIRST_STEPS

ROOT = Path(__file__).parents[4]


@pytest.mark.smoke
def test_both_ranks_have_the_same_knobs_from_the_same_step_on(tmp_path: Path) -> None:
    environment = {"GLOO_SOCKET_IFNAME": "lo", **os.environ, "OMP_NUM_THREADS": "1"}
    with contextlib.ExitStack() as stack:
        ranks = []
        for rank in range(RANKS):
            words = ["-m", "tests.support.zftune.hiding.ranked", str(rank), str(tmp_path)]
            ranks.append(stack.enter_context(fork_server.Forked(words, env=environment, cwd=ROOT)))
        assert [rank.wait(120) for rank in ranks] == [0, 0], "\n".join(rank.stderr for rank in ranks)
    found = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(RANKS)]
    for quality in ("exact", "published"):
        first, second = (one[quality] for one in found)
        assert first["knobs"] == second["knobs"]
        assert first["weights"] == second["weights"]
        assert first["changed"] == second["changed"]
        assert (first["changed"] > FIRST_STEPS) == (quality == "published")
        (line,) = first["lines"]
        assert ("by the planner" if quality == "published" else "--quality published") in line
        assert second["lines"] == []
