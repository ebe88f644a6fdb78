"""`zftune run --online -- torchrun` and `-- accelerate launch`: two real ranks, a private daemon, and a replay."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.support import fork_server
from tests.support.zftune.daemon.daemons import end_private, short_folder
from zftune.daemon.client.http import DaemonClient

ZFTUNE = str(Path(sys.executable).with_name("zftune"))
TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
SCRIPT = """
import hashlib, json, os, sys, time
import torch, zenflow, zftune
from torch import nn

distributed = torch.distributed
distributed.init_process_group("gloo")
rank = distributed.get_rank()
open(f"pid{rank}", "w").write(str(os.getpid()))
steps, changes = int(sys.argv[1]), int(sys.argv[2])
torch.manual_seed(rank)  # rank 0's weights count
module = nn.Sequential(nn.Linear(32, 64, bias=False), nn.Tanh(), nn.Linear(64, 8, bias=False))
config = zenflow.ZenFlowConfig(topk_ratio=0.1, update_interval=4, host_threads=1)
optimizer = zenflow.ZenFlowAdamW(module.parameters(), lr=1e-5, config=config, module=module)
batches = torch.Generator().manual_seed(7 + rank)
ends = time.monotonic() + 120
knobs = []

def settings():
    found = json.load(open("schedule.json"))["steps"][1:]
    return len({json.dumps(one["knobs"], sort_keys=True) for one in found})

while True:
    goes_on = optimizer.steps < steps or bool(changes and (optimizer.steps % 20 or settings() < changes))
    going = torch.tensor([int(goes_on)])
    distributed.broadcast(going, 0)
    if not going:
        break
    assert time.monotonic() < ends
    loss = module(torch.randn(16, 32, generator=batches)).square().mean() + 1
    zftune.log_loss(loss)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    if not knobs or knobs[-1][1] != repr(optimizer.config):
        knobs.append([optimizer.steps, repr(optimizer.config)])
    if changes:
        time.sleep(0.002)
digest = hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in module.parameters())).hexdigest()
json.dump([optimizer.steps, digest, knobs], open(f"rank{rank}.json", "w"))
distributed.destroy_process_group()
"""

SHARDED = """
from accelerate import Accelerator, FullyShardedDataParallelPlugin, PartialState
from accelerate.utils import DistributedType

