"""One of four ranks over FSDP2 is killed, stopped or gets no more memory: the others end, and nothing is lost.

`ZFTUNE_KILLS=100` does it more often.
"""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.support import fork_server
from tests.support.tiers import fast
from tests.support.zenflow.fsdp_ends import EVERY, FOLDER, LAST, TIMEOUT, undisturbed
from tests.support.zenflow.rank_runs import ROOT, results_of_ranks

KILLS = int(os.environ.get("ZFTUNE_KILLS", fast("1", all_of="12")))
RANKS = 4
ENDS = (signal.SIGKILL, signal.SIGSTOP, signal.SIGUSR1)
ELSEWHERE = (3, 8)
"""Ranks that go on: uneven shares, and ranks without rows."""
SCRIPT = "from tests.support.zenflow.fsdp_ends import train; train()"
GIVE_UP_S = 10 * TIMEOUT.total_seconds()


@pytest.fixture(scope="module")
def expected() -> dict[str, Tensor]:
    return undisturbed()


@contextmanager
def training(folder: Path) -> Iterator[list[fork_server.Forked]]:
    shared = {**os.environ, FOLDER: str(folder), "GLOO_SOCKET_IFNAME": "lo", "WORLD_SIZE": str(RANKS)}
    with ExitStack() as stack:
        yield [
            stack.enter_context(fork_server.Forked(["-c", SCRIPT], env={**shared, "RANK": str(rank)}, cwd=ROOT))
            for rank in range(RANKS)
        ]


@pytest.mark.smoke
@pytest.mark.parametrize("moment", range(KILLS))
def test_a_rank_that_is_killed_stopped_or_exhausted_ends_the_others_and_nothing_is_lost(
    moment: int, expected: dict[str, Tensor], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = random.Random(moment)
    victim, how = rng.randrange(RANKS), ENDS[moment % len(ENDS)]
    with training(tmp_path) as ranks:
        ranks[0].line(EVERY)  # there is a checkpoint
        time.sleep(rng.uniform(0.0, 2.0))
        ranks[victim].send_signal(how)
        for rank, process in enumerate(ranks):
            if rank != victim or how != signal.SIGSTOP:
                process.wait(GIVE_UP_S)
        ranks[victim].kill()  # as a launcher does
        codes = [process.returncode for rank, process in enumerate(ranks) if rank != victim]
        done = [process.stdout.count("\n") for process in ranks]
    assert all(codes) or min(done) == LAST, (codes, done)
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith("checkpoint")]
    monkeypatch.setenv(FOLDER, str(tmp_path))
    (tmp_path / "store").unlink()
    results = results_of_ranks(
        tmp_path, "tests.support.zenflow.fsdp_ends", ["resumed"], ELSEWHERE[moment % len(ELSEWHERE)]
    )
    for result in results:
        assert "error" not in result["resumed"], result["resumed"]["trace"]
        # Of what all ranks have done at most the last interval is lost.
        assert min(done) - EVERY <= result["resumed"]["begun"] <= max(done) + 1
        for name, value in expected.items():
            torch.testing.assert_close(result["resumed"]["weights"][name], value, rtol=0.0, atol=2e-4, msg=name)
