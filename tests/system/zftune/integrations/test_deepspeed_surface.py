"""What a script finds on engine and optimizer with the backend zenflow, beside the installed DeepSpeed alone."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from tests.support import fork_server, upstream_ops
from tests.support.once import once
from tests.support.tiers import fast
from tests.support.zftune.integrations.ds_surface import (
    ANSWERS,
    OF_ANOTHER_MEANING,
    REFUSED,
    SAME,
    STAND_INS,
)

pytestmark = pytest.mark.smoke
STAGES = fast(("3",), all_of=("1", "2", "3"))
Seen = dict[str, dict[str, Any]]


def looked(folder: Path) -> Seen:
    out = folder / "seen.json"
    environment = {**os.environ, **upstream_ops.environment(), "ZFTUNE_DB": str(folder / "db"), "OMP_NUM_THREADS": "1"}
    words = ["-m", "tests.support.zftune.integrations.ds_surface", str(out), *STAGES]
    (begun,) = fork_server.ranks(1, words, env=environment)
    with begun:
        assert begun.wait(250) == 0, begun.stdout[-3000:] + begun.stderr[-6000:]
    found: Seen = json.loads(out.read_text())
    return found


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> Seen:
    upstream_ops.need()
    return once(tmp_path_factory, "surface", looked)


@pytest.mark.parametrize("stage", STAGES)
def test_each_public_name_of_their_optimizers_is_there_or_refused_by_a_sentence(seen: Seen, stage: str) -> None:
    found = seen[stage]["optimizer"]
    assert found.keys() - SAME - STAND_INS - OF_ANOTHER_MEANING - REFUSED == set()
    missing = {name for name, said in found.items() if said is not None}
    of_fp16, of_stage_3 = {"overflow"}, {"parameter_offload"} if stage != "3" else set()
    assert missing == (found.keys() & REFUSED) | of_fp16 | of_stage_3
    for name in missing - of_fp16:
        assert found[name] == (
            f"engine.optimizer has no '{name}' with the backend zenflow, whose optimizer has no parts of ZeRO's: use "
            "what torch's optimizers have, or the accessors in deepspeed.utils, or "
            'set "zftune": {"backend": "deepspeed"}'
        )


@pytest.mark.parametrize("stage", STAGES)
def test_the_engine_answers_what_deepspeeds_own_does(seen: Seen, stage: str) -> None:
    theirs, ours = seen[stage]["answers"]
    assert theirs.keys() == ours.keys()
    others = {name for name in theirs if theirs[name] != ours[name]}
    assert others - ANSWERS == set()
    assert (theirs["zero_optimization_stage"], ours["zero_optimization_stage"]) == (int(stage), 0)
    assert ours["config"]["zero_optimization"]["stage"] == int(stage)


@pytest.mark.parametrize("stage", STAGES)
def test_a_training_that_sleeps_between_steps_goes_on_as_one_that_does_not(seen: Seen, stage: str) -> None:
    theirs, ours = seen[stage]["losses"]
    assert ours == pytest.approx(theirs, rel=1e-6)


@pytest.mark.parametrize("stage", STAGES)
def test_step_hooks_of_the_scripts_optimizer_run_once_a_step(seen: Seen, stage: str) -> None:
    theirs, ours = seen[stage]["hooks"]
    assert ours == [["before", 1e-2], ["after", 1e-2], ["before", 1e-2], ["after", 1e-2], ["before", 0.25]]
    assert ours == theirs