PartialState(cpu=True).distributed_type = DistributedType.MULTI_GPU  # else Accelerate does not shard on CPUs
accelerator = Accelerator(cpu=True, fsdp_plugin=FullyShardedDataParallelPlugin(fsdp_version=2))
module, prepared = accelerator.prepare(module, optimizer)
assert accelerator.is_fsdp2 and prepared.optimizer is optimizer
"""
ACCELERATED = SCRIPT.replace("batches = torch.Generator()", f"{SHARDED.strip()}\nbatches = torch.Generator()").replace(
    "p.detach().numpy()", "p.detach().full_tensor().numpy()"
)
"""The same over FSDP2 as Accelerate makes it."""
FSDP2 = """
compute_environment: LOCAL_MACHINE
distributed_type: FSDP
num_machines: 1
num_processes: 2
mixed_precision: "no"
main_process_port: 0
fsdp_config: {fsdp_version: 2}
"""
LAUNCHERS = {
    "torchrun": (SCRIPT, TORCHRUN),
    "accelerate": (
        ACCELERATED,
        (sys.executable, "-m", "accelerate.commands.accelerate_cli", "launch", "--config_file", "fsdp2.yaml"),
    ),
}


@pytest.fixture
def folder() -> Iterator[Path]:
    """With the script, a store and a socket of its own; a daemon there is ended."""
    with short_folder() as made:
        (made / "train.py").write_text(SCRIPT)
        yield made
        end_private(made)


def environment(folder: Path) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("ZFTUNE_", "XDG_"))}
    own = {"ZFTUNE_SOCKET": str(folder / "z.sock"), "ZFTUNE_DB": str(folder / "z.db"), "OMP_NUM_THREADS": "1"}
    return {"GLOO_SOCKET_IFNAME": "lo", **kept, **own}


def start(folder: Path, launcher: Sequence[str], *words: str) -> subprocess.Popen[str]:
    options, _, command = " ".join(words).partition(" -- ")
    return subprocess.Popen(
        [ZFTUNE, "run", *options.split(), "--", *launcher, *command.split()],
        env=environment(folder),
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@contextlib.contextmanager
def forked(folder: Path, *words: str) -> Iterator[list[fork_server.Forked]]:
    """Two ranks of a launcher that starts `zftune run` for each, and leaves alone what is left of them."""
    options, _, command = " ".join(words).partition(" -- ")
    line = ["-c", fork_server.MAIN, "run", *options.split(), "--", sys.executable, *command.split()]
    with contextlib.ExitStack() as stack:
        begun = fork_server.ranks(2, line, env=environment(folder), cwd=folder, exec_in_place=True)
        yield [stack.enter_context(one) for one in begun]


def told(folder: Path, process: subprocess.Popen[str]) -> tuple[list[Any], str]:
    _, errors = process.communicate(timeout=200)
    assert process.returncode == 0, errors
    return seen(folder), errors


def seen(folder: Path) -> list[Any]:
    return [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(2)]


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_two_ranks_are_tuned_alike_and_replayed_bit_for_bit(folder: Path, launcher: str) -> None:
    script, launch = LAUNCHERS[launcher]
    (folder / "train.py").write_text(script)
    (folder / "fsdp2.yaml").write_text(FSDP2)
    options = ("--online", "--export-schedule", "schedule.json")
    tuned, errors = told(folder, start(folder, launch, *options, "--", "train.py 40 3"))
    steps, digest, knobs = tuned[0]
    assert tuned[1] == tuned[0]  # weights, and knobs at every step
    assert len({repr(one) for _, one in knobs}) > 2
    assert errors.count(" with quality published: ") == 1
    assert errors.count("\nzftune keeps ") + errors.count("\nzftune tuned nothing") == 1
    with DaemonClient(folder / "z.sock") as client:
        (run,) = client.get("/v1/runs")
        assert client.get("/v1/health")["private"] is True
    assert run["pid"] == int((folder / "pid0").read_text())

    for rank in range(2):
        (folder / f"rank{rank}.json").unlink()
    with forked(folder, "--schedule", "schedule.json", "--", f"train.py {steps} 0") as ranks:
        assert [one.wait(200) for one in ranks] == [0, 0], ranks[0].stderr
        assert seen(folder) == [[steps, digest, knobs]] * 2
        assert all("tunes" not in one.stderr for one in ranks)


def test_knobs_of_a_schedule_hold_on_all_ranks_over_fsdp2(folder: Path) -> None:
    (folder / "train.py").write_text(ACCELERATED)
    changes = {"zftune_schedule": 1, "steps": [{"after_step": 5, "knobs": {"topk_ratio": 0.4, "apply_lag": 1}}]}
    (folder / "schedule.json").write_text(json.dumps(changes))
    with forked(folder, "--schedule", "schedule.json", "--", "train.py 12 0") as ranks:
        assert [one.wait(200) for one in ranks] == [0, 0], ranks[0].stderr
    (steps, digest, knobs), second = seen(folder)
    assert (steps, [at for at, _ in knobs]) == (12, [1, 6])
    assert "topk_ratio=0.4" in knobs[-1][1]
    assert second == [steps, digest, knobs]


def test_where_a_rank_is_killed_the_others_do_not_hang(folder: Path) -> None:
    schedule = folder / "schedule.json"
    with forked(folder, "--online", "--export-schedule", schedule.name, "--", "train.py 1000000 1") as ranks:
        ends = time.monotonic() + 120
        while not schedule.exists() or len(json.loads(schedule.read_text())["steps"]) < 2:
            assert time.monotonic() < ends
            assert ranks[0].poll() is None, ranks[0].stderr
            time.sleep(0.02)
        ranks[1].kill()
        assert ranks[0].wait(60) != 0, ranks[0].stderr
