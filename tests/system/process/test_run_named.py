"""A script of DeepSpeed's under each launcher: trained on zenflow, or left alone."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support import fork_server, tiers, upstream_ops

PYTHON = sys.executable
TRAINED: dict[str, Any] = {
    "train_batch_size": 2,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
    "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}},
}
LAUNCHERS: dict[str, tuple[str, ...]] = {
    "python": (PYTHON,),
    "deepspeed": (PYTHON, "-m", "deepspeed.launcher.runner", "--num_gpus", "1"),
    "torchrun": (PYTHON, "-m", "torch.distributed.run", "--nproc-per-node", "1", "--standalone"),
    "accelerate": (PYTHON, "-m", "accelerate.commands.launch", "--config_file", "acc.yaml"),
}
YAML = """
distributed_type: DEEPSPEED
num_processes: 1
num_machines: 1
machine_rank: 0
use_cpu: false
deepspeed_config:
  deepspeed_config_file: ds.json
"""
SCRIPT = """
open("began", "a").close()
import argparse, os
import deepspeed, torch

parser = deepspeed.add_config_arguments(argparse.ArgumentParser())
parser.add_argument("--local_rank", type=int)
args = parser.parse_args()
model = torch.nn.Linear(8, 8)
weights = [parameter.detach().clone() for parameter in model.parameters()]
if "ACCELERATE_USE_DEEPSPEED" in os.environ:
    from accelerate import Accelerator
    from accelerate.utils import DummyOptim
    accelerator = Accelerator()
    data = torch.utils.data.DataLoader(torch.randn(2, 8), batch_size=2)
    engine, *_ = accelerator.prepare(model, DummyOptim(model.parameters()), data)
else:
    engine, *_ = deepspeed.initialize(args=args, model=model, model_parameters=model.parameters())
for _ in range(2):
    engine.backward(engine(torch.randn(2, 8)).square().mean())
    engine.step()
assert not any(torch.equal(*pair) for pair in zip(weights, model.parameters()))
print("trained")
"""


def run(folder: Path, config: dict[str, Any], launcher: str) -> subprocess.CompletedProcess[str]:
    for name, text in {"train.py": SCRIPT, "acc.yaml": YAML, "ds.json": json.dumps(config)}.items():
        (folder / name).write_text(text)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    environment = {**os.environ, **upstream_ops.environment(), "HF_HOME": "cache", "OMP_NUM_THREADS": "1"}
    environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "ZFTUNE_DB": str(folder / "z.db")}
    if launcher == "python":
        environment |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
    names = () if launcher == "accelerate" else ("--deepspeed", "--deepspeed_config", "ds.json")
    command = [*LAUNCHERS[launcher], "train.py", *names]
    return fork_server.zftune("run", "--", *command, env=environment, cwd=folder, timeout=300)


@pytest.mark.smoke
@pytest.mark.parametrize(
    ("launcher", "left"),
    tiers.fast(
        [("python", False)],
        all_of=[*((launcher, False) for launcher in LAUNCHERS), ("python", True), ("accelerate", True)],
    ),
)
def test_it_trains_as_it_is(tmp_path: Path, launcher: str, left: bool) -> None:
    upstream_ops.need()
    config = {**TRAINED, "zero_optimization": {"stage": 1}} if left else TRAINED
    config = {
        **config,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, **({"torch_adam": True} if left else {})}},
    }
    done = run(tmp_path, config, launcher)
    said = done.stdout + done.stderr
    assert done.returncode == 0, said[-3000:]
    assert done.stdout.count("trained\n") == 1
    assert said.count("left to DeepSpeed: zero_optimization.offload_optimizer is not there") == left
    assert said.count("zftune: backend zenflow, quality exact") == (not left)
