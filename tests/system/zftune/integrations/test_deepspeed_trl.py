"""TRL's trainers train under `zftune run` as with DeepSpeed alone, at stages 2 and 3, on one rank and on two."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support import fork_server, upstream_ops
from tests.support.once import once
from tests.support.zftune.integrations.trainers import furthest, tiny_model

_found = importlib.util.find_spec("trl")
if _found is None or _found.origin is None:
    pytest.skip("TRL is not installed (`make test-all` installs it)", allow_module_level=True)

TRAINERS = ["SFT", "GRPO", "RLOO", "OnlineDPO"]
if Path(_found.origin).with_name("experimental").joinpath("ppo").is_dir():
    TRAINERS.append("PPO")  # TRL 1.12 was the last to have it
LR, STEPS = 2e-3, 4  # of `trl_run`
Seen = dict[str, list[Any]]
"""What each rank saw of each trainer, or its error."""


def trained(folder: Path, stage: int, ranks: int) -> dict[str, Seen]:
    tiny_model().save_pretrained(folder / "model")  # type: ignore[operator]
    environment = {**os.environ, **upstream_ops.environment(), "ZFTUNE_DB": str(folder / "db"), "OMP_NUM_THREADS": "1"}
    module = ["-m", "tests.support.zftune.integrations.trl_run", ",".join(TRAINERS), str(stage), str(folder)]
    found: dict[str, Seen] = {}
    for name, before in {"theirs": [], "ours": ["-c", fork_server.MAIN, "run", "--", sys.executable]}.items():
        words = [*before, *module, name]
        with contextlib.ExitStack() as stack:
            begun = fork_server.ranks(ranks, words, env=environment, exec_in_place=name == "ours")
            for process in [stack.enter_context(one) for one in begun]:
                assert process.wait(900) == 0, process.stdout[-3000:] + process.stderr[-6000:]
        of_ranks = [torch.load(folder / f"{name}.{rank}.pt", weights_only=True) for rank in range(ranks)]
        found[name] = {trainer: [seen[trainer] for seen in of_ranks] for trainer in TRAINERS}
    return found


@pytest.mark.parametrize("trainer", TRAINERS)
@pytest.mark.parametrize(("stage", "ranks"), [(2, 1), (3, 1), (2, 2), (3, 2)])
def test_losses_and_weights_are_deepspeeds(
    tmp_path_factory: pytest.TempPathFactory, stage: int, ranks: int, trainer: str
) -> None:
    upstream_ops.need()
    seen = once(tmp_path_factory, f"trl-{stage}-{ranks}", lambda folder: trained(folder, stage, ranks))
    kind = "DeepSpeedZeroOptimizer_Stage3" if stage == 3 else "DeepSpeedZeroOptimizer"
    for theirs, ours in zip(seen["theirs"][trainer], seen["ours"][trainer], strict=True):
        assert not isinstance(theirs, str), theirs
        assert not isinstance(ours, str), ours
        assert (theirs["optimizer"], ours["optimizer"]) == (kind, "EngineOptimizer")
        assert len(ours["losses"]) == STEPS
        for loss, other in zip(ours["losses"], theirs["losses"], strict=True):
            assert loss == pytest.approx(other, rel=1e-4, abs=1e-5)
        assert furthest(ours["weights"], theirs["weights"]) < 5e-2 * LR
        assert furthest(ours["weights"], ours["begun"]) > LR
