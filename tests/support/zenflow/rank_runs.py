"""Ranks in processes of their own that do named pieces of work, one after the other, and bring back what they found."""

from __future__ import annotations

import importlib
import os
import traceback
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch

from tests.support import fork_server, forked

Results = list[dict[str, Any]]
"""Of each rank: what it found, by the name of the work."""

ROOT = Path(__file__).parents[3]
TIMEOUT = timedelta(seconds=60)
"""After which a rank gives up the others, unless more is asked for."""


def results_of_ranks(
    folder: Path,
    module: str,
    names: Sequence[str],
    ranks: int,
    *,
    with_accelerate: bool = False,
    patience_s: float = TIMEOUT.total_seconds(),
) -> Results:
    """What each rank finds.

    Args:
        folder: where the ranks meet, and leave their results.
        module: whose `WORK` has functions of the rank by name.
        names: of the work, in order.
        ranks: how many.
        with_accelerate: their work imports Accelerate, and with it all that it finds; torch alone is there sooner.
        patience_s: after which a rank gives up the others; all of it may take twice as long.
    """
    # All are forked by the first, and all are one script: they wait for each other.
    script = f"""
import importlib, os
import torch._dynamo  # which a first step imports
from tests.support.zenflow.rank_runs import take_part
importlib.import_module({module!r})  # once, not by each rank
others = []
rank = 0
for other in range(1, {ranks}):
    process = os.fork()
    if not process:
        rank = other
        break
    others.append(process)
take_part(rank, {ranks}, {str(folder)!r}, {module!r}, {tuple(names)!r}, {patience_s})
if not rank:
    print(*(os.waitpid(process, 0)[1] for process in others))
"""
    environment = {"GLOO_SOCKET_IFNAME": "lo", **os.environ}
    if with_accelerate:
        done = fork_server.run(["-c", script], env=environment, cwd=ROOT, timeout=2 * patience_s)
    else:
        done = forked.run(script, environment=environment, warnings="default", timeout_s=2 * patience_s)
    printed = done.stdout.splitlines()  # some torch releases tell of their connections there
    assert (done.returncode, printed[-1:]) == (0, [" ".join(["0"] * (ranks - 1))]), done.stderr
    return [torch.load(folder / f"rank{rank}.pt", weights_only=True) for rank in range(ranks)]


def take_part(rank: int, ranks: int, folder: str, module: str, names: Sequence[str], patience_s: float) -> None:
    """The work of one rank."""
    torch.set_num_threads(1)
    here, work = Path(folder), importlib.import_module(module).WORK
    torch.distributed.init_process_group(
        "gloo",
        init_method=f"file://{here / 'store'}",
        rank=rank,
        world_size=ranks,
        timeout=timedelta(seconds=patience_s),
    )
    results = {}
    for name in names:
        try:
            results[name] = work[name](rank)
        except Exception as error:  # noqa: BLE001 - told to the parent
            results[name] = {"error": f"{type(error).__name__}: {error}", "trace": traceback.format_exc()}
            break  # the others are somewhere else than this one would be in the next
    torch.save(results, here / f"rank{rank}.pt")
    torch.distributed.destroy_process_group()
