"""A rank of DeepSpeed's engine is killed: the others end, and what was saved goes on (`ZFTUNE_KILLS=100`: often)."""

from __future__ import annotations

import os
import random
import re
import signal
import socket
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.support import fork_server, upstream_ops
from tests.support.tiers import fast
from tests.support.zftune.integrations.ds_ends import EVERY, TIMEOUT

ROOT = Path(__file__).parents[4]
SCRIPT = ["-m", "tests.support.zftune.integrations.ds_ends"]
STEPS = 8
RANKS = 2
KILLS = int(os.environ.get("ZFTUNE_KILLS", fast("1", all_of="6")))
GIVE_UP_S = 5 * TIMEOUT.total_seconds()
MOMENTS = {0: 17, 1: 5}
"""By rank, how many there are while it saves once, for `ds_ends`."""
HALF_A_MODEL = (0, 15)

Losses = dict[int, float]
"""By the number of a step: the mean over all ranks."""


def environment(folder: Path) -> dict[str, str]:
    own = {"ZFTUNE_DB": str(folder / "z.db"), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    return {**os.environ, **upstream_ops.environment(), **own}


def trained(folder: Path, ranks: int, *more: str) -> tuple[list[int], Losses, str]:
    """Exit codes, the steps that all ranks have done, and what the first says of errors."""
    words = [*SCRIPT, str(folder / "saved"), str(STEPS), *more]
    with ExitStack() as stack:
        begun = [stack.enter_context(one) for one in fork_server.ranks(ranks, words, env=environment(folder), cwd=ROOT)]
        codes = [one.wait(GIVE_UP_S) for one in begun]
        told = [steps_of(one.stdout) for one in begun]
        errors = begun[0].stderr
    common = [number for number in told[0] if all(number in one for one in told)]
    return codes, {number: sum(one[number] for one in told) / ranks for number in common}, errors


def steps_of(said: str) -> Losses:
    return {int(number): float(loss) for number, loss in re.findall(r"^step (\d+) (\S+)$", said, re.MULTILINE)}


@pytest.fixture(scope="module", params=fast((3,), all_of=(3, 2)))
def stage(request: pytest.FixtureRequest) -> str:
    """Words for `ds_ends`."""
    return f"--stage={request.param}"


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory: pytest.TempPathFactory, stage: str) -> Losses:
    codes, losses, errors = trained(tmp_path_factory.mktemp("unbroken"), RANKS, stage)
    assert codes == [0] * RANKS, errors
    assert list(losses) == list(range(1, STEPS + 1))
    return losses


def test_a_rank_killed_in_training_ends_the_others_and_it_goes_on(tmp_path: Path, unbroken: Losses, stage: str) -> None:
    for number in range(KILLS):
        folder = tmp_path / str(number)
        folder.mkdir()
        rng = random.Random(number)
        victim, moment = rng.randrange(RANKS), rng.randint(1, 24)  # in one of the steps up to the last
        codes, losses, _ = trained(folder, RANKS, str(victim), f"--moment=-{moment}", stage)
        assert codes[victim] == -signal.SIGKILL
        assert all(codes)
        assert losses == {step: unbroken[step] for step in losses}
        goes_on(folder, unbroken, (RANKS, 1, 4)[number % 3], stage)


def test_a_rank_killed_while_it_saves_leaves_a_whole_checkpoint(tmp_path: Path, unbroken: Losses, stage: str) -> None:
    moments = [(rank, moment) for rank, last in MOMENTS.items() for moment in of_stage(stage, last)]
    for number, (victim, moment) in enumerate(fast([HALF_A_MODEL], all_of=moments)):
        folder = tmp_path / str(number)
        folder.mkdir()
        codes, _, errors = trained(folder, RANKS, str(victim), f"--moment={moment}", stage)
        assert codes[victim] == -signal.SIGKILL, errors
        assert all(codes)
        goes_on(folder, unbroken, (1, RANKS, 4)[number % 3], stage)


def of_stage(stage: str, last: int) -> range:
    """Every other moment: both stages save by the same code, so that each moment is one stage's."""
    return range(1 if stage == "--stage=3" else 2, last + 1, 2)


def goes_on(folder: Path, unbroken: Losses, ranks: int, stage: str) -> None:
    """From what `latest` names: to the bit on as many ranks, within rounding on others."""
    codes, losses, errors = trained(folder, ranks, stage)
    assert codes == [0] * ranks, errors
    assert min(losses) - 1 in range(EVERY, STEPS, EVERY)
    expected = {step: unbroken[step] for step in range(min(losses), STEPS + 1)}
    assert losses == (expected if ranks == RANKS else pytest.approx(expected, rel=1e-4))


def test_a_tag_that_was_half_overwritten_is_no_checkpoint(tmp_path: Path, unbroken: Losses, stage: str) -> None:
    """Where a script saves under one tag again and again, it goes on from one step or is told; never from two."""
    refused = 0
    for moment in of_stage(stage, MOMENTS[0]):
        folder = tmp_path / str(moment)
        folder.mkdir()
        codes, _, _ = trained(folder, RANKS, "0", f"--moment={moment}", "--tag=one", stage)
        assert all(codes)
        codes, losses, errors = trained(folder, RANKS, "--tag=one", stage)
        if any(codes):
            refused += "is of two steps" in errors
            assert not losses
        else:
            assert losses == {step: unbroken[step] for step in range(min(losses), STEPS + 1)}
    assert refused


@pytest.mark.parametrize("launcher", ["torchrun", "deepspeed"])
def test_the_launcher_ends_too(tmp_path: Path, launcher: str) -> None:
    """In interpreters of their own, under `zftune run`; what torchrun begins goes on afterwards."""
    upstream_ops.need()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    words = {
        "torchrun": [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(RANKS)],
        "deepspeed": [
            sys.executable,
            "-m",
            "deepspeed.launcher.runner",
            "--num_gpus",
            str(RANKS),
            "--master_port",
            port,
            "--module",
        ],
    }[launcher]
    module = SCRIPT if launcher == "torchrun" else SCRIPT[1:]
    saved = [*module, str(tmp_path / "saved"), str(STEPS)]
    runs: list[tuple[list[str], bool]] = [(["1", "--moment=-5"], False), ([], True)]
    for more, code_is_0 in runs if launcher == "torchrun" else runs[:1]:
        done = subprocess.run(
            [sys.executable, "-c", fork_server.MAIN, "run", "--", *words, *saved, *more],
            env=environment(tmp_path),
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=False,
            timeout=300,
        )
        assert (done.returncode == 0) is code_is_0, done.stderr[-4000:]
        assert (tmp_path / "saved" / "latest").exists()
    assert (f"step {STEPS} " in done.stdout) is code_is_0
